"""Graphs of thousands of constructors, deep and wide; and any small graph, against a model."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Cell, GraphError, Hive, Member, decorate, group, invoke, module, provide, supply
from lifecycle.hints.places import Place
from lifecycle.injection.constructors import Constructor, Scope
from lifecycle.injection.cycles import cycles, order

MANY = 3_000


class Thing: ...


@contextmanager
def hardly_any_stack() -> Iterator[None]:
    """Room for fifty more calls: recursion along the graph does not get far."""
    depth = len(inspect.stack(0))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 50)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def kinds(number: int) -> list[type]:
    return [type(f"Kind{at}", (), {}) for at in range(number)]


def constructor(result: Any, *needs: Any, make: Callable[[], object] | None = None) -> Callable[..., object]:
    """A function of its own with these hints."""
    names = [f"need{at}" for at in range(len(needs))]
    space: dict[str, Any] = {"make": make or (result if isinstance(result, type) else Thing)}
    exec(f"def constructor({', '.join(names)}): return make()", space)  # noqa: S102  # of our own words
    function: Callable[..., object] = space["constructor"]
    function.__annotations__ = dict(zip(names, needs, strict=True)) | {"return": result}
    return function


def chain() -> tuple[Cell, ...]:
    links = kinds(MANY)
    made = [constructor(links[0]), *(constructor(links[at], links[at - 1]) for at in range(1, MANY))]
    return provide(*reversed(made)), invoke(links[-1])


def wide() -> tuple[Cell, ...]:
    leaves = kinds(MANY)
    return provide(*map(constructor, leaves)), invoke(constructor(None, *leaves[:200])), invoke(*leaves)


def diamonds() -> tuple[Cell, ...]:
    layers = kinds(MANY)
    made = [
        constructor(layers[at], *{layers[at // 2], layers[at // 3], layers[at - 1]} - {layers[at]})
        for at in range(MANY)
    ]
    made[0] = constructor(layers[0])
    return provide(*made), invoke(layers[-1])


def members() -> tuple[Cell, ...]:
    return provide(*(constructor(Member[Thing]) for _ in range(MANY))), invoke(list[Member[Thing]])


def decorators() -> tuple[Cell, ...]:
    cell = invoke(Thing)
    for _ in range(MANY):
        cell = decorate(constructor(Thing, Thing), cell)
    return supply(Thing()), cell


def modules() -> tuple[Cell, ...]:
    cell = group(provide(Thing), invoke(Thing))
    for at in range(MANY):
        cell = group(cell) if at % 10 else module("m", "M", cell)
    return (cell,)


@pytest.mark.parametrize("shape", [chain, wide, diamonds, members, decorators, modules])
def test_thousands_check_and_construct_without_recursion(shape: Callable[[], tuple[Cell, ...]]) -> None:
    hive = Hive(*shape())
    with hardly_any_stack():
        hive.check()
        hive._construct()
    assert len(hive._build.instances) >= (2 if shape is modules else MANY)


def test_a_cycle_of_thousands_is_reported_without_recursion() -> None:
    ring = kinds(MANY)
    hive = Hive(provide(*(constructor(ring[at], ring[at - 1]) for at in range(MANY))))
    with hardly_any_stack(), pytest.raises(GraphError) as caught:
        hive.check()
    (fault,) = caught.value.faults
    assert fault.text.startswith(f"Kind0 -> Kind{MANY - 1} -> Kind{MANY - 2}")
    assert fault.text.endswith("Kind1 -> Kind0")
    assert f"... and {MANY - 9} more ..." in fault.text
    assert len(fault.details) == MANY + 1  # a line per edge, and what to do


def test_a_chain_of_thousands_to_a_missing_type_is_reported_from_both_ends() -> None:
    links = kinds(MANY)
    made = [constructor(links[0], str), *(constructor(links[at], links[at - 1]) for at in range(1, MANY))]
    with hardly_any_stack(), pytest.raises(GraphError) as caught:
        Hive(provide(*made), invoke(links[-1])).check()
    (fault,) = caught.value.faults
    assert fault.text == "nothing provides str"
    assert any(f"... and {MANY - 10} more ..." in line for line in fault.details)
    assert any(f"which is invoked as Kind{MANY - 1}" in line for line in fault.details)
    assert len(fault.details) < 20


# --- any small graph ------------------------------------------------------------------------------------

Arrows = dict[int, list[int]]

graphs = st.integers(1, 8).flatmap(
    lambda size: st.fixed_dictionaries(
        {at: st.lists(st.integers(0, size - 1), unique=True, max_size=4) for at in range(size)}
    )
)


def nodes_of(arrows: Arrows) -> list[Constructor]:
    scope = Scope("hive", "hive", None, Place("", 0))
    nodes = [Constructor("provide", Thing, str(at), at, scope) for at in sorted(arrows)]
    for at, needs in arrows.items():
        nodes[at].needs = {str(need): nodes[need] for need in needs}
    return nodes


def reachable(arrows: Arrows, start: int) -> set[int]:
    """All that one or more arrows lead to from `start`."""
    found: set[int] = set()
    frontier = list(arrows[start])
    while frontier:
        if (at := frontier.pop()) not in found:
            found.add(at)
            frontier += arrows[at]
    return found


@given(graphs)
def test_the_reported_cycles_cover_exactly_the_edges_on_cycles(arrows: Arrows) -> None:
    on_a_cycle = {
        (start, end)
        for start, ends in arrows.items()
        for end in ends
        if start == end or start in reachable(arrows, end)
    }
    covered: set[tuple[int, int]] = set()
    for knot in cycles(nodes_of(arrows)):
        for cycle in knot:
            names = [int(node.name) for node in cycle]
            assert len(set(names)) == len(names)
            assert names[0] == min(names)
            edges = set(zip(names, names[1:] + names[:1], strict=True))
            assert edges - covered  # each covers something new
            covered |= edges
    assert covered == on_a_cycle


@given(graphs, st.data())
def test_whatever_is_needed_is_built_once_after_what_it_needs(arrows: Arrows, data: st.DataObject) -> None:
    forward = {at: [need for need in arrows[at] if need < at] for at in sorted(arrows)}
    roots = data.draw(st.lists(st.sampled_from(sorted(forward)), unique=True))
    found = kinds(len(forward))
    built: list[int] = []

    def maker(at: int) -> Callable[[], object]:
        def make() -> object:
            built.append(at)
            return found[at]()

        return make

    made = [constructor(found[at], *(found[n] for n in forward[at]), make=maker(at)) for at in forward]
    Hive(provide(*made), invoke(*(found[root] for root in roots)))._construct()
    wanted = set(roots).union(*(reachable(forward, root) for root in roots))
    assert sorted(built) == sorted(wanted)
    for at in built:
        assert all(built.index(need) < built.index(at) for need in forward[at])


@given(graphs)
def test_the_order_is_the_same_every_time_and_complete(arrows: Arrows) -> None:
    nodes = nodes_of(arrows)
    assert set(order(nodes)) == set(nodes)
    assert [node.name for node in order(nodes)] == [node.name for node in order(nodes_of(arrows))]
