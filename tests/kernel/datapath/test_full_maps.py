"""With full maps, denied traffic stays denied, and new flows find room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
from scapy.layers.inet import IP, UDP, fragment
from scapy.packet import Packet, Raw

from cells.maps.bpf import BpfError
from cells.maps.map import Map, MapSpec, create_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import LxcKey, PolicyEntry, PolicyKey
from cells.maps.records.flows import CtKey
from cells.maps.specs import MapSizes, map_specs
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import EGRESS, INGRESS, OUTSIDE, REDIRECT, A, B, World
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

ROOM = 512
"""Entries of the small world's maps of flows."""
ONLY_OUT = [(PolicyKey(0, egress=True), PolicyEntry())]
FROM_A = [(PolicyKey(A.identity, egress=False), PolicyEntry())]
SIZES = MapSizes(ct_tcp=ROOM, ct_any=ROOM, policy=256, fragments=ROOM)


class SmallWorld(World):
    """With room for few flows."""

    sizes = SIZES


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[World]:
    need_root()
    with SmallWorld() as world:
        yield world


def flood(table: Map, like: bytes, at: int) -> None:
    """Four times as many rows as there is room for, as others' packets leave them, numbered at this place."""
    value, key = table.lookup(like), bytearray(like)
    assert value is not None
    for number in range(1000, 1000 + 4 * ROOM):
        key[at : at + 2] = number.to_bytes(2, "big")
        table.update(bytes(key), value)
    assert len(list(table.items())) <= ROOM


@pytest.mark.parametrize(("a", "b"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_a_full_conntrack_map_evicts_unused_flows(world: World, a: str, b: str) -> None:
    """A flood pushes out what had one packet, not what is used; and nothing passes that policy denies."""
    world.allow(A, ONLY_OUT)

    def asks(port: int) -> Packet:
        return from_pod(A) / tcp(a, b, "A", sport=port)

    def answer(port: int) -> Packet:
        return from_pod(B) / tcp(b, a, "A", sport=80, dport=port)

    table = world.maps["cilium_ct6_global" if ":" in a else "cilium_ct4_global"]
    for _ in range(3):
        assert world.pod_sends(A, asks(6)).action == REDIRECT
        assert world.pod_sends(B, answer(6)).action == REDIRECT
    (like, *_) = [key for key, _ in table.items()]
    assert world.pod_sends(A, asks(5)).action == REDIRECT
    flood(table, like, len(like) - 4)
    for key in [key for key, _ in table.items() if CtKey.unpack(key).sport == 5]:
        table.delete(key)  # the kernel has chosen others
    assert world.pod_sends(B, answer(6)).action == REDIRECT
    assert world.pod_sends(B, answer(5)).dropped == (133, INGRESS)
    assert world.pod_sends(B, answer(7)).dropped == (133, INGRESS), "nobody has asked"
    assert world.pod_sends(A, asks(5)).action == REDIRECT
    assert world.pod_sends(B, answer(5)).action == REDIRECT


def test_without_room_for_the_first_fragment_later_ones_are_dropped(world: World) -> None:
    first, later = fragment(IP(src=A.ip, dst=B.ip, id=7) / UDP(dport=53) / Raw(bytes(2000)), 1400)
    assert world.pod_sends(A, from_pod(A) / first).action == REDIRECT
    table = world.maps["cilium_ipv4_frag_datagrams"]
    ((like, _),) = table.items()
    flood(table, like, 8)
    assert world.pod_sends(A, from_pod(A) / later).dropped == (175, EGRESS)
    assert world.pod_sends(A, from_pod(A) / first).action == REDIRECT
    assert world.pod_sends(A, from_pod(A) / later).action == REDIRECT


def small_ipcache() -> MapSpec:
    """For one network alone."""
    found = map_specs(SIZES, preallocate=False, cpus=1)["ipcache"]
    return MapSpec("cilium_ipcache", found.type, found.key_size, found.value_size, 1, found.flags)


def test_an_address_without_room_in_the_ipcache_is_world(world: World) -> None:
    """Rules that name the pod hold neither to allow nor to deny: docs/understand/datapath.md."""
    with create_map(small_ipcache()) as table:
        table.update(IpcacheKey.of(ip_network("203.0.113.0/24")).pack(), IpcacheValue(4242).pack())
        with pytest.raises(BpfError, match=r"cilium_ipcache.*: it is full \(ENOSPC\)"):
            table.update(IpcacheKey.of(ip_network(f"{OUTSIDE}/32")).pack(), IpcacheValue(4243).pack())
    asks = from_host() / udp(OUTSIDE, B.ip)
    for identity, deny, passes in ((4243, False, False), (2, False, True)):
        world.allow(B, [(PolicyKey(identity, egress=False), PolicyEntry(deny=deny))])
        assert (world.host_sends(asks).action == REDIRECT) is passes
    world.allow(
        B, [(PolicyKey(2, egress=False), PolicyEntry()), (PolicyKey(4243, False), PolicyEntry(deny=True))]
    )
    assert world.host_sends(asks).action == REDIRECT
    world.identify(f"{OUTSIDE}/32", 4243)
    assert world.host_sends(asks).dropped == (181, INGRESS)


@pytest.mark.parametrize(("a", "b"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_an_address_that_another_pod_gets_at_once_has_the_flows_of_none(world: World, a: str, b: str) -> None:
    """The agent forgets a pod's flows before its address is given away; policy is asked if it did not."""
    world.allow(B, FROM_A)
    asks, answer = from_pod(A) / tcp(a, b, "A"), from_pod(B) / tcp(b, a, "A", sport=80, dport=40000)
    for _ in range(3):
        assert world.pod_sends(A, asks).action == REDIRECT
        assert world.pod_sends(B, answer).action == REDIRECT
    heir = replace(A, identity=1999)
    for ip in (A.ip, A.ip6):
        world.maps["cilium_lxc"].update(LxcKey(ip_address(ip)).pack(), heir.address().pack())
        world.identify(ip, heir.identity)
    assert world.pod_sends(heir, asks).dropped == (133, INGRESS)
    assert world.pod_sends(B, answer).dropped == (133, EGRESS)
