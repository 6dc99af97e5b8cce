"""The event loop's lag: every stretch is counted, and long ones are seen for what they are."""

from __future__ import annotations

import asyncio
import time

import pytest

from lifecycle.process.loop_lag import BOUNDS, LagHistogram, LoopLag, measured_loop


def lag_of(*stretches: float) -> LoopLag:
    lag = LoopLag()
    for seconds in stretches:
        lag.add(seconds)
    return lag


def test_a_measured_loop_sees_how_long_it_was_busy() -> None:
    async def main() -> LoopLag | None:
        await asyncio.sleep(0)
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)
        return LoopLag.of(asyncio.get_running_loop())

    with asyncio.Runner(loop_factory=measured_loop) as runner:
        lag = runner.run(main())
    assert lag is not None
    assert lag.longest >= 0.02
    assert lag.histogram.within(1.0) >= 0.02


def test_waiting_does_not_count_as_loop_lag() -> None:
    async def main() -> int:
        lag = LoopLag.of(asyncio.get_running_loop())
        assert lag is not None
        before = lag.histogram.total
        await asyncio.sleep(0.01)
        return lag.histogram.total - before

    with asyncio.Runner(loop_factory=measured_loop) as runner:
        assert runner.run(main()) < 10


def test_an_unmeasured_loop_has_no_lag() -> None:
    async def main() -> LoopLag | None:
        return LoopLag.of(asyncio.get_running_loop())

    assert asyncio.run(main()) is None


def test_a_share_of_the_stretches_stayed_within_its_bound() -> None:
    stretches = lag_of(*[0.001] * 999, 0.5).histogram
    assert 0.001 <= stretches.within(0.999) < 0.0013
    assert 0.5 <= stretches.within(1.0) < 0.65


@pytest.mark.parametrize("seconds", [0.0, BOUNDS[0], BOUNDS[10], BOUNDS[-1]])
def test_a_bound_is_in_its_own_class(seconds: float) -> None:
    assert lag_of(seconds).histogram.within(1.0) == max(seconds, BOUNDS[0])


def test_what_is_longer_than_all_bounds_is_not_lost() -> None:
    lag = lag_of(100.0)
    assert lag.histogram.within(1.0) == float("inf")
    assert lag.longest == 100.0


def test_without_measured_time_slices_there_is_no_lag() -> None:
    assert LoopLag().histogram.within(0.999) == 0.0


def test_the_difference_of_two_readings_is_the_lag_between_them() -> None:
    lag = lag_of(0.5)
    before = lag.histogram
    lag.add(0.001)
    between = lag.histogram - before
    assert between.total == 1
    assert between.within(1.0) < 0.0013
    assert isinstance(between, LagHistogram)
