"""Pairwise rows cover all compatible pairs of choices in few rows."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.modes import DIMENSIONS
from tests.support.pairwise import Pair, Row, covering, pairs_of, rotated, without

sizes = st.lists(st.integers(1, 4), min_size=2, max_size=8)


def dimensions_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"d{at}": [f"v{value}" for value in range(size)] for at, size in enumerate(sizes)}


def all_pairs(dimensions: dict[str, list[str]]) -> set[Pair]:
    return {
        frozenset(((one, a), (other, b)))
        for one, other in combinations(dimensions, 2)
        for a in dimensions[one]
        for b in dimensions[other]
    }


def met(rows: list[Row]) -> set[Pair]:
    return set().union(*map(pairs_of, rows))


@given(sizes, st.integers(0, 99))
def test_all_pairs_meet_in_rows_that_are_the_same_each_time(sizes: list[int], seed: int) -> None:
    dimensions = dimensions_of(sizes)
    rows = covering(dimensions, seed)
    assert met(rows) == all_pairs(dimensions)
    assert rows == covering(dimensions, seed)
    assert all(list(row) == list(dimensions) for row in rows)


def test_the_modes_of_an_agent_are_a_dozen_and_a_half_of_rows() -> None:
    assert len(covering(DIMENSIONS)) <= 18


@given(sizes, st.data())
def test_a_pair_that_is_refused_takes_no_other_pair_with_it(sizes: list[int], data: st.DataObject) -> None:
    dimensions = dimensions_of(sizes)
    refused = data.draw(st.sampled_from(sorted(all_pairs(dimensions), key=sorted)))
    names = {name for name, _ in refused}
    rows: list[Row] = []
    for row in covering(dimensions):
        taken = [row] if refused not in pairs_of(row) else list(without(row, names, dimensions))
        rows += [one for one in taken if refused not in pairs_of(one)]
    blamed = [name for name in names if len(dimensions[name]) == 1]
    if not blamed:  # else a choice that is the only one is refused
        assert met(rows) == all_pairs(dimensions) - {refused}


@given(sizes, st.integers(1, 5))
def test_every_row_has_its_turn(sizes: list[int], count: int) -> None:
    rows = covering(dimensions_of(sizes))
    seen = [row for start in range(len(rows)) for row in rotated(rows, f"{start:012x}", count)]
    assert all(row in seen for row in rows)
    assert len(rotated(rows, "f" * 40, count)) == min(count, len(rows))
