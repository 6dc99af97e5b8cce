"""The programs that delete conntrack entries: which they delete, skip and count."""

import time
from collections.abc import Iterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from cells.datapath.collector import ConntrackCollector
from cells.maps.records.flows import CtEntry, CtKey
from lifecycle import Hook
from tests.kernel.datapath.world import A, B, World

pytestmark = pytest.mark.kernel

TABLES = {
    "cilium_ct4_global": (A.ip, B.ip, 6),
    "cilium_ct_any4_global": (A.ip, B.ip, 17),
    "cilium_ct6_global": (A.ip6, B.ip6, 6),
    "cilium_ct_any6_global": (A.ip6, B.ip6, 17),
}
"""In the order of the program's counts."""
NAT = ("cilium_snat_v4_external", "cilium_snat_v6_external")


@pytest.fixture
def collector(world: World) -> Iterator[ConntrackCollector]:
    """The programs on the world's maps."""
    conntrack, nat = (tuple(world.maps[name] for name in names) for names in (TABLES, NAT))
    maps: Any = SimpleNamespace(conntrack=conntrack, nat=nat, all=lambda: (*conntrack, *nat))
    hooks: list[Hook] = []
    lifecycle: Any = SimpleNamespace(append=hooks.append)
    yield ConntrackCollector(maps, lifecycle)
    for hook in hooks:
        assert hook.stop is not None
        anyio.run(hook.stop)


def collect(collector: ConntrackCollector) -> list[tuple[int, int, int]]:
    """Seen, alive and deleted of each table."""
    found = anyio.run(collector.collect)
    assert [one.map for one in found] == [*TABLES, *NAT]
    return [(one.seen, one.alive, one.deleted) for one in found[: len(TABLES)]]


def forget(collector: ConntrackCollector, *addresses: str) -> int:
    """How many flows of these addresses there were."""
    return anyio.run(collector.forget, [ip_address(each) for each in addresses])


def fill(world: World, name: str, count: int, lifetime: int, first: int = 0) -> list[bytes]:
    """Enter connections of distinct ports; their keys."""
    source, destination, protocol = TABLES[name]
    daddr, saddr = ip_address(source), ip_address(destination)
    keys = [CtKey(daddr, saddr, 80, first + n, protocol).pack() for n in range(count)]
    for key in keys:
        world.maps[name].update(key, CtEntry(lifetime=lifetime).pack())
    return keys


def test_only_ended_connections_are_removed(world: World, collector: ConntrackCollector) -> None:
    now = int(time.monotonic())
    retained = {name: fill(world, name, 20, now + 500) for name in TABLES}
    vanished = {name: fill(world, name, 30, now - 2, first=100) for name in TABLES}
    assert collect(collector) == [(50, 20, 30)] * 4
    assert collect(collector) == [(20, 20, 0)] * 4
    for name in TABLES:
        assert all(world.maps[name].lookup(key) is not None for key in retained[name])
        assert all(world.maps[name].lookup(key) is None for key in vanished[name])


def test_flows_of_an_address_are_forgotten(world: World, collector: ConntrackCollector) -> None:
    for name in TABLES:
        fill(world, name, 10, 1 << 31)
    assert forget(collector, "10.1.0.99", "fd00:10:1::99") == 0
    assert forget(collector, "10.1.0.99", A.ip) == 20
    assert forget(collector, "fd00:10:1::99", B.ip6) == 20
    assert collect(collector) == [(0, 0, 0)] * 4


def test_many_addresses_are_forgotten_and_no_others(world: World, collector: ConntrackCollector) -> None:
    for name in TABLES:
        fill(world, name, 10, 1 << 31)
    strangers = [f"10.9.{n // 250}.{n % 250}" for n in range(2500)]
    assert forget(collector, *strangers) == 0
    assert forget(collector, *strangers, B.ip) == 20
    assert collect(collector) == [(0, 0, 0)] * 2 + [(10, 10, 0)] * 2


def test_walks_of_many_slices_see_each_entry_once(world: World, collector: ConntrackCollector) -> None:
    now = int(time.monotonic())
    fill(world, "cilium_ct4_global", 3000, now + 500)
    first, *_ = collect(collector)
    assert first == (3000, 3000, 0)
    world.age(1000)
    first, *_ = collect(collector)
    assert first[2] > 2900  # what moves in its bucket as others go may wait for the next walk
    collect(collector)
    assert collect(collector)[0] == (0, 0, 0)
