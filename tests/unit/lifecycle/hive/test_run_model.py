"""Small hives in which every body ends in every way, and signals come at every point: what must hold.

The hive always ends. Every hook that started is stopped, once, users before what they use. The exit code and
what is written to standard error are true. Each run is simulated: run() with real signals, in virtual time.
"""

import asyncio
import contextlib
import io
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import anyio
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import Hive, HiveError, Hook, Jobs, Lifecycle, Shutdown, invoke, provide
from lifecycle.hive import run as run_module
from lifecycle.hive import signals as signals_module
from lifecycle.testing import Simulation, simulate
from tests.support.examples import scaled

ACTS = ("return", "slow", "raise", "exit", "cancelled", "hang", "stubborn")
"""A stubborn body cannot be cancelled, as a worker thread cannot."""
JOBS = ("none", "raise", "exit", "fatal")
START, STOP, BUDGET = 20.0, 10.0, 25.0
LIFE = 100.0
"""Seconds after which someone asks for a Shutdown."""


class Left(BaseException):
    """In place of os._exit()."""

    def __init__(self, why: str, code: int) -> None:
        self.why, self.code = why, code


def leave(_name: str, why: str, code: int) -> NoReturn:
    raise Left(why, code)


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals_module, "ONE_REQUEST", 0.0)  # in virtual time two may come at once
    for module in (run_module, signals_module):
        monkeypatch.setattr(sys.modules[module.__module__] if callable(module) else module, "leave", leave)
    with structlog.testing.capture_logs():
        yield


class World:
    """What happens to the hooks a and b, which needs a, and a job of b."""

    def __init__(self, acts: dict[str, str], job: str) -> None:
        self.acts = acts
        self.job = job
        self.started: list[str] = []
        self.stops: list[str] = []
        self.faults: list[str] = []
        """What went wrong and must be reported."""
        self.codes: list[int] = []
        self.left: list[str] = []

    def hive(self) -> Hive:
        world = self

        class A:
            def __init__(self, lifecycle: Lifecycle) -> None:
                lifecycle.append(Hook("a", lambda: world.start("a"), lambda: world.stop("a")))

        class B:
            def __init__(self, _: A, lifecycle: Lifecycle, jobs: Jobs) -> None:
                lifecycle.append(Hook("b", lambda: world.start("b"), lambda: world.stop("b")))
                if world.job != "none":
                    jobs.one_shot("work", world.work, fatal=world.job == "fatal")

        async def end(shutdown: Shutdown) -> None:
            asyncio.get_running_loop().call_later(LIFE, shutdown.request)

        def ends(lifecycle: Lifecycle, shutdown: Shutdown) -> None:
            lifecycle.append(Hook("end", lambda: end(shutdown)))

        cells = (provide(A, B), invoke(B, ends))
        return Hive(*cells, name="h", start_timeout=START, stop_timeout=STOP, stop_budget=BUDGET)

    async def start(self, name: str) -> None:
        await self.act(f"start {name}", START)
        self.started.append(name)

    async def stop(self, name: str) -> None:
        self.stops.append(name)
        await self.act(f"stop {name}", STOP)

    async def work(self) -> None:
        await anyio.sleep(1)
        if self.job == "exit":
            self.faults.append("job 'work' called sys.exit(4)")
            self.codes.append(4)
            sys.exit(4)
        if self.job == "fatal":
            self.faults.append("the lock is lost")
            self.codes.append(1)
            raise HiveError("the lock is lost")
        raise OSError("tried again")

    async def act(self, which: str, limit: float) -> None:
        act, hook = self.acts.get(which, "slow"), f"hook '{which.split()[1]}' (h)"
        if act == "return":
            return
        await anyio.sleep(1)
        if act == "raise":
            self.faults.append(f"{hook} failed to {which.split(maxsplit=1)[0]}: OSError: {which}")
            raise OSError(which)
        if act == "exit":
            self.faults.append(f"{hook} called sys.exit(3)")
            self.codes.append(3)
            sys.exit(3)
        if act == "cancelled":
            self.faults.append(f"{hook} failed to {which.split(maxsplit=1)[0]}: UnexpectedCancelError")
            task = asyncio.ensure_future(anyio.sleep_forever())
            task.cancel()
            await task
        loop = asyncio.get_running_loop()
        began = loop.time()
        if act == "hang":
            try:
                await anyio.sleep_forever()
            finally:
                if loop.time() - began >= limit - 2:
                    self.faults.append(f"{hook} did not {which.split(maxsplit=1)[0]} within")
        if act == "stubborn":
            self.left.append(hook)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(3000)


def check(acts: dict[str, str], job: str = "none", *, seed: int = 0, signals: Sequence[int] = ()) -> int:
    """Run it once, and see that all holds; the turns it took."""
    world = World(acts, job)
    stderr = io.StringIO()
    ended: list[int] = []
    left: list[Left] = []
    took = 0.0

    def scenario(simulation: Simulation) -> None:
        nonlocal took

        async def main() -> None:
            nonlocal took
            ended.append(await world.hive().run())
            took = asyncio.get_running_loop().time()

        for turn in signals:
            simulation.at(turn, lambda: signal.raise_signal(signal.SIGTERM))
        try:
            simulation.run(main)
        except Left as end:
            left.append(end)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that comes before it runs is not its own
    try:
        with contextlib.redirect_stderr(stderr):
            world_after = simulate(scenario, seed)
    finally:
        signal.signal(signal.SIGTERM, before)
    look(world, left[0] if left else None, ended, stderr.getvalue(), took, signalled=bool(signals))
    return world_after.turns


def look(
    world: World, left: Left | None, ended: list[int], printed: str, took: float, *, signalled: bool
) -> None:
    """What must hold when it is over."""
    what = (world.acts, world.job, printed)
    assert len(world.stops) == len(set(world.stops)), what
    assert took <= LIFE + 2 * START + BUDGET + 5, what
    if left is not None and left.why == "second signal, leaving at once":
        assert left.code == 1
        return
    assert set(world.started) == set(world.stops), what
    if world.stops[:1] == ["a"]:
        assert world.stops == ["a"], what
    # a body that awaits something cancelled while the hive cancels it has ended as it was asked to
    faults = [one for one in world.faults if one in printed or not ("Cancel" in one and signalled)]
    for fault in faults:
        assert fault in printed, what
    if left is not None:
        assert "is left behind" in printed, what
        assert any(hook in left.why for hook in world.left), what
    code = left.code if left is not None else ended[0]
    if world.codes:
        assert code in world.codes, what
    elif faults or left is not None:
        assert code == 1, what
    elif not world.left:
        assert (code, printed) == (0, ""), what


PHASES = ("start a", "stop a", "start b", "stop b")
SINGLE = [({phase: act}, "none") for phase in PHASES for act in ACTS] + [({}, job) for job in JOBS[1:]]


def named(case: tuple[dict[str, str], str]) -> str:
    return "-".join([*(f"{phase} {act}" for phase, act in case[0].items()), case[1]]).replace(" ", "-")


@pytest.mark.parametrize("first", ACTS)
def test_bodies_end_in_every_way(first: str) -> None:
    """Every combination of two that start and two that stop, which is every path of the supervisor."""
    for others in itertools.product(("slow", "raise", "exit", "cancelled", "hang"), repeat=3):
        check(dict(zip(PHASES, (first, *others), strict=True)))


@pytest.mark.parametrize("job", JOBS[1:])
def test_a_job_ends_the_hive_while_stops_end_in_every_way(job: str) -> None:
    for acts in itertools.product(ACTS, repeat=2):
        check(dict(zip(("stop a", "stop b"), acts, strict=True)), job)


@pytest.mark.parametrize("case", SINGLE, ids=named)
def test_a_signal_comes_at_every_point(case: tuple[dict[str, str], str]) -> None:
    turns = check(*case)
    for turn in range(1, turns + 1):
        check(*case, signals=[turn])


@pytest.mark.parametrize(
    "case", [({}, "none"), ({"stop b": "hang"}, "none"), ({"start b": "raise"}, "exit")], ids=named
)
def test_a_second_signal_comes_at_every_point(case: tuple[dict[str, str], str]) -> None:
    turns = check(*case)
    for first in range(2, turns, 3):
        for second in range(first + 1, turns, 4):
            check(*case, signals=[first, second])


@settings(max_examples=scaled(200), deadline=None)
@given(
    st.fixed_dictionaries({phase: st.sampled_from(ACTS) for phase in PHASES}),
    st.sampled_from(JOBS),
    st.integers(0, 10**6),
    st.lists(st.integers(1, 80), max_size=1),
)
def test_a_run_ends_correctly_in_any_order_of_tasks(
    acts: dict[str, Any], job: str, seed: int, signals: list[int]
) -> None:
    check(acts, job, seed=seed, signals=signals)
