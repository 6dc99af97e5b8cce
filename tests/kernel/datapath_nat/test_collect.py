"""NAT entries are deleted with the conntrack entries of their flows."""

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from scapy.layers.inet import UDP

from cells.datapath.collector import ConntrackCollector
from tests.kernel.datapath.world import NODE, OUTSIDE, OUTSIDE6, A, B, World
from tests.kernel.datapath_nat.masqueraded import NAT, age, known_to_conntrack, mapped, udp

pytestmark = pytest.mark.kernel

CONNTRACK = ("cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global")


@pytest.fixture
def collector(world: World) -> ConntrackCollector:
    conntrack, nat = (tuple(world.maps[name] for name in names) for names in (CONNTRACK, NAT))
    maps: Any = SimpleNamespace(conntrack=conntrack, nat=nat, all=lambda: (*conntrack, *nat))
    return ConntrackCollector(maps, SimpleNamespace(append=lambda _: None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "two", "outside"), [(A.ip, B.ip, OUTSIDE), (A.ip6, B.ip6, OUTSIDE6)])
def test_nat_entries_of_live_connections_survive_gc(
    world: World, collector: ConntrackCollector, one: str, two: str, outside: str
) -> None:
    version = 6 if ":" in one else 4
    alive, over, ended = udp(one, outside, 1000), udp(one, outside, 1001), udp(two, outside, 1000)
    for packet in (alive, over, ended):
        world.device_sends(packet)
    known_to_conntrack(world, alive)
    known_to_conntrack(world, ended, lifetime=1)
    age(world)
    found = {each.map: each for each in anyio.run(collector.collect)}[f"cilium_snat_v{version}_external"]
    assert (found.seen, found.alive, found.deleted) == (6, 2, 4)
    assert (found.ingress_alive, found.ingress_deleted) == (1, 2), "each flow has one entry for its replies"
    port = world.device_sends(alive).packet[UDP].sport
    assert mapped(world, version) == 2
    answer = world.device_gets(udp(outside, NODE if version == 4 else "fd00:7::7", 53, port))
    assert answer.packet[UDP].dport == 1000


def test_translations_of_a_removed_pod_are_forgotten(world: World, collector: ConntrackCollector) -> None:
    for number in range(5):
        world.device_sends(udp(A.ip, OUTSIDE, 1000 + number))
        world.device_sends(udp(B.ip, OUTSIDE, 2000 + number))

    async def forget() -> int:
        from ipaddress import ip_address

        return await collector.forget([ip_address(A.ip)])

    assert anyio.run(forget) == 10
    assert mapped(world) == 10
