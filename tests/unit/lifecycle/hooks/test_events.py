"""The events of a hive: what happens to hooks, jobs and modules, in order; and the log of them."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
import structlog

from lifecycle import (
    Backoff,
    Events,
    Hive,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    StartError,
    StopError,
    invoke,
    module,
    provide,
)
from lifecycle.hooks import Event, HookEvent, JobEvent, ModuleEvent
from lifecycle.testing import VirtualClock, eventually

pytestmark = pytest.mark.anyio


async def nothing() -> None: ...


class Disk:
    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("mount", self.mount, nothing))

    async def mount(self) -> None:
        await anyio.sleep(2)


class Web:
    def __init__(self, disk: Disk, lifecycle: Lifecycle) -> None:
        lifecycle.enter("listen", self.listening)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        yield


cell = module("files", "Files", provide(Disk, Web), invoke(Web))


class Lines:
    """A logger that keeps its lines."""

    def __init__(self, level: int = logging.DEBUG) -> None:
        self.lines: list[dict[str, Any]] = []
        self.log: Logger = structlog.wrap_logger(
            None, processors=[self._keep], wrapper_class=structlog.make_filtering_bound_logger(level)
        )

    def _keep(self, _logger: object, method: str, event: Any) -> Any:
        self.lines.append({"level": method, **event})
        raise structlog.DropEvent

    def of(self, level: str) -> list[tuple[str, str]]:
        return [(one["event"], one.get("hook", "")) for one in self.lines if one["level"] == level]


def followed(hive: Hive) -> list[Event]:
    events: list[Event] = []
    hive.events.subscribe(events.append)
    return events


def steps(events: list[Event]) -> list[tuple[str, str]]:
    return [(one.step, one.hook) for one in events if isinstance(one, HookEvent)]


async def test_hook_events_are_in_order_with_duration_and_location() -> None:
    hive = Hive(cell)
    events = followed(hive)
    with VirtualClock() as clock:
        async with anyio.create_task_group() as group:
            group.start_soon(hive.start)
            await clock.advance(2)
        await hive.stop()
    assert steps(events) == [
        ("starting", "mount"),
        ("started", "mount"),
        ("starting", "listen"),
        ("started", "listen"),
        ("stopping", "listen"),
        ("stopped", "listen"),
        ("stopping", "mount"),
        ("stopped", "mount"),
    ]
    here = str(Path(__file__))
    hook_events = [one for one in events if isinstance(one, HookEvent)]
    assert {(one.module, one.owner, one.place.file) for one in hook_events} == {
        ("files", "Disk", here),
        ("files", "Web", here),
    }
    assert hook_events[0].place.line == Disk.mount.__code__.co_firstlineno
    assert all((one.took is None) == one.step.endswith("ing") for one in hook_events)


async def test_slow_hooks_are_logged_at_info_and_others_at_debug() -> None:
    for slow, level in ((0.0, "info"), (60.0, "debug")):
        lines = Lines()
        async with Hive(module("web", "Web", invoke(hooked)), log=lines.log, slow_hook=slow).started():
            pass
        assert [one for one in lines.of(level) if one[0] in {"hook started", "hook stopped"}] == [
            ("hook started", "hooked"),
            ("hook stopped", "hooked"),
        ]
        line = next(one for one in lines.lines if one["event"] == "hook started")
        assert re.fullmatch(r"[\d.]+(us|ms|s)", line["took"])
        assert re.fullmatch(r".*test_events\.py:\d+", line["at"])
        assert line["of"] == "web"


async def test_slow_hooks_are_logged_without_an_observer() -> None:
    lines = Lines(logging.INFO)
    async with Hive(invoke(hooked), log=lines.log, slow_hook=0.0).started():
        pass
    assert lines.of("info") == [("hook started", "hooked"), ("hook stopped", "hooked")]


@pytest.mark.parametrize("step", ["hook starting", "hook started", "hook stopping"])
async def test_a_log_that_fails_ends_the_hive_and_hangs_nothing(step: str) -> None:
    def fail(_logger: object, _method: str, event: Any) -> Any:
        if event["event"] == step:
            raise OSError("the log is full")
        raise structlog.DropEvent

    wrapper = structlog.make_filtering_bound_logger(logging.DEBUG)
    log: Logger = structlog.wrap_logger(None, processors=[fail], wrapper_class=wrapper)
    with anyio.fail_after(10), pytest.raises((StartError, StopError), match="log is full"):
        async with Hive(cell, log=log).started():
            pass


async def test_where_a_hook_is_written_is_logged_for_a_mock_and_without_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("mock", AsyncMock()))
        lifecycle.append(Hook("function", nothing))

    lines = Lines()
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()  # noqa: ASYNC240  # before the hive
    async with Hive(invoke(build), log=lines.log).started():
        pass
    (mock, function) = [line["at"] for line in lines.lines if line["event"] == "hook started"]
    assert re.fullmatch(r"/.*/unittest/mock\.py:\d+", mock)
    assert re.fullmatch(r"/.*/test_events\.py:\d+", function)


def hooked(lifecycle: Lifecycle) -> None:
    lifecycle.append(Hook("hooked", partial(nothing)))


def failing(when: str) -> Callable[[Lifecycle], None]:
    async def broken() -> None:
        raise OSError("broken")

    @asynccontextmanager
    async def crashing() -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(broken)
            yield

    def register(lifecycle: Lifecycle) -> None:
        match when:
            case "failed to start":
                lifecycle.append(Hook("bad", broken))
            case "failed to stop":
                lifecycle.append(Hook("bad", stop=broken))
            case _:
                lifecycle.enter("bad", crashing)

    return register


@pytest.mark.parametrize("when", ["failed to start", "crashed", "failed to stop"])
async def test_failures_of_hooks_are_reported_with_their_error(when: str) -> None:
    hive = Hive(invoke(failing(when)))
    events = followed(hive)

    async def run() -> None:
        async with hive.started():
            if when == "crashed":
                await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup):
        await run()
    (failed,) = [one for one in events if isinstance(one, HookEvent) and one.error is not None]
    assert (failed.step, failed.hook) == (when, "bad")
    assert "broken" in repr(failed.error)


async def test_an_abandoned_hook_is_reported() -> None:
    async def deaf() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.3)

    def register(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("deaf", stop=deaf, stop_timeout=0.01))

    hive = Hive(invoke(register), stop_budget=0.02)
    events = followed(hive)
    with pytest.raises(ExceptionGroup):
        async with hive.started():
            pass
    assert ("failed to stop", "deaf") in steps(events)


async def test_failure_recovery_and_end_of_a_job_are_reported() -> None:
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise OSError("not yet")

    def register(jobs: Jobs) -> None:
        jobs.one_shot("work", work, retries=5, backoff=Backoff(first=0.001))

    lines = Lines()
    hive = Hive(module("shop", "Shop", invoke(register)), log=lines.log)
    events = followed(hive)
    async with hive.started():
        await eventually(lambda: any(isinstance(one, JobEvent) and one.step == "ended" for one in events))
    job_events = [one for one in events if isinstance(one, JobEvent)]
    assert [(one.step, one.failures) for one in job_events] == [
        ("failed", 1),
        ("failed", 2),
        ("recovered", 2),
        ("ended", 0),
    ]
    assert {(one.job, one.module) for one in job_events} == {("work", "shop")}
    assert ("job works again", "") in lines.of("info")


async def test_enabled_and_disabled_modules_are_reported() -> None:
    async with Hive(module("web", "Web", invoke(hooked))).started() as hive:
        events = followed(hive)
        await hive.modules.disable("web")
        await hive.modules.enable("web")
    assert [one for one in events if isinstance(one, ModuleEvent)] == [
        ModuleEvent("disabled", "web", ("web",)),
        ModuleEvent("enabled", "web", ("web",)),
    ]


async def test_a_constructor_may_follow_as_a_stream() -> None:
    class Follower:
        def __init__(self, events: Events, jobs: Jobs) -> None:
            self.seen: list[Event] = []
            self.events = events
            jobs.observe("follow", events.stream, self.see)

        async def see(self, event: Event) -> None:
            self.seen.append(event)

    hive = Hive(provide(Follower), invoke(Follower), module("web", "Web", invoke(hooked)))
    async with hive.started():
        await eventually(lambda: hive.get(Follower).events is hive.get(Events))
        await hive.modules.disable("web")
        seen = hive.get(Follower).seen
        await eventually(lambda: any(isinstance(one, ModuleEvent) for one in seen))
        assert ("stopped", "hooked") in steps(seen)


async def test_a_follower_that_fails_or_has_enough_changes_nothing() -> None:
    hive = Hive(invoke(hooked), log=(lines := Lines()).log)

    def broken(event: Event) -> None:
        raise ValueError("mine")

    seen: list[Event] = []
    hive.events.subscribe(broken)
    enough = hive.events.subscribe(seen.append)
    async with hive.started():
        enough()
    assert steps(seen) == [("starting", "hooked"), ("started", "hooked")]
    assert ("a follower of events has failed", "") in lines.of("error")


async def test_a_hook_that_is_overdue_fails_to_start() -> None:
    def register(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("slow", anyio.sleep_forever, start_timeout=0.01))

    hive = Hive(invoke(register))
    events = followed(hive)
    with pytest.raises(StartError):
        await hive.start()
    assert steps(events) == [("starting", "slow"), ("failed to start", "slow")]
