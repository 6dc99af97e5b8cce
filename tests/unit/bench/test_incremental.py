"""The benchmark of incremental tables compares equal work, and each figure is of one change."""

from collections.abc import Callable
from typing import Any

import pytest

from lifecycle import ReadTable, Table
from tests.bench.incremental import OPERATORS, as_a_whole, incrementally, one_change, tables


def test_incremental_and_full_computation_agree() -> None:
    pods, nodes = tables(1000)
    ours, plain = incrementally(pods, nodes), as_a_whole(pods, nodes)
    for pod, cpu in ((5, 70), (999, 0), (500, 0)):
        with pods.txn() as txn:
            txn.put((pod, pod // 100, cpu))
        assert sorted(ours.all()) == sorted(plain.all())
    assert len(ours) == 10


@pytest.mark.parametrize("make", [*OPERATORS.values(), incrementally, as_a_whole])
def test_a_change_is_seen_and_timed(
    make: Callable[[Table[Any, Any], Table[Any, Any]], ReadTable[Any, Any]],
) -> None:
    assert one_change(make, 200, 20) > 0
