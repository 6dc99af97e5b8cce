"""Garbage collection of real conntrack maps, large ones too."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path

import pytest

from cells import config, datapath, maps, netlink
from cells.datapath.collector import ConntrackCollector, slices
from cells.maps.map import Map
from cells.maps.node_maps import Maps
from cells.maps.records.flows import CtEntry, CtKey, NatEntry
from lifecycle import Hive, invoke
from tests.support.all_maps import every_map
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

POD, PEER = ip_address("10.1.0.10"), ip_address("10.1.0.11")
POD6, PEER6 = ip_address("fd00::10"), ip_address("fd00::11")
MANY = 100_000
EMPTY_BUCKETS = 32_768
"""At the most so many in a slice."""


def need(_: ConntrackCollector) -> None:
    """What the tests use."""


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[tuple[Maps, ConntrackCollector]]:
    given = {
        "state-dir": Path("/run/cilium"),
        "bpf-ct-global-tcp-max": 4 * MANY,
        "bpf-ct-global-any-max": 4096,
    }
    hive = Hive(
        *(config.cell, maps.cell, netlink.cell, datapath.cell, invoke(need, every_map)),
        settings=given | settings,
    )
    async with hive.started():
        yield hive.get(Maps), hive.get(ConntrackCollector)


def fill(table: Map, count: int, lifetime: int, first: int = 0, *, protocol: int = 6) -> None:
    """Connections between the two pods with distinct ports."""
    daddr, saddr = (POD, PEER) if table.spec.key_size == 14 else (POD6, PEER6)
    value = CtEntry(lifetime=lifetime).pack()
    ports = range(first, first + count)
    table.update_batch([(CtKey(daddr, saddr, n & 0xFFFF, n >> 16, protocol).pack(), value) for n in ports])


async def test_a_gc_pass_removes_ended_connections_of_a_hundred_thousand(in_node: None) -> None:
    async with running() as (node, collector):
        now = int(time.monotonic())
        fill(node.ct4_tcp, MANY // 2, now + 1000)
        fill(node.ct4_tcp, MANY // 2, now - 2, MANY)
        fill(node.ct6_any, 10, now - 2, protocol=17)
        found = await collector.collect()
        again = await collector.collect()  # one that moved in its bucket as others went may have been missed
        assert (again[0].seen, again[0].deleted) == (MANY - found[0].deleted, MANY // 2 - found[0].deleted)
        assert found[0].deleted > 0.99 * MANY // 2
        assert [(one.map, one.seen, one.alive, one.deleted) for one in found[1:4]] == [
            ("cilium_ct_any4_global", 0, 0, 0),
            ("cilium_ct6_global", 0, 0, 0),
            ("cilium_ct_any6_global", 10, 0, 10),
        ]
        assert [one.max_entries for one in found[:4]] == [4 * MANY, 4096, 4 * MANY, 4096]
        assert sum(1 for _ in node.ct4_tcp.items()) == MANY // 2


async def test_a_pass_over_translations_goes_in_slices_of_no_more_than_512(in_node: None) -> None:
    async with running() as (node, collector):
        await collector.collect()
        ended, translations = NatEntry(PEER, 5).pack(), node.nat[0]
        translations.update_batch([(CtKey(PEER, POD, 1, n, 6).pack(), ended) for n in range(10_000)])
        seen = [0, *(each.seen for each in slices(collector._programs()["hive_nat_gc_v4"]))]
        assert max(after - before for before, after in pairwise(seen)) <= 512
        assert seen[-1] == 10_000
        assert len(list(translations.items())) < 100


async def test_a_slice_ends_among_empty_buckets_too(in_node: None) -> None:
    async with running() as (node, collector):
        await collector.collect()
        fill(node.ct4_tcp, 3, int(time.monotonic()) - 2)
        found = list(slices(collector._programs()["hive_ct_gc_tcp4"]))
        assert len(found) >= 4 * MANY // EMPTY_BUCKETS
        assert found[-1][:3] == (3, 0, 3)
        assert node.ct4_tcp.first_key() is None


async def test_any_number_of_addresses_is_forgotten(in_node: None) -> None:
    async with running() as (node, collector):
        fill(node.ct4_tcp, 1000, 1 << 31)
        fill(node.ct6_tcp, 1000, 1 << 31)
        others = [ip_address(f"192.0.2.{n}") for n in range(1, 40)]
        others6 = [ip_address(f"2001:db8::{n:x}") for n in range(1, 20)]
        assert await collector.forget([]) == 0
        assert await collector.forget([*others, *others6]) == 0
        assert await collector.forget([*others, POD, *others6, PEER6]) == 2000
        assert node.ct4_tcp.first_key() is None
        assert node.ct6_tcp.first_key() is None


async def test_a_gc_program_that_the_kernel_refuses_is_reported(
    in_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as (_, collector):
        monkeypatch.setattr("cells.datapath.collector.PACKAGED_OBJECTS", Path("/nowhere"))
        with pytest.raises(Exception, match=r"gc\.o"):
            await collector.collect()
        monkeypatch.undo()
        assert len(await collector.collect()) == 6
