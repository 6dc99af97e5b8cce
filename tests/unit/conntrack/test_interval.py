"""The adaptive interval of conntrack garbage collection."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.datapath.conntrack import FEW, LONGEST, MANY, SHORTEST, START, next_interval

intervals = st.floats(SHORTEST, LONGEST)
shares = st.floats(0, 1)


@given(intervals, shares)
def test_the_gc_interval_stays_within_its_bounds(expected: float, removed: float) -> None:
    assert SHORTEST <= next_interval(expected, removed) <= LONGEST


@given(intervals, st.floats(MANY, 1, exclude_min=True))
def test_many_removed_entries_shorten_the_gc_interval(expected: float, removed: float) -> None:
    got = next_interval(expected, removed)
    assert got == pytest.approx(max(SHORTEST, expected * (1 - min(removed, 0.9))), abs=0.5)


@given(intervals, st.floats(0, FEW, exclude_min=True, exclude_max=True))
def test_few_removed_entries_lengthen_the_gc_interval_by_half(expected: float, removed: float) -> None:
    assert next_interval(expected, removed) == pytest.approx(min(LONGEST, expected * 1.5), abs=0.5)


@given(intervals, st.one_of(st.just(0.0), st.floats(FEW, MANY)), st.floats(0, LONGEST) | st.none())
def test_a_moderate_share_of_removed_entries_leaves_the_gc_interval(
    expected: float, removed: float, actual: float | None
) -> None:
    late = actual is None or removed == 0 or actual == 0 or actual >= expected
    if late:
        assert next_interval(expected, removed, actual) == expected


@given(intervals, shares, st.floats(0.001, 1, exclude_max=True))
def test_an_early_gc_pass_is_scaled_up(expected: float, removed: float, part: float) -> None:
    actual = expected * part
    assert next_interval(expected, removed, actual) == next_interval(expected, removed * (expected / actual))


@given(intervals, shares, st.floats(1, 100))
def test_a_late_gc_pass_is_not_scaled_down(expected: float, removed: float, part: float) -> None:
    assert next_interval(expected, removed, expected * part) == next_interval(expected, removed)


@pytest.mark.parametrize(
    ("removed", "actual", "expected"),
    [
        (0, None, 300),
        (0.01, None, 450),
        (0.05, None, 300),
        (0.25, None, 300),
        (0.3, None, 210),
        (0.95, None, 30),
        (0.1, 100, 210),
        (0.001, 150, 450),
    ],
)
def test_the_first_gc_interval_follows_from_the_start_interval(
    removed: float, actual: float | None, expected: float
) -> None:
    assert next_interval(START, removed, actual) == expected
