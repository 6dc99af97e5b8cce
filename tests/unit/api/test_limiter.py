"""The rate limiter by example: waits, refusals with reasons, adaptive limits, and normal use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
import structlog
from structlog.testing import capture_logs

from cells.api.limiter import Admission, Limiter, LimitExceeded, Parameters, RateBucket
from cells.api.metrics import limiter_families
from cells.api.rate_limits import LimitSettings
from cells.base.metrics import Histogram, MetricFamily
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio


@dataclass
class Line:
    """A limiter on a clock of its own, and what became of those who asked."""

    limiter: Limiter
    clock: VirtualClock
    let_in: list[str] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[Admission | None]] = field(default_factory=dict)

    def ask(
        self, name: str, takes: float = 1e9, vanished: Callable[[], Awaitable[None]] = anyio.sleep_forever
    ) -> None:
        """A request that takes so many seconds comes."""

        async def asked() -> Admission | None:
            try:
                admission = await self.limiter.enter(vanished)
            except LimitExceeded as refused:
                self.refused.append((name, refused.outcome, str(refused)))
                return None
            self.let_in.append(name)
            await asyncio.sleep(takes)
            admission.done(200)
            return admission

        self.tasks[name] = asyncio.create_task(asked())

    async def took(self, seconds: float, status: int = 200) -> None:
        """A request that takes so long comes and goes."""
        admission = await self.limiter.enter()
        await self.clock.advance(seconds)
        admission.done(status)


@asynccontextmanager
async def line(parameters: Parameters) -> AsyncIterator[Line]:
    with VirtualClock() as clock:
        found = Line(Limiter("endpoint-create", parameters, structlog.get_logger()), clock)
        yield found
        for task in found.tasks.values():
            task.cancel()
        await asyncio.gather(*found.tasks.values(), return_exceptions=True)


def default(name: str) -> Parameters:
    """Cilium's, of one limiter."""
    return LimitSettings().parameters()[name]


async def test_the_initial_requests_skip_the_limits() -> None:
    parameters = Parameters(rate_limit=1e-9, parallel_requests=1, skip_initial=3)
    async with line(parameters) as now:
        for name in "abcde":
            now.ask(name)
        await now.clock.advance(1000)
        assert now.let_in == ["a", "b", "c", "d"]
        assert now.limiter.in_flight == 4


async def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    async with line(Parameters(rate_limit=0.5, rate_burst=1, max_wait_duration=1.5)) as now:
        now.ask("a")
        now.ask("b")
        await now.clock.run_until_idle()
    text = "request would have to wait 2s to be served (maximum wait duration: 1.5s)"
    assert now.refused == [("b", "fail-limit-wait", text)]


async def test_a_rate_limited_request_is_refused_after_the_estimated_wait() -> None:
    async with line(Parameters(rate_limit=0.1, rate_burst=1, max_wait_duration=1.5)) as now:
        now.ask("a", takes=0.25)
        await now.clock.advance(0.25)
        now.ask("b")
        await now.clock.advance(0.24)
        assert now.refused == []
        await now.clock.advance(0.02)
        assert [name for name, *_ in now.refused] == ["b"]


async def test_a_request_without_a_slot_in_time_is_refused() -> None:
    async with line(Parameters(parallel_requests=1, max_wait_duration=5.0)) as now:
        now.ask("a")
        now.ask("b")
        await now.clock.advance(4.9)
        assert now.refused == []
        await now.clock.advance(0.2)
    text = "timed out while waiting to be served with 1 parallel requests"
    assert now.refused == [("b", "fail-parallel-wait", text)]


async def test_a_leaving_request_frees_its_slot() -> None:
    async with line(Parameters(rate_limit=0.1, rate_burst=1, parallel_requests=2)) as now:
        for name in "abcd":
            now.ask(name, takes=0)
        await now.clock.run_until_idle()
        now.tasks["b"].cancel()
        await now.clock.advance(10.1)
        assert now.let_in == ["a", "c"]
        await now.clock.advance(10)
        assert now.let_in == ["a", "c", "d"]


@pytest.mark.parametrize("turns", range(8))
async def test_a_request_cancelled_at_its_turn_frees_its_slot(turns: int) -> None:
    async with line(Parameters(parallel_requests=1)) as now:
        first = await now.limiter.enter()
        waiting = asyncio.create_task(now.limiter.enter())
        await now.clock.run_until_idle()
        first.done(200)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await now.clock.run_until_idle()
        if not waiting.cancelled():
            waiting.result().done(200)
        assert (now.limiter.in_flight, now.limiter.waiting) == (0, 0)
        now.ask("next")
        await now.clock.run_until_idle()
        assert now.let_in == ["next"]


async def test_new_requests_queue_behind_waiting_ones() -> None:
    async with line(Parameters(parallel_requests=1)) as now:
        first = await now.limiter.enter()
        now.ask("earlier")
        await now.clock.run_until_idle()

        async def later() -> None:
            first.done(200)
            await now.limiter.enter()
            now.let_in.append("later")

        task = asyncio.create_task(later())
        await now.clock.run_until_idle()
        assert now.let_in == ["earlier"]
        task.cancel()


async def test_a_smaller_burst_counts_at_once() -> None:
    bucket = RateBucket(1.0, 5)
    bucket.adjust(1.0, 2, now=100.0)
    assert bucket.wait(100.0, ahead=1) == 0
    assert bucket.wait(100.0, ahead=3) == 2


async def test_a_request_of_a_disconnected_client_leaves_the_queue() -> None:
    async with line(Parameters(parallel_requests=1)) as now:
        left = anyio.Event()
        now.ask("a", takes=10)
        now.ask("b", vanished=left.wait)
        now.ask("c")
        await now.clock.run_until_idle()
        left.set()
        await now.clock.run_until_idle()
        text = "request cancelled while waiting for rate limiting slot"
        assert now.refused == [("b", "request-cancelled", text)]
        await now.clock.advance(10)
        assert now.let_in == ["a", "c"]


async def test_closing_the_limiter_releases_all_waiting_requests() -> None:
    async with line(Parameters(parallel_requests=1)) as now:
        for name in "abc":
            now.ask(name)
        await now.clock.run_until_idle()
        now.limiter.close()
        now.ask("d")
        await now.clock.run_until_idle()
        assert {name for name, *_ in now.refused} == set("bcd")
        assert {outcome for _, outcome, _ in now.refused} == {"request-cancelled"}
        assert now.let_in == ["a"]
        now.limiter.open()
        now.ask("e")
        await now.clock.run_until_idle()
        assert now.limiter.waiting == 1


@pytest.mark.parametrize(
    ("seconds", "factor", "rate", "burst", "parallel"),
    [
        (2, 1, 0.5, 4, 4),
        (4, 0.5, 0.25, 3, 3),
        (1, 2, 1, 6, 6),
        (0.002, 100, 50, 202, 202),
        (900, 0.01, 0.005, 2, 2),
    ],
)
async def test_limits_follow_how_long_requests_take(
    seconds: float, factor: float, rate: float, burst: int, parallel: int
) -> None:
    async with line(default("endpoint-create")) as now:
        await now.took(seconds)
        limiter = now.limiter
        assert limiter.factor == pytest.approx(factor)
        assert limiter.bucket.rate == pytest.approx(rate)
        assert (limiter.bucket.burst, limiter.parallel) == (burst, parallel)


@pytest.mark.parametrize(("seconds", "burst", "parallel"), [(1, 4, 4), (900, 3, 3), (0.002, 202, 6)])
async def test_limits_stay_within_the_bounds_set(seconds: float, burst: int, parallel: int) -> None:
    parameters = Parameters(
        rate_limit=1,
        rate_burst=4,
        parallel_requests=4,
        min_parallel_requests=3,
        max_parallel_requests=6,
        auto_adjust=True,
        estimated_processing_duration=1,
    )
    async with line(parameters) as now:
        await now.took(seconds)
        assert (now.limiter.bucket.burst, now.limiter.parallel) == (burst, parallel)


async def test_the_mean_of_the_latest_counts_and_only_of_what_succeeded() -> None:
    parameters = Parameters(auto_adjust=True, estimated_processing_duration=1.0, mean_over=2)
    async with line(parameters) as now:
        await now.took(10)
        await now.took(1)
        await now.took(3)
        await now.took(100, status=500)
        assert now.limiter.processing.value == pytest.approx(2)
        assert now.limiter.factor == pytest.approx(0.5)


async def test_without_auto_adjust_limits_stay_fixed() -> None:
    parameters = Parameters(rate_limit=5, rate_burst=3, parallel_requests=2)
    async with line(parameters) as now:
        await now.took(0.001)
        assert (now.limiter.bucket.rate, now.limiter.bucket.burst, now.limiter.parallel) == (5, 3, 2)
        assert now.limiter.factor == 1


async def test_waiting_requests_follow_a_growing_rate() -> None:
    async with line(default("endpoint-patch")) as now:
        for number in range(12):
            now.ask(str(number), takes=0.1)
        await now.clock.advance(1.0)
        assert len(now.let_in) == 12


async def test_at_once_fifty_stock_plugins_wait_for_less_than_a_second() -> None:
    async with line(default("endpoint-create")) as now:
        for number in range(50):
            now.ask(str(number), takes=0.002)
        took = await now.clock.until(lambda: len(now.let_in) == 50)
        assert 0.7 < took < 0.9
        await now.clock.advance(5)
        for number in range(50, 250):
            now.ask(str(number), takes=0.002)
        assert await now.clock.until(lambda: len(now.let_in) == 250) < 0.01
    assert now.refused == []


@pytest.mark.parametrize(
    ("name", "takes", "pause"), [("endpoint-list", 0.003, 0.06), ("endpoint-get", 0.001, 0.06)]
)
async def test_a_command_in_a_loop_never_waits(name: str, takes: float, pause: float) -> None:
    async with line(default(name)) as now:
        for _ in range(200):
            admission = await now.limiter.enter()
            await now.clock.advance(takes)
            admission.done(200)
            await now.clock.advance(pause)
        assert now.limiter.waits.sum == 0


async def test_a_bundle_of_many_endpoints_hardly_waits() -> None:
    async with line(default("endpoint-get")) as now:
        for number in range(250):
            now.ask(str(number), takes=0.001)
            await now.clock.until(now.tasks[str(number)].done)
        assert now.limiter.waits.sum < 0.5


async def test_deleting_all_pods_at_once_waits_for_places_only() -> None:
    async with line(default("endpoint-delete")) as now:
        for number in range(250):
            now.ask(str(number), takes=0.002)
        assert await now.clock.until(lambda: len(now.let_in) == 250) < 0.02


async def test_requests_are_logged_if_wanted() -> None:
    with capture_logs() as logged:
        async with line(Parameters(parallel_requests=1, max_wait_duration=1.0, log=True)) as now:
            now.ask("a", takes=2)
            now.ask("b")
            await now.clock.advance(3)
    assert [(one["event"], one["name"], one["log_level"]) for one in logged] == [
        ("API call refused", "endpoint-create", "warning"),
        ("API call has been processed", "endpoint-create", "info"),
    ]
    assert logged[1]["processing"] == "2s"


def series(limiter: Limiter) -> dict[str, dict[tuple[str, ...], float | Histogram]]:
    """Its metrics, without the common prefix."""
    families: list[MetricFamily] = list(limiter_families([limiter]))
    assert all(one.on == (not one.name.endswith("wait_history_duration_seconds")) for one in families)
    return {one.name.removeprefix("cilium_api_limiter_"): dict(one.series) for one in families}


async def test_all_limiter_metrics_exist_after_the_first_request() -> None:
    async with line(default("endpoint-create")) as now:
        assert all(not values for values in series(now.limiter).values())
        await now.took(4)
        metrics = series(now.limiter)
    name = "endpoint-create"
    waits = metrics.pop("wait_history_duration_seconds")[name,]
    assert isinstance(waits, Histogram)
    assert waits.count == 1
    assert metrics == {
        "processing_duration_seconds": {
            (name, "mean"): pytest.approx(4),
            (name, "estimated"): 2,
        },
        "wait_duration_seconds": {(name, "mean"): 0, (name, "min"): 0, (name, "max"): 60},
        "requests_in_flight": {(name, "in-flight"): 0, (name, "limit"): 3},
        "rate_limit": {(name, "limit"): pytest.approx(0.25), (name, "burst"): 3},
        "adjustment_factor": {(name,): pytest.approx(0.5)},
        "processed_requests_total": {(name, "success", "200"): 1},
    }


async def test_a_limiter_without_a_rate_reports_rate_0() -> None:
    async with line(default("endpoint-delete")) as now:
        await now.took(0.2, status=404)
        metrics = series(now.limiter)
    assert set(metrics["rate_limit"].values()) == {0}
    assert metrics["processed_requests_total"] == {("endpoint-create", "fail", "404"): 1}
