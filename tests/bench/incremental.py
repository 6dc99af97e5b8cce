"""Incremental tables: the cost of one changed row, against recomputing everything."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from lifecycle import Derived, ReadTable, Table
from tests.bench.stats import Figure, Row, Sample

Pod = tuple[int, int, int]
"""Number, node, CPU."""
Node = tuple[int, int]
"""Number, zone."""

PODS_A_NODE = 100
LIMIT = 50.0
"""Limit in µs for one changed row among 100,000."""
SIZES = (1_000, 10_000, 100_000)
CHANGES = 300


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure one changed row among 100,000 for each operator; three in a chain against a plain function."""
    del folder
    single: dict[str, list[float]] = {what: [] for what in OPERATORS}
    ours: dict[int, list[float]] = {size: [] for size in SIZES}
    plain: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for what, make in OPERATORS.items():
            single[what].append(one_change(make, SIZES[-1], CHANGES))
        for size in SIZES:
            ours[size].append(one_change(incrementally, size, CHANGES))
            plain[size].append(one_change(as_a_whole, size, max(1, 3 * SIZES[0] // size)))
    figures: list[Row | Figure] = [
        Figure(f"one changed row among {SIZES[-1]:,}: {what}", "µs", Sample(tuple(found)), LIMIT)
        for what, found in single.items()
    ]
    figures += [
        Row(
            f"one changed row among {size:,}: filter, join, group",
            "µs",
            Sample(tuple(ours[size])),
            "recomputing all",
            Sample(tuple(plain[size])),
            None,
        )
        for size in SIZES
    ]
    return figures


def one_change(
    make: Callable[[Table[int, Pod], Table[int, Node]], ReadTable[Any, Any]],
    size: int,
    changes: int,
) -> float:
    """Return the median in µs from a transaction with one changed row to the derived row at a watcher."""
    pods, nodes = tables(size)
    watcher = make(pods, nodes).changes()
    watcher.take()
    took = []
    for number in range(changes):
        pod = number * 7919 % size
        began = time.perf_counter()
        with pods.txn() as txn:
            txn.put((pod, pod // PODS_A_NODE, size + number))
        batch = watcher.take()
        took.append(time.perf_counter() - began)
        assert batch
    return median(took) * 1e6


def tables(size: int) -> tuple[Table[int, Pod], Table[int, Node]]:
    """Fill tables with this number of pods, a hundred on every node."""
    pods: Table[int, Pod] = Table("pods", key=lambda pod: pod[0])
    with pods.txn() as txn:
        for number in range(size):
            txn.put((number, number // PODS_A_NODE, number % 10))
    nodes: Table[int, Node] = Table("nodes", key=lambda node: node[0])
    with nodes.txn() as others:
        for number in range(size // PODS_A_NODE):
            others.put((number, number % 3))
    return pods, nodes


def incrementally(pods: Table[int, Pod], nodes: Table[int, Node]) -> ReadTable[Any, Any]:
    """Derive the sum of CPU of each node's pods, with its zone."""
    return (
        pods.filter(lambda pod: pod[2] > 0)
        .join(nodes, lambda pod, node: (pod[1], node[1], pod[2]), on=lambda pod: pod[1])
        .group(lambda pod: pod[0], lambda node, found: (node, found[0][1], sum(pod[2] for pod in found)))
    )


def as_a_whole(pods: Table[int, Pod], nodes: Table[int, Node]) -> ReadTable[Any, Any]:
    """Compute the same by a function of all rows."""

    def totals(every: list[Pod], all_nodes: list[Node]) -> dict[int, tuple[int, int, int]]:
        zones, sums = dict(all_nodes), defaultdict[int, int](int)
        for _, node, cpu in every:
            if cpu > 0 and node in zones:
                sums[node] += cpu
        return {node: (node, zones[node], total) for node, total in sums.items()}

    return Derived("totals", totals, pods, nodes)


OPERATORS: dict[str, Callable[[Table[int, Pod], Table[int, Node]], ReadTable[Any, Any]]] = {
    "map": lambda pods, _: pods.map(lambda pod: pod[2]),
    "filter": lambda pods, _: pods.filter(lambda pod: pod[2] > 0),
    "flat_map, two of each": lambda pods, _: pods.flat_map(
        lambda pod: ((pod[0], half, pod[2]) for half in (0, 1)), key=lambda half: half[:2]
    ),
    "group, a hundred in each": lambda pods, _: pods.group(
        lambda pod: pod[1], lambda node, found: (node, sum(pod[2] for pod in found))
    ),
    "aggregate": lambda pods, _: pods.aggregate(
        lambda pod: pod[1],
        zero=lambda _: 0,
        add=lambda total, pod: total + pod[2],
        subtract=lambda total, pod: total - pod[2],
    ),
    "join": lambda pods, nodes: pods.join(nodes, lambda pod, node: (pod, node[1]), on=lambda pod: pod[1]),
    "outer_join": lambda pods, nodes: pods.outer_join(nodes, lambda pod, node: (pod, node)),
}
