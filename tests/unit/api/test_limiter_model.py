"""Invariants of the rate limiter: concurrency, rate, order, no lost or starved request."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cells.api.limiter import LEFT, Limiter, LimitExceeded, Parameters
from lifecycle.testing import VirtualClock
from tests.unit.fuzz.inputs import bounded

NEAR = 1e-4
"""Seconds by which times may differ: those of a machine that has been up for long are not exact."""


@dataclass(frozen=True)
class Asked:
    """A request: seconds after the one before, seconds that it takes, and how it ends."""

    after: float
    takes: float
    succeeds: bool = True
    cancelled_after: float = math.inf
    """Seconds after it came; its task is cancelled."""
    removed_after: float = math.inf
    """Seconds after it came; its client no longer waits."""


@dataclass
class Fate:
    """What became of a request."""

    came: float
    let_in: float = math.inf
    done: float = math.inf
    refused: str = ""
    cancelled: bool = False
    parallel: int = 0
    """Of the limiter, when it was let in."""


numbers = st.sampled_from
spans = numbers([0.0, 0.0, 0.01, 0.3, 1.0, 2.5])
requests = st.lists(st.builds(Asked, after=spans, takes=spans, succeeds=st.booleans()), max_size=25)
leaving = st.lists(
    st.builds(
        Asked,
        after=spans,
        takes=spans,
        succeeds=st.booleans(),
        cancelled_after=numbers([math.inf, math.inf, 0.0, 0.3, 2.0]),
        removed_after=numbers([math.inf, math.inf, 0.0, 0.3, 2.0]),
    ),
    max_size=25,
)
bounds = st.builds(
    Parameters,
    rate_limit=numbers([0.0, 0.5, 4.0, 30.0]),
    rate_burst=st.integers(1, 5),
    parallel_requests=st.integers(0, 4),
    min_wait_duration=numbers([0.0, 0.0, 0.2]),
)
adjusting = st.builds(
    replace,
    bounds,
    auto_adjust=st.just(True),
    estimated_processing_duration=numbers([0.1, 1.0]),
    max_wait_duration=numbers([0.0, 0.5, 5.0]),
    max_parallel_requests=numbers([0, 6]),
    max_adjustment_factor=numbers([1.0, 5.0, 100.0]),
    mean_over=numbers([1, 10]),
    skip_initial=numbers([0, 3]),
)


def outcome(parameters: Parameters, asked: list[Asked]) -> tuple[list[Fate], Limiter]:
    """What becomes of the requests; ends when all have been answered. Times begin at 0."""
    return asyncio.run(_outcome(parameters, asked))


async def _outcome(parameters: Parameters, asked: list[Asked]) -> tuple[list[Fate], Limiter]:
    with VirtualClock() as clock:
        began = clock.now
        limiter = Limiter("endpoint-create", parameters, structlog.get_logger())
        fates: list[Fate] = []
        tasks: list[asyncio.Task[None]] = []
        for each in asked:
            await clock.advance(each.after)
            fate = Fate(clock.now - began)
            fates.append(fate)
            task = asyncio.create_task(_ask(limiter, each, fate, lambda: clock.now - began))
            tasks.append(task)
            if each.cancelled_after < math.inf:
                asyncio.get_running_loop().call_later(each.cancelled_after, task.cancel)
        await clock.until(lambda: all(task.done() for task in tasks), within=1e6)
        for task in tasks:
            if not task.cancelled():
                task.result()
        assert limiter.in_flight == 0
        await _all_places_are_free(limiter, clock)
        return fates, limiter


async def _all_places_are_free(limiter: Limiter, clock: VirtualClock) -> None:
    await clock.advance(1e5)
    burst = limiter.bucket.burst if limiter.bucket.rate else 5
    enough = min(burst, limiter.parallel or 5)
    async with asyncio.TaskGroup() as group:
        entering = [group.create_task(limiter.enter()) for _ in range(enough)]
        await clock.advance(limiter.parameters.min_wait_duration)
        assert all(task.done() for task in entering)
    for task in entering:
        task.result().done(500)


async def _ask(limiter: Limiter, asked: Asked, fate: Fate, now: Callable[[], float]) -> None:
    def vanished() -> Awaitable[None]:
        return asyncio.sleep(min(asked.removed_after, 1e7))

    try:
        admission = await limiter.enter(vanished)
    except LimitExceeded as refused:
        fate.refused, fate.done = refused.outcome, now()
        return
    except asyncio.CancelledError:
        fate.cancelled, fate.done = True, now()
        return
    fate.let_in, fate.parallel = now(), limiter.parallel
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(asked.takes)
    fate.done = now()
    admission.done(200 if asked.succeeds else 500)


def simulated(parameters: Parameters, asked: list[Asked], fates: list[Fate]) -> list[float]:
    """When each is let in, by arithmetic: first in line, waited enough, a place and a token there."""
    let_in: list[float] = []
    ended: list[float] = []
    tokens, at = float(parameters.rate_burst), 0.0
    for number, (each, fate) in enumerate(zip(asked, fates, strict=True)):
        when = max(fate.came + parameters.min_wait_duration, let_in[-1] if let_in else 0.0)
        if parameters.parallel_requests and number >= parameters.parallel_requests:
            when = max(when, sorted(ended)[number - parameters.parallel_requests])
        if rate := parameters.rate_limit:
            tokens, at = min(parameters.rate_burst, tokens + (when - at) * rate), when
            if tokens < 1:
                at = when = when + (1 - tokens) / rate
                tokens = 1
            tokens -= 1
        let_in.append(when)
        ended.append(when + each.takes)
    return let_in


@bounded(150)
@given(bounds, requests)
def test_requests_start_as_soon_as_the_limits_allow(parameters: Parameters, asked: list[Asked]) -> None:
    fates, limiter = outcome(parameters, asked)
    expected = simulated(parameters, asked, fates)
    assert all(abs(fate.let_in - when) < NEAR for fate, when in zip(fates, expected, strict=True))
    assert limiter.waits.count == sum(limiter.processed.values()) >= len(asked)


@bounded(150)
@given(bounds, leaving)
def test_never_too_many_never_too_fast_and_in_order(parameters: Parameters, asked: list[Asked]) -> None:
    fates, _ = outcome(parameters, asked)
    let_in = sorted(fate.let_in for fate in fates if fate.let_in < math.inf)
    if parameters.parallel_requests:
        for when in let_in:
            at_once = sum(fate.let_in <= when < fate.done - NEAR for fate in fates)
            assert at_once <= parameters.parallel_requests
    if parameters.rate_limit:
        for first, when in enumerate(let_in):
            for last in range(first, len(let_in)):
                most = parameters.rate_burst + (let_in[last] - when + NEAR) * parameters.rate_limit
                assert last - first + 1 <= most
    for earlier, later in pairwise(fate.let_in for fate in fates if fate.let_in < math.inf):
        assert earlier <= later


@bounded(150)
@given(st.one_of(bounds, adjusting), leaving)
def test_requests_that_leave_the_queue_change_no_limits(parameters: Parameters, asked: list[Asked]) -> None:
    fates, limiter = outcome(parameters, asked)
    for each, fate in zip(asked, fates, strict=True):
        if fate.refused == LEFT:
            assert abs(fate.done - fate.came - each.removed_after) < NEAR
        if fate.cancelled:
            assert abs(fate.done - fate.came - each.cancelled_after) < NEAR
    refused = sum(fate.refused != "" for fate in fates)
    assert sum(count for (_, status), count in limiter.processed.items() if status == 429) == refused


@bounded(150)
@given(adjusting, leaving)
def test_adaptive_limits_are_respected(parameters: Parameters, asked: list[Asked]) -> None:
    fates, limiter = outcome(parameters, asked)
    first = parameters.skip_initial
    for fate in fates[first:]:
        others = [one for one in fates[first:] if one.let_in <= fate.let_in < one.done - NEAR]
        if fate.let_in < math.inf and fate.parallel:
            assert len(others) <= fate.parallel
    for earlier, later in pairwise(fate.let_in for fate in fates if fate.let_in < math.inf):
        assert earlier <= later
    if longest := parameters.max_wait_duration:
        for fate in fates:
            assert fate.let_in == math.inf or fate.let_in - fate.came <= longest + NEAR
    most = parameters.max_adjustment_factor
    assert 1 / most <= limiter.factor <= most
    assert parameters.rate_limit / most <= limiter.bucket.rate <= parameters.rate_limit * most
    if not parameters.max_wait_duration:
        assert all(fate.refused in {"", LEFT} for fate in fates)


def test_a_request_of_a_disconnected_client_is_refused() -> None:
    asked = [Asked(0, 1), Asked(0, 0, removed_after=0.5)]
    fates, limiter = outcome(Parameters(parallel_requests=1), asked)
    assert [fate.refused for fate in fates] == ["", LEFT]
    assert limiter.processed[LEFT, 429] == 1
