"""Questions to a graph: a part of it, why something is there, what nothing needs, what changed."""

import json

import jsonschema_rs
import pytest

from lifecycle import Cell, Hive, Hook, Lifecycle, Settings, config, invoke, module, provide, provide_private
from lifecycle.graph.diff import diff
from lifecycle.graph.query import find_module, find_type, only, unused, why
from lifecycle.graph.schema import graph_schema, timeline_schema
from lifecycle.graph.timeline import critical_path, held_by, read_timeline, timeline_of
from lifecycle.graph.value import Graph, read_graph


class Sizes(Settings, frozen=True):
    """Settings."""

    mtu: int = 0
    """Bytes."""


class Store:
    def __init__(self, sizes: Sizes, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open"))


class Index:
    def __init__(self, store: Store) -> None: ...


class Server:
    def __init__(self, index: Index, store: Store, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("listen"))

    def serve(self) -> None: ...


class Spare:
    def __init__(self, index: Index) -> None: ...


STORE = module("store", "Keeps things", config(Sizes), provide(Store))
SERVER = module("server", "Serves them", provide(Server), invoke(Server.serve))
INDEX = module("index", "Finds them", provide(Index), provide_private(Spare))


def graph(*more: Cell) -> Graph:
    return Hive(module("agent", "The agent", STORE, INDEX, SERVER, *more)).graph()


def test_a_module_is_found_by_its_id_or_the_end_of_it() -> None:
    assert find_module(graph(), "agent.store") == find_module(graph(), "store") == "agent.store"


def test_a_module_that_is_not_there_brings_the_nearest_to_mind() -> None:
    with pytest.raises(ValueError, match=r"module stor: no such module; did you mean store\?"):
        find_module(graph(), "stor")
    twice = graph(module("inner", "Inner", module("store", "Another", provide_private(Spare))))
    with pytest.raises(ValueError, match=r"it may be agent\.store or agent\.inner\.store; give the whole id"):
        find_module(twice, "store")


def test_a_part_has_the_module_and_what_is_directly_around_it() -> None:
    part = only(graph(), "agent.index")
    assert {node.name for node in part.nodes} == {"Index", "Spare", "Store", "Server"}
    assert {one.id for one in part.modules} == {
        "hive", "agent", "agent.store", "agent.index", "agent.server",
    }  # fmt: skip
    ids = {node.id for node in part.nodes}
    assert all(edge.source in ids and edge.target in ids for edge in part.edges)
    assert (part.settings, part.hooks) == ((), ())


def test_a_part_keeps_the_hooks_its_own_wait_for() -> None:
    part = only(graph(), "agent.server")
    assert [(hook.name, len(hook.after)) for hook in part.hooks] == [("open", 0), ("listen", 1)]


def test_why_gives_the_shortest_chain_from_each_invoked_function() -> None:
    chains = why(graph(), "agent.store/Sizes")
    assert [[edge.target for edge in chain] for chain in chains] == [
        ["agent.server/Server", "agent.store/Store", "agent.store/Sizes"]
    ]
    assert chains[0][0].source == "agent.server/Server.serve"


def test_why_without_an_invoked_user_lists_potential_users() -> None:
    assert why(graph(), "agent.index/Spare") == []
    without = Hive(STORE, INDEX).graph()
    assert [chain[0].source for chain in why(without, "store/Sizes")] == ["index/Spare"]


def test_a_type_is_found_by_its_name_or_nearly() -> None:
    assert [node.id for node in find_type(graph(), "Store")] == ["agent.store/Store"]
    assert [node.id for node in find_type(graph(), "store")] == ["agent.store/Store"]
    with pytest.raises(ValueError, match=r"type Stroe: nothing in hive provides it; did you mean Store\?"):
        find_type(graph(), "Stroe")


def test_unused_is_what_no_invoked_function_leads_to() -> None:
    assert [node.name for node in unused(graph())] == ["Spare"]


def test_graphs_differ_by_what_was_added_removed_and_changed() -> None:
    before = graph()
    after = Hive(
        module(
            "agent", "The agent", STORE, module("index", "Finds them well", provide(Index, Spare)), SERVER
        ),
        settings={"mtu": 1500},
    ).graph()
    changes = {(change.kind, change.id): change for change in diff(before, after)}
    assert set(changes) == {
        ("modules", "agent.index"),
        ("constructors", "agent.index/Spare"),
        ("settings", "mtu"),
    }
    assert [(one.field, one.before, one.after) for one in changes["settings", "mtu"].altered] == [
        ("value", "0", "1500"),
        ("origin", "default", "code"),
    ]
    assert [
        (change.kind, change.what) for change in diff(Hive(STORE).graph(), Hive(STORE, INDEX).graph())
    ] == [
        ("modules", "added"),
        ("constructors", "added"),
        ("constructors", "added"),
        ("edges", "added"),
        ("edges", "added"),
    ]


def test_a_hook_that_is_added_does_not_rename_the_others() -> None:
    class Early:
        def __init__(self, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("early"))

    changes = diff(
        graph(),
        Hive(provide(Early), invoke(Early), module("agent", "The agent", STORE, INDEX, SERVER)).graph(),
    )
    assert [(one.id, one.what) for one in changes if one.kind == "hooks"] == [("hive/Early:0", "added")]


def test_a_graph_is_read_back_as_it_was() -> None:
    assert read_graph(graph().json()) == graph()


@pytest.mark.parametrize(
    ("text", "why_not"),
    [
        ("[]", "it is not a graph"),
        ("{", "it is not a graph"),
        ('{"version": 7}', "it is of version 7 of the graph's JSON; this hive reads version 1"),
        ('{"version": 1}', "missing required field `name`"),
    ],
)
def test_a_document_that_is_not_a_graph_is_refused(text: str, why_not: str) -> None:
    with pytest.raises(ValueError, match=why_not):
        read_graph(text)


def test_the_graph_json_matches_its_schema() -> None:
    schema = graph_schema()
    jsonschema_rs.validate(schema, json.loads(graph().json()))
    broken = json.loads(graph().json()) | {"version": 2}
    assert not jsonschema_rs.is_valid(schema, broken)
    after = schema["$defs"]["HookInfo"]["properties"]["after"]
    assert after["description"] == "Ids of the hooks for which it waits."


def test_mermaid_has_a_subgraph_per_module_and_plain_ids() -> None:
    text = Hive(module("agent", 'The "agent"', STORE, INDEX, SERVER)).graph().mermaid()
    assert text.startswith("flowchart LR\n")
    assert 'subgraph m1["The #quot;agent#quot;"]' in text
    assert '{{"Spare"}}' in text
    assert '(["Server.serve"])' in text
    assert text.count("subgraph") == text.count("end\n") == 5
    assert text.count(" --> ") == len(graph().edges)


@pytest.mark.anyio
async def test_a_timeline_has_durations_and_the_critical_path() -> None:
    hive = Hive(module("agent", "The agent", STORE, INDEX, SERVER))
    async with hive.started():
        shown = hive.graph()
        timeline = timeline_of(shown, hive.profile)
    opened, listened = (hook.id for hook in shown.hooks)
    assert list(timeline.of("start")) == [opened, listened]
    assert set(timeline.of("construct")) == {
        node.id for node in shown.constructors if node.name in {"Store", "Index", "Server"}
    }
    assert list(timeline.of("invoke")) == [shown.invokes[0].id]
    assert held_by(shown, timeline) == {listened: opened}
    assert critical_path(shown, timeline) == [opened, listened]
    assert read_timeline(timeline.json()) == timeline
    jsonschema_rs.validate(timeline_schema(), json.loads(timeline.json()))
    assert list(timeline_of(shown, hive.profile).of("stop")) == [listened, opened]


@pytest.mark.anyio
async def test_hooks_of_one_name_in_one_module_have_different_ids() -> None:
    class First:
        def __init__(self, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("listen"))

    class Second:
        def __init__(self, first: First, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("listen"))
            lifecycle.append(Hook("listen"))

    hive = Hive(provide(First, Second), invoke(Second))
    async with hive.started():
        shown = hive.graph()
    timeline = timeline_of(shown, hive.profile)
    ids = [hook.id for hook in shown.hooks]
    assert ids == ["hive/First:0", "hive/Second:0", "hive/Second:1"]
    assert list(timeline.of("start")) == ids
    assert list(timeline.of("stop")) == ids[::-1]


def test_a_document_that_is_not_a_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not a timeline"):
        read_timeline("{}")
    with pytest.raises(ValueError, match="a timeline of version 3"):
        read_timeline('{"version": 3, "name": "hive", "spans": []}')
