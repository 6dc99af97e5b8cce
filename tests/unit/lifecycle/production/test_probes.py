"""Probes and metrics of a hive over HTTP, while it starts, runs and stops."""

import http.client
from collections.abc import Iterable

import anyio
import anyio.to_thread
import pytest

from lifecycle import (
    Cell,
    Hive,
    Hook,
    Jobs,
    Lifecycle,
    Member,
    SettingsError,
    StartError,
    Table,
    invoke,
    module,
    provide,
)
from lifecycle.process import Collector, Family, counter
from lifecycle.production import ProbeServer, Readiness, loop_watchdog, probes
from lifecycle.testing import HiveStarter, eventually

ANY = {"probe-address": "127.0.0.1:0"}


async def asked(hive: Hive, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    address = hive.get(ProbeServer).address
    assert address is not None

    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(*address, timeout=5)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await anyio.to_thread.run_sync(ask)


class Store:
    def __init__(self) -> None:
        self.synced = False
        self.broken = False


def store_ready(store: Store) -> Member[Readiness]:
    def why_not() -> str:
        if store.broken:
            raise LookupError("no answer")
        return "" if store.synced else "not synced yet"

    return Readiness("store", why_not)


def sales(store: Store) -> Member[Collector]:
    async def collect() -> Iterable[Family]:
        if store.broken:
            raise LookupError("no answer")
        return [counter("shop_sales_total", "Things sold.", {"tea": 3, 'co"ffee': 4}, "thing")]

    return Collector("sales", collect)


def rows() -> Table[int, int]:
    return Table("numbers", key=lambda number: number)


def work(jobs: Jobs, numbers: Table[int, int]) -> None:
    async def once() -> None:
        numbers.put(1)

    jobs.one_shot("work", once)


shop = module("shop", "A shop", provide(Store, store_ready, sales, rows), invoke(work))


async def test_a_part_that_is_not_ready_is_named(hive: HiveStarter) -> None:
    running = await hive(probes(), shop, settings=ANY)
    assert await asked(running, "/healthz") == (200, "ok\n")
    assert await asked(running, "/readyz") == (503, "store: not synced yet\n")
    running.get(Store).synced = True
    assert await asked(running, "/readyz") == (200, "ok\n")
    running.get(Store).broken = True
    status, body = await asked(running, "/readyz")
    assert status == 503
    assert body.startswith("store: its check has failed: ")


async def test_what_is_degraded_is_listed_and_is_alive(hive: HiveStarter) -> None:
    running = await hive(probes(), settings=ANY)
    running.health.report("shop", "degraded", "no tea")
    assert await asked(running, "/healthz") == (200, "ok\ndegraded: shop: no tea\n")


@pytest.mark.anyio
async def test_a_start_that_hangs_can_be_looked_at() -> None:
    go = anyio.Event()

    def slow(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open the shop", go.wait))

    hive = Hive(probes(), invoke(slow), settings=ANY)
    async with anyio.create_task_group() as group:
        group.start_soon(hive.start)
        await eventually(lambda: hive.get(ProbeServer).address)
        assert await asked(hive, "/healthz") == (200, "ok\n")
        assert await asked(hive, "/readyz") == (503, "starting: open the shop\n")
        go.set()
    assert await asked(hive, "/readyz") == (200, "ok\n")
    await hive.stop()


async def test_metrics_are_those_of_the_hive_and_of_the_cells(hive: HiveStarter) -> None:
    running = await hive(probes(), shop, loop_watchdog(), settings=ANY)
    await eventually(lambda: any(job.runs for job in running.jobs.snapshot()))
    status, text = await asked(running, "/metrics")
    assert status == 200
    lines = text.splitlines()
    assert "# TYPE shop_sales_total counter" in lines
    assert 'shop_sales_total{thing="co\\"ffee"} 4' in lines
    assert 'lifecycle_job_runs_total{module="shop",job="work",kind="one_shot"} 1' in lines
    assert 'lifecycle_table_rows{table="numbers"} 1' in lines
    assert "lifecycle_loop_blocked_total 0" in lines
    assert any(
        line.startswith('lifecycle_hook_start_seconds{module="probes",hook="serve probes"}') for line in lines
    )
    running.get(Store).broken = True
    status, text = await asked(running, "/metrics")
    assert status == 200
    assert "shop_sales_total" not in text, "one cell's failure hides that cell alone"
    assert "lifecycle_health" in text


async def test_other_paths_and_methods_are_refused(hive: HiveStarter) -> None:
    running = await hive(probes(), settings=ANY)
    assert (await asked(running, "/"))[0] == 404
    assert (await asked(running, "/healthz", "POST"))[0] == 405
    assert (await asked(running, "/healthz", "HEAD"))[0] == 200


async def test_a_module_that_stops_is_not_asked(hive: HiveStarter) -> None:
    running = await hive(probes(), shop, settings=ANY)
    await running.modules.disable("shop")
    status, text = await asked(running, "/metrics")
    assert (status, "shop_sales_total" in text) == (200, False)
    assert await asked(running, "/readyz") == (200, "ok\n")


async def test_an_address_in_use_ends_the_start_with_one_line(hive: HiveStarter) -> None:
    running = await hive(probes(), settings=ANY)
    host, port = running.get(ProbeServer).address or ("", 0)
    with pytest.raises(StartError, match="stop what listens there"):
        await hive(probes(), settings={"probe-address": f"{host}:{port}"})


@pytest.mark.parametrize("address", ["8086", ":8086", "localhost:http", "127.0.0.1:70000"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="expected HOST:PORT"):
        Hive(probes(), settings={"probe-address": address}).check()


async def test_without_an_address_nothing_is_served(hive: HiveStarter) -> None:
    running = await hive(probes(), settings={"probe-address": ""})
    assert running.get(ProbeServer).address is None


def test_the_cells_of_production_are_sound_together() -> None:
    from lifecycle.production import systemd

    cells: list[Cell] = [systemd(), probes(), loop_watchdog(), shop]
    Hive(*cells).check()
