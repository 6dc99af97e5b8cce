"""The schedule of conntrack garbage collection, and its metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import structlog

from cells.config import AgentConfig
from cells.datapath import conntrack
from cells.datapath.collector import Collected, ConntrackCollector
from cells.datapath.conntrack import ConntrackMap, ConntrackSettings, Passes, families
from cells.observe import metrics
from cells.observe.bootstrap import PodsExposed
from lifecycle import Duration, HealthTree, Hive, Table, seconds, supply
from lifecycle.testing import VirtualClock, eventually
from tests.support.ports import free_port
from tests.support.scrape import scraped

pytestmark = pytest.mark.anyio


class FakeMaps(ConntrackCollector):
    """Conntrack maps of which each pass removes what the test asks for."""

    def __init__(self, *removed: int) -> None:
        self.removed = list(removed)
        self.passes = 0
        self.broken = False

    async def collect(self) -> tuple[Collected, ...]:
        self.passes += 1
        if self.broken:
            raise OSError("no such map")
        deleted = self.removed.pop(0) if self.removed else 0
        return (
            Collected("cilium_ct4_global", 1000, 500, 500 - deleted, deleted),
            Collected("cilium_ct6_global", 1000, 10, 10, 0),
        )


@asynccontextmanager
async def running(maps: FakeMaps, **settings: object) -> AsyncIterator[tuple[Hive, VirtualClock]]:
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    with VirtualClock() as clock:
        async with Hive(
            conntrack.cell, supply(maps, ConntrackCollector), supply(PodsExposed()), settings=given
        ).started() as hive:
            await clock.run_until_idle()
            yield hive, clock


def last(hive: Hive) -> dict[str, ConntrackMap]:
    table: Table[str, ConntrackMap] = hive.get(Table[str, ConntrackMap])
    return {row.map: row for row in table.all()}


def health(hive: Hive) -> list[tuple[str, str]]:
    return [(one.level, one.message) for one in hive.get(HealthTree).snapshot("conntrack.passes")]


async def test_the_first_gc_pass_runs_at_once_and_is_logged() -> None:
    async with running(FakeMaps(20)) as (hive, _):
        rows = last(hive)
        row = rows["cilium_ct4_global"]
        assert (row.max_entries, row.seen, row.alive, row.deleted) == (1000, 500, 480, 20)
        assert (row.deleted_so_far, row.passes, row.interval) == (20, 1, 450)
        assert rows["cilium_ct6_global"].deleted == 0
        assert health(hive) == [("ok", "20 of 510 connections expired; next pass in 7m30s")]


async def test_the_interval_follows_what_was_removed() -> None:
    maps = FakeMaps(0, 400, 100)
    async with running(maps) as (hive, clock):
        await clock.advance(299)
        assert maps.passes == 1
        await clock.advance(1)
        assert (maps.passes, last(hive)["cilium_ct4_global"].interval) == (2, 180)
        await clock.advance(180)
        assert (maps.passes, last(hive)["cilium_ct4_global"].interval) == (3, 180)
        assert last(hive)["cilium_ct4_global"].deleted_so_far == 500


@pytest.mark.parametrize(
    ("settings", "interval"),
    [
        ({"conntrack_gc_interval": "40s"}, 40),
        ({"conntrack_gc_max_interval": "6m"}, 360),
        ({"conntrack_gc_max_interval": "100s"}, 100),
    ],
)
async def test_settings_fix_or_cap_the_interval(settings: dict[str, object], interval: float) -> None:
    maps = FakeMaps(10, 10)
    async with running(maps, **settings) as (hive, clock):
        assert last(hive)["cilium_ct4_global"].interval == interval
        await clock.advance(interval)
        assert maps.passes == 2


async def test_a_pass_that_failed_is_tried_again() -> None:
    maps = FakeMaps()
    maps.broken = True
    with structlog.testing.capture_logs():
        async with running(maps) as (hive, clock):
            tree = hive.get(HealthTree)
            assert [one.level for one in tree.snapshot("conntrack.collect")] == ["degraded"]
            maps.broken = False
            await clock.until(lambda: last(hive))
            assert maps.passes == 2
            assert [one.level for one in tree.snapshot("conntrack.collect")] == ["ok"]


@pytest.mark.parametrize("value", ["-1s", "10ms"])
def test_times_that_cannot_be_waited_for_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"conntrack-gc-interval={value}: expected 0, or 1s and more"):
        ConntrackSettings(conntrack_gc_interval=Duration.parse(value)).validate()


async def test_gc_passes_are_counted_in_metrics() -> None:
    maps = FakeMaps(100)
    async with running(maps, conntrack_gc_interval=seconds(60)) as (hive, clock):
        maps.broken = True
        await clock.advance(61)
        passes = hive.get(Passes)
        series = {family.name: dict(family.series) for family in families(last(hive).values(), passes)}
    assert passes.failed > 0
    runs = series["cilium_datapath_conntrack_gc_runs_total"]
    assert runs["ipv4", "TCP", "completed"] == runs["ipv6", "TCP", "completed"] == 1
    assert runs["ipv4", "TCP", "uncompleted"] == passes.failed
    assert series["cilium_datapath_conntrack_gc_entries"] == {
        ("ipv4", "TCP", "alive"): 400,
        ("ipv4", "TCP", "deleted"): 100,
        ("ipv6", "TCP", "alive"): 10,
        ("ipv6", "TCP", "deleted"): 0,
    }
    assert series["cilium_bpf_map_pressure"] == {("ct4_global",): 0.4, ("ct6_global",): 0.01}
    assert passes.durations.count == 1


class TranslatingMaps(FakeMaps):
    """Maps of a node that translates flows, too."""

    async def collect(self) -> tuple[Collected, ...]:
        nat = Collected("cilium_snat_v4_external", 1000, 30, 20, 10, ingress_alive=9, ingress_deleted=6)
        return (*await super().collect(), nat)


async def test_entries_of_translated_flows_are_shown_by_direction_on_request() -> None:
    port, name = free_port(), "cilium_datapath_nat_gc_entries"
    agent = supply(AgentConfig.__new__(AgentConfig))
    for words, expected in (
        ("", None),
        (
            f"+{name}",
            {
                ("ipv4", "ingress", "alive"): 9,
                ("ipv4", "ingress", "deleted"): 6,
                ("ipv4", "egress", "alive"): 11,
                ("ipv4", "egress", "deleted"): 4,
            },
        ),
    ):
        cells = (conntrack.cell, metrics.cell, agent, supply(TranslatingMaps(), ConntrackCollector))
        settings = {"prometheus-serve-addr": f":{port}", "metrics": words}
        async with Hive(*cells, supply(PodsExposed()), settings=settings).started() as hive:
            await eventually(partial(last, hive))
            assert (await scraped(port)).get(name) == expected
