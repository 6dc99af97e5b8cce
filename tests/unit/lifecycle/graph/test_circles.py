"""Modules that need each other: found, shown with what ties them, and refused where asked for."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Cell, GraphError, Hive, after, invoke, module, provide
from lifecycle.graph import circles, show
from lifecycle.injection.cycles import circles_of


class Table: ...


class Reader:
    def __init__(self, table: Table) -> None: ...


class Writer:
    def __init__(self, reader: Reader) -> None: ...


class Log:
    def __init__(self, writer: Writer) -> None: ...


@after(Writer)
def tidy() -> None: ...


TIED = (module("store", "Store", provide(Table, Writer)), module("query", "Query", provide(Reader)))
FREE = (
    module("tables", "Tables", provide(Table)),
    module("query", "Query", provide(Reader)),
    module("store", "Store", provide(Writer)),
)


def hive(*cells: Cell, refuse_circles: bool = False) -> Hive:
    return Hive(module("agent", "Agent", *cells, invoke(Writer)), refuse_circles=refuse_circles)


def test_modules_that_need_each_other_are_shown_with_what_ties_them() -> None:
    graph = hive(*TIED).graph()
    (circle,) = circles(graph)
    assert circle.modules == ("agent.query", "agent.store")
    assert show(graph, "circles") == (
        "2 modules need each other:\n"
        "  agent.query, agent.store\n"
        "  tied by:\n"
        "    Reader (agent.query) needs Table (agent.store)"
    )


def test_a_table_in_a_module_of_its_own_unties_them() -> None:
    graph = hive(*FREE).graph()
    assert circles(graph) == []
    assert show(graph, "circles") == "No modules need each other in a circle."
    assert show(graph, "circles", as_json=True) == "[]"
    hive(*FREE, refuse_circles=True).check()


def test_a_hive_that_refuses_circles_prints_the_remedy() -> None:
    with pytest.raises(GraphError) as caught:
        hive(*TIED, refuse_circles=True).check()
    (fault,) = caught.value.faults
    assert fault.text == "2 modules need each other: agent.query, agent.store"
    assert fault.details[0].endswith("needs Table of agent.store")
    assert fault.details[-1].startswith("do: move what several need into a module of its own")
    hive(*TIED).check()


def test_order_alone_ties_modules_too() -> None:
    ordered = module("query", "Query", provide(Reader), invoke(tidy))
    graph = hive(FREE[0], ordered, FREE[2]).graph()
    (circle,) = circles(graph)
    assert circle.modules == ("agent.query", "agent.store")
    edges = [edge for edge in graph.edges if edge.order]
    assert [edge.source for edge in edges] == ["agent.query/tidy"]
    assert not circles(msgspec.structs.replace(graph, edges=tuple(set(graph.edges) - set(edges))))


def test_a_module_and_those_inside_it_are_no_circle() -> None:
    inner = module("query", "Query", provide(Reader))
    graph = hive(module("store", "Store", provide(Table, Writer), inner)).graph()
    assert circles(graph) == []


def test_a_module_is_not_asked_for_with_circles() -> None:
    with pytest.raises(ValueError, match="a circle is between several"):
        show(hive(*FREE).graph(), "circles", "store")


ARROWS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=30)


@given(ARROWS)
def test_modules_are_in_one_circle_if_and_only_if_each_leads_to_the_other(
    arrows: list[tuple[str, str]],
) -> None:
    pairs = {pair for pair in arrows if pair[0] != pair[1]}
    reached = set(pairs)
    for middle, start, end in itertools.product("abcdefgh", repeat=3):
        if (start, middle) in reached and (middle, end) in reached:
            reached.add((start, end))
    found = circles_of((user, used, (user, used)) for user, used in pairs)
    together = {pair for one in found for pair in itertools.permutations(one.modules, 2)}
    assert together == {(one, two) for one, two in reached if one != two and (two, one) in reached}
    ties = {tie for one in found for tie in one.ties}
    assert circles_of((user, used, None) for user, used in pairs - ties) == []
