"""What a hive counts of itself for exporters: jobs that ended, failed starts, logged trouble."""

from __future__ import annotations

import asyncio
import io
import math
import re
from collections.abc import Collection, Mapping

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    Hive,
    Hook,
    JobMetrics,
    Jobs,
    Lifecycle,
    Profile,
    Reconciler,
    StartError,
    Table,
    configure_logging,
    invoke,
    module,
    provide,
)
from lifecycle.process import log_level, set_log_level
from lifecycle.process.logs import logger_for, warning_counts
from lifecycle.process.loop_lag import LoopLag, measured_loop
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


async def once() -> None:
    """A job that is done at once."""


async def test_jobs_of_things_that_come_and_go_are_counted_together_and_on() -> None:
    class Owner:
        def __init__(self, jobs: Jobs) -> None:
            self.jobs = jobs
            jobs.one_shot("begin", once)

    async with Hive(module("m", "M", provide(Owner), invoke(Owner))).started() as hive:
        jobs, metrics = hive.get(Owner).jobs, hive.get(JobMetrics)
        for endpoint in (7, 12):
            jobs.one_shot(f"endpoint-{endpoint}-recovery", once)
        jobs.one_shot("k8s-heartbeat", once)
        await eventually(lambda: sum(total.runs for total in metrics.totals().values()) == 4)
        totals = metrics.totals()
        assert {what: total.runs for what, total in totals.items()} == {
            ("m", "begin", "one_shot"): 1,
            ("m", "endpoint-N-recovery", "one_shot"): 2,
            ("m", "k8s-heartbeat", "one_shot"): 1,
        }


class Nothing:
    """A target that refuses everything."""

    async def observe(self) -> Mapping[str, str]:
        return {}

    def matches(self, row: str, observed: str) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, str]) -> None:
        raise OSError("full")

    async def drop(self, batch: Collection[str]) -> None: ...


async def test_a_reconciler_that_runs_is_known_with_what_it_could_not_do() -> None:
    class Owner:
        def __init__(self, jobs: Jobs) -> None:
            table: Table[str, str] = Table("names", key=str)
            with table.txn() as rows:
                rows.put("a")
            jobs.observe("sync", Reconciler[str, str](table, Nothing(), full_every=math.inf))

    async with Hive(module("m", "M", provide(Owner), invoke(Owner))).started() as hive:
        ((where, name, reconciler),) = hive.jobs.observers()
        assert (where, name) == ("m", "sync")
        assert isinstance(reconciler, Reconciler)
        await eventually(lambda: reconciler.failing == 1)
    assert hive.jobs.totals()["m", "sync", "observe"].running == 0


async def test_a_start_that_came_to_nothing_is_timed_apart() -> None:
    seen: list[Profile] = []

    class Broken:
        def __init__(self, profile: Profile, lifecycle: Lifecycle) -> None:
            seen.append(profile)
            lifecycle.append(Hook("break", self.start))

        async def start(self) -> None:
            raise OSError("broken")

    hive = Hive(module("m", "M", provide(Broken), invoke(Broken)))
    with pytest.raises(StartError):
        await hive.start()
    assert seen == [hive.profile]
    assert [(one.name, one.module, one.owner) for one in hive.profile.failed] == [("break", "m", "Broken")]
    assert not [one for one in hive.profile.timings if one.kind == "start"]


async def test_warnings_and_errors_are_counted_by_module() -> None:
    before = dict(warning_counts())
    configure_logging("info", "logfmt", io.StringIO())
    try:
        log = logger_for("m.counted")
        log.info("fine")
        log.warning("hm")
        log.warning("hm")
        log.error("oh")
    finally:
        configure_logging("info", "logfmt")
    now = {what: count - before.get(what, 0) for what, count in warning_counts().items()}
    assert now["warning", "m.counted"] == 2
    assert now["error", "m.counted"] == 1
    assert ("info", "m.counted") not in now


def test_the_level_changes_for_every_logger_there_is() -> None:
    spoken = io.StringIO()
    configure_logging("info", "logfmt", spoken)
    try:
        log = logger_for("m.level")
        bound = log.bind(id=1)
        bound.debug("too early")
        set_log_level("debug")
        bound.debug("in time")
        assert log_level() == "debug"
        set_log_level("info")
        bound.debug("too late")
        with pytest.raises(ValueError, match="log level 'loud': expected one of debug"):
            set_log_level("loud")
        assert log_level() == "info"
    finally:
        configure_logging("info", "logfmt")
    assert re.findall("msg=\\S+ ?\\S*", spoken.getvalue()) == ['msg="in time"']


def test_the_lag_of_a_loop_adds_up() -> None:
    async def main() -> tuple[float, float]:
        await anyio.lowlevel.checkpoint()
        lag = LoopLag.of(asyncio.get_running_loop())
        assert lag is not None
        return lag.seconds, lag.longest

    seconds, longest = anyio.run(main, backend_options={"loop_factory": measured_loop})
    assert seconds >= longest > 0
