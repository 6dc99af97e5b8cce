"""A graph with faults is drawn all the same, with what is wrong marked: tree, Graphviz, Mermaid, JSON."""

import json
import re

import jsonschema_rs
import pytest

from lifecycle import GraphError, Hive, Settings, config, invoke, module, provide, provide_private
from lifecycle.graph import FaultInfo, Graph, graph_schema, read_graph


class Store: ...


class Left:
    def __init__(self, store: Store, right: "Right") -> None: ...


class Right:
    def __init__(self, left: Left) -> None: ...


class Removed: ...


class Hidden: ...


class Server:
    def __init__(self, vanished: Removed, hidden: Hidden) -> None: ...


class Sizes(Settings, frozen=True):
    """Settings."""

    mtu: int = 0
    """Bytes."""


faulty = (
    module("one", "One", config(Sizes), provide(Store, Left)),
    module("two", "Two", provide(Right, Store), provide_private(Hidden)),
    module("three", "Three", provide(Server), invoke(Server), invoke(Left)),
)


@pytest.fixture
def graph() -> Graph:
    return Hive(*faulty).graph(faulty=True)


def of(graph: Graph, kind: str) -> FaultInfo:
    (found,) = (fault for fault in graph.faults if fault.kind == kind)
    return found


def test_every_fault_names_the_nodes_it_is_about(graph: Graph) -> None:
    assert {fault.kind for fault in graph.faults} == {"missing", "private", "cycle", "duplicate"}
    assert (of(graph, "missing").lacks, of(graph, "missing").nodes) == ("Removed", ("three/Server",))
    assert (of(graph, "private").lacks, of(graph, "private").nodes) == ("Hidden", ("three/Server",))
    assert of(graph, "cycle").nodes == ("one/Left", "two/Right")
    assert of(graph, "duplicate").nodes == ("one/Store", "two/Store")
    with pytest.raises(GraphError) as raised:
        Hive(*faulty).check()
    texts = [(fault.text, fault.details) for fault in raised.value.faults]
    assert [(fault.text, fault.details) for fault in graph.faults] == texts


def test_the_tree_marks_faults(graph: Graph) -> None:
    assert (
        graph.tree()
        == """\
hive
  one  One
    · set     1 setting
    · provide Store (duplicate)
    · provide Left (in a cycle) <- Store, Right
  two  Two
    · provide Right (in a cycle) <- Left
    · provide Store (not needed, duplicate)
    · provide Hidden (private, not needed)
  three  Three
    · provide Server <- Removed (missing), Hidden (private)
    · invoke  Server <- Server
    · invoke  Left <- Left
"""
    )


def test_graphviz_draws_faults_in_red(graph: Graph) -> None:
    dot = graph.dot()
    red = '[color="#c62828", penwidth=2]'
    for line in (
        f'"one/Left" -> "two/Right" {red};',
        f'"two/Right" -> "one/Left" {red};',
        '"one/Left" -> "one/Store";',
        f'"three/Server" -> "missing Removed" {red};',
        '"one/Store" [label="Store\\nduplicate", color="#c62828", fontcolor="#c62828", penwidth=2];',
        '"three/Server" [label="Server"];',
    ):
        assert line in dot
    assert dot.count("{") == dot.count("}")


def test_mermaid_draws_faults_in_red(graph: Graph) -> None:
    lines = graph.mermaid().splitlines()
    names = {  # what is provided stands before what is invoked
        found[2]: found[1]
        for line in reversed(lines)
        if (found := re.match(r' *(\w+)[\[({/]+"(\w+)', line)) is not None
    }
    assert f'  {names["Removed"]}[/"Removed<br>missing"/]:::fault' in lines
    assert f"  {names['Server']} -.-> {names['Removed']}" in lines
    arrows = [line for line in lines if "-->" in line or "-.->" in line]
    (styled,) = (line for line in lines if line.startswith("  linkStyle "))
    red = [arrows[int(number)] for number in styled.split()[1].split(",")]
    assert f"  {names['Left']} --> {names['Right']}" in red
    assert len(red) == 4
    assert sum(line.endswith(":::fault") for line in lines) == 6


def test_the_json_has_faults_and_is_read_back(graph: Graph) -> None:
    jsonschema_rs.validate(graph_schema(), json.loads(graph.json()))
    assert read_graph(graph.json()) == graph


def test_a_part_of_a_graph_keeps_its_faults(graph: Graph) -> None:
    assert {fault.kind for fault in graph.only("three").faults} == {"missing", "private"}
    assert {fault.kind for fault in graph.only("two").faults} == {"cycle", "duplicate"}


class Mtu(Settings, frozen=True):
    """More settings."""

    mtu: int = 0
    """Bytes."""


def needs_both(sizes: Sizes, mtu: Mtu) -> None: ...


def test_settings_with_one_name_are_marked() -> None:
    cells = module("one", "One", config(Sizes)), module("two", "Two", config(Mtu)), invoke(needs_both)
    graph = Hive(*cells).graph(faulty=True)
    assert of(graph, "duplicate").nodes == ("one/Sizes", "two/Mtu")
    assert graph.tree().count("· set     1 setting (duplicate)\n") == 2


def test_a_hive_without_faults_is_built() -> None:
    graph = Hive(module("one", "One", provide(Store), invoke(Store))).graph(faulty=True)
    assert graph.faults == ()
    assert [node.built for node in graph.constructors] == [True]


def test_without_being_asked_to_a_graph_with_faults_is_refused() -> None:
    with pytest.raises(GraphError, match="4 faults"):
        Hive(*faulty).graph()


@pytest.mark.parametrize("twin", ["hive", "twin"])
def test_modules_of_one_id_are_drawn_as_one(twin: str) -> None:
    cells = (module(twin, "One", provide(Store)), module("twin", "Two", invoke(Store)))
    graph = Hive(*cells).graph(faulty=True)
    assert [one.id for one in graph.modules] == ["hive", "twin"]
    assert graph.tree().count("twin") >= 1
    assert graph.tree().splitlines()[0] == "hive"
