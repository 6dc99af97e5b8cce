"""The metrics port: one path, failures of one cell hide no other metrics, a used port ends the start."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import anyio
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from cells.base.metrics import Collector, MetricFamily, counter, gauge
from cells.config import AgentConfig
from cells.observe import metrics
from lifecycle import Hive, Hook, Lifecycle, Member, StartError, provide, supply
from lifecycle.testing import eventually
from tests.support.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
def port() -> int:
    """A TCP port that is free now."""
    return free_port()


class Bees:
    """A cell that counts something."""

    def __init__(self) -> None:
        self.count = 3
        self.vanished = False


def bees_metrics(bees: Bees) -> Member[Collector]:
    """What it collects."""

    async def collect() -> Iterable[MetricFamily]:
        if bees.vanished:
            raise OSError("flown away")
        return [gauge("bees", "Bees.", bees.count), counter("rare", "R.", 1, on=False)]

    return Collector("bees", collect)


@asynccontextmanager
async def running(address: str, **settings: object) -> AsyncIterator[Hive]:
    """A hive of the metrics cell and one that collects."""
    claimed = supply(AgentConfig.__new__(AgentConfig))
    given = {"prometheus-serve-addr": address, **settings}
    async with Hive(metrics.cell, claimed, provide(Bees, bees_metrics), settings=given).started() as hive:
        yield hive


async def scrape(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Status, content type and text."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as got:
        return got.status, got.headers.get("Content-Type", ""), await got.text()


def names(text: str) -> set[str]:
    """The families in a scrape."""
    return {family.name for family in text_string_to_metric_families(text)}


async def test_metrics_of_cells_are_served_with_current_values(port: int) -> None:
    async with running(f":{port}") as hive:
        status, kind, text = await scrape(port)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert "bees 3\n" in text
        assert names(text) >= {
            "bees",
            "cilium_process_cpu_seconds",
            "cilium_hive_status",
            "hive_hook_start_seconds",
        }
        assert "rare" not in names(text)
        hive.get(Bees).count = 4
        assert "bees 4\n" in (await scrape(port))[2]


@pytest.mark.parametrize("host", ["", "[::]"])
async def test_the_node_answers_at_both_families(port: int, host: str) -> None:
    async with running(f"{host}:{port}"):
        assert (await scrape(port, host="[::1]"))[0] == (await scrape(port, host="127.0.0.1"))[0] == 200


async def test_other_paths_of_the_metrics_port_are_404(port: int) -> None:
    async with running(f"127.0.0.1:{port}"):
        for path in ("/", "/metrics/", "/healthz"):
            assert (await scrape(port, path))[0] == 404


async def test_the_setting_metrics_selects_the_served_ones(port: int) -> None:
    words = {"metrics": "+rare -bees +cilium_statedb_table_objects"}
    async with running(f":{port}", **words):
        assert {"bees", "rare"} & names((await scrape(port))[2]) == {"rare"}


async def test_the_start_of_the_process_is_the_same_in_each_scrape(port: int) -> None:
    """Alerts count its changes: they are restarts."""
    async with running(f":{port}"):
        texts = [(await scrape(port))[2] for _ in range(3)]
    name = "cilium_process_start_time_seconds "
    found = {line for text in texts for line in text.splitlines() if line.startswith(name)}
    assert len(found) == 1
    assert 0 < time.time() - float(found.pop().split()[1]) < 86_400


async def test_a_failing_collector_hides_no_other_metrics(port: int) -> None:
    async with running(f":{port}") as hive:
        hive.get(Bees).vanished = True
        with structlog.testing.capture_logs() as logged:
            status, _, text = await scrape(port)
        assert status == 200
        assert "bees" not in names(text)
        assert "cilium_hive_status" in names(text)
        assert [(one["event"], one["of"]) for one in logged] == [("metrics could not be collected", "bees")]


async def test_families_that_contradict_each_other_fail_the_scrape(port: int) -> None:
    async with running(f":{port}") as hive:
        hive.get(metrics.Metrics).add([Collector("again", hive_again)])
        with structlog.testing.capture_logs():
            status, _, text = await scrape(port)
        assert (status, text) == (500, "bees occurs twice for {}\n")


async def hive_again() -> Iterable[MetricFamily]:
    return [gauge("bees", "Bees.", 1)]


async def test_nothing_listens_without_an_address_or_after_the_stop(port: int) -> None:
    async with running(f":{port}"):
        pass
    async with running("") as hive:
        assert not [one for one in hive.profile.timings if one.name == "serve metrics"]
        with pytest.raises(OSError, match="attempts failed"):
            await anyio.connect_tcp("127.0.0.1", port)
        assert "bees" in {family.name for family in await hive.get(metrics.Metrics).families()}


@pytest.mark.parametrize("host", ["", "127.0.0.1", "[::1]"])
async def test_a_used_address_is_reported_in_one_line(port: int, host: str) -> None:
    async with running(f"{host}:{port}"):
        with pytest.raises(StartError) as refused:
            async with running(f"{host}:{port}"):
                pass
    message = str(refused.value.exceptions[0])
    assert message == (
        f"prometheus-serve-addr: {host}:{port} cannot be served (Address already in use): "
        "stop what listens there, or choose another address"
    )


async def test_an_address_of_another_node_is_reported_in_one_line(port: int) -> None:
    with pytest.raises(StartError) as refused:
        async with running(f"192.0.2.1:{port}"):
            pass
    assert f"192.0.2.1:{port} cannot be served (Cannot assign requested address)" in str(refused.value)


class Stuck:
    """A cell that does not come to start."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("hang", anyio.sleep_forever))


def stuck_metrics(stuck: Stuck) -> Member[Collector]:
    """What it would collect."""
    return Collector("stuck", hive_again)


async def test_a_start_that_hangs_can_be_looked_at(port: int) -> None:
    cells = (metrics.cell, supply(AgentConfig.__new__(AgentConfig)), provide(Stuck, stuck_metrics))
    hive = Hive(*cells, settings={"prometheus-serve-addr": f"127.0.0.1:{port}"})
    async with anyio.create_task_group() as starting:
        starting.start_soon(hive.start)
        await eventually(lambda: any(one.name == "serve metrics" for one in hive.profile.timings))
        _, _, text = await scrape(port)
        starting.cancel_scope.cancel()
    assert "cilium_process_open_fds" in names(text)
    assert "bees" not in names(text)
