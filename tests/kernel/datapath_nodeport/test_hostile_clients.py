"""Clients outside that a service rejects, with arbitrary packets, and floods of clients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from cells.maps.specs import MapSizes
from cells.services import ServiceFlag
from cells.services.map_entries import source_range_key
from tests.kernel.datapath.world import REDIRECT, A
from tests.kernel.datapath_nodeport.world import (
    CLIENT,
    CLIENT_MAC,
    ELSEWHERE,
    NODE_PORT,
    OWN_MAC,
    SERVICE,
    NodePortWorld,
    segment,
)
from tests.kernel.datapath_services.services import Backend
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

HERE = {4: A.ip, 6: A.ip6}
STRANGER = {4: "203.0.113.66", 6: "2001:db8:bad::1"}
FLAGS = ServiceFlag.ROUTABLE | ServiceFlag.NODE_PORT
ROOM = 512
"""Rows of a small map of clients."""
FRAME = partial(Ether, src=CLIENT_MAC, dst=OWN_MAC)
TAGGED = (
    FRAME(),
    FRAME() / Dot1Q(vlan=0),
    FRAME() / Dot1Q(vlan=0) / Dot1Q(vlan=0),
    FRAME() / Dot1AD(vlan=0) / Dot1Q(vlan=0),
    FRAME() / Dot1Q(vlan=5),
)
OPTIONS = (b"", b"\x01" * 4, b"\x94\x04\x00\x00", b"\x83\x07\x04\x0a\x01\x00\x0b\x00", b"\x44\x28\x05\x00")
PARTS: tuple[dict[str, Any], ...] = (
    {},
    {"flags": "MF", "id": 7},
    {"frag": 1, "id": 7},
    {"frag": 3, "flags": "MF", "id": 7},
)
EXTENSIONS = (
    IPv6ExtHdrHopByHop(),
    IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt(),
    IPv6ExtHdrRouting(addresses=[SERVICE[6]], segleft=1),
    IPv6ExtHdrFragment(id=7),
    IPv6ExtHdrFragment(id=7, m=1),
    IPv6ExtHdrFragment(id=7, offset=1),
    IPv6ExtHdrHopByHop() / IPv6ExtHdrFragment(id=7, m=1),
)


def heads(source: str) -> Iterator[Packet]:
    """Network headers to the service: with options or extension headers, and of fragments of one datagram."""
    if ":" in source:
        for extension in EXTENSIONS:
            yield IPv6(src=source, dst=SERVICE[6]) / extension
        yield IPv6(src=source, dst=SERVICE[6])
        return
    for options, part in product(OPTIONS, PARTS):
        yield IP(src=source, dst=SERVICE[4], options=[options] if options else [], **part)


def odd_frames(source: str) -> Iterator[bytes]:
    """To the service, with every tag and header."""
    transports = [TCP(sport=33333, dport=NODE_PORT, flags=flags) for flags in ("S", "A", "R")]
    transports.append(UDP(sport=33333, dport=NODE_PORT))
    for frame, head, transport in product(TAGGED, heads(source), transports):
        yield bytes(frame / head / transport / Raw(bytes(64)))


def delivers(world: NodePortWorld, frame: bytes, backend: str) -> bool:
    """Whether a frame is passed on to the backend, here or by the stack."""
    outcome = world.device_gets(frame)
    return outcome.action == REDIRECT or ip_address(backend).packed in bytes(outcome.packet)


@pytest.mark.parametrize("version", [4, 6])
def test_no_odd_packet_passes_the_source_ranges(world: NodePortWorld, version: int) -> None:
    """Neither does a later fragment with the number of a datagram that a listed client has started."""
    here = HERE[version]
    flags = FLAGS | ServiceFlag.SOURCE_RANGE
    world.services.serve(SERVICE[version], [Backend(1, here)], port=NODE_PORT, flags=flags)
    where = source_range_key(1, ip_network(CLIENT[version]))
    world.maps[where.map].update(where.key, b"\0")
    passed = sum(delivers(world, frame, here) for frame in odd_frames(CLIENT[version]))
    assert passed > 50, "such packets of a client that is listed are served"
    wrong = [frame for frame in odd_frames(STRANGER[version]) if delivers(world, frame, here)]
    assert not wrong, wrong[0].hex()


class FewClients(NodePortWorld):
    """With room for few clients with affinity."""

    sizes = MapSizes(ct_tcp=4096, ct_any=4096, policy=256, lb_affinity=ROOM)


@pytest.fixture(scope="module")
def few() -> Iterator[NodePortWorld]:
    need_root()
    with FewClients() as world:
        yield world


@pytest.mark.parametrize("version", [4, 6])
def test_a_flood_of_clients_with_affinity_moves_no_open_connection(few: NodePortWorld, version: int) -> None:
    """A client that comes again may get another backend then, and stays with that one."""
    few.reset()
    backends = [Backend(number, ELSEWHERE[version].format(number)) for number in range(1, 9)]
    flags = FLAGS | ServiceFlag.AFFINITY
    few.services.serve(SERVICE[version], backends, port=NODE_PORT, flags=flags, timeout=100)
    ports = iter(range(20000, 60000))

    def comes(client: str, port: int = 0, kind: str = "tcp", flags: str = "S") -> str:
        packet = segment(kind, client, SERVICE[version], port or next(ports), NODE_PORT, flags)
        outcome = few.client_sends(packet)
        assert outcome.action == REDIRECT
        return str(outcome.packet[IP if version == 4 else IPv6].dst)

    regular = {comes(CLIENT[version]) for _ in range(20)} | {comes(CLIENT[version], kind="udp")}
    assert regular == {comes(CLIENT[version], 1000)}, "by its address alone"
    assert len({comes(each) for each in crowd(version, 40)}) > 1, "others get others"
    table = few.maps[f"cilium_lb{version}_affinity"]
    like = next(key for key, _ in table.items())
    value = table.lookup(like)
    assert value is not None
    for client in crowd(version, 4 * ROOM):
        address = ip_address(client).packed
        table.update(address + like[len(address) :], value)
    assert len(list(table.items())) <= ROOM
    assert {comes(CLIENT[version], 1000, flags="A")} == regular
    assert len({comes(CLIENT[version]) for _ in range(20)}) == 1


def crowd(version: int, count: int) -> Iterator[str]:
    """So many clients."""
    first = ip_address({4: "198.18.0.1", 6: "2001:db8:c::1"}[version])
    return (str(first + number) for number in range(count))
