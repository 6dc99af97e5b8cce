"""The graph as a value: tree, Graphviz, JSON."""

import json
import textwrap

import pytest

from lifecycle import (
    GraphError,
    Hive,
    Hook,
    Jobs,
    Lifecycle,
    Settings,
    Sources,
    config,
    invoke,
    module,
    provide,
    provide_private,
    replace,
)


class Sizes(Settings, frozen=True):
    """Settings."""

    mtu: int = 0
    """Bytes."""
    name: str = ""


class Store:
    def __init__(self, sizes: Sizes) -> None: ...


class Server:
    def __init__(self, store: Store, lifecycle: Lifecycle, jobs: Jobs) -> None:
        lifecycle.append(Hook("listen"))

    def serve(self) -> None: ...


class Unused: ...


agent = module(
    "agent",
    "The agent",
    module("store", "Keeps things", config(Sizes), provide_private(Unused), provide(Store)),
    module("server", "Serves them", provide(Server), invoke(Server.serve)),
)


def test_the_tree_shows_what_each_module_sets_provides_invokes_and_runs() -> None:
    assert Hive(agent, settings=Sources(["--mtu=1500"])).graph().tree() == textwrap.dedent("""\
        hive
          agent  The agent
            store  Keeps things
              · set     2 settings, 1 given
              · provide Unused (private, not needed)
              · provide Store <- Sizes
            server  Serves them
              · provide Server <- Store
              · invoke  Server.serve <- Server
              · hook    listen
              · hook    jobs of Server
    """)


def test_the_json_has_an_array_of_each_kind() -> None:
    data = json.loads(Hive(agent).graph().json())
    assert data["version"] == 1
    assert data["modules"] == [
        {"id": "hive", "title": "hive", "parent": None},
        {"id": "agent", "title": "The agent", "parent": "hive"},
        {"id": "agent.store", "title": "Keeps things", "parent": "agent"},
        {"id": "agent.server", "title": "Serves them", "parent": "agent"},
    ]
    assert [(node["id"], node["kind"], node["private"], node["built"]) for node in data["constructors"]] == [
        ("agent.store/Sizes", "config", False, True),
        ("agent.store/Unused", "provide", True, False),
        ("agent.store/Store", "provide", False, True),
        ("agent.server/Server", "provide", False, True),
    ]
    assert data["edges"] == [
        {"from": "agent.store/Store", "to": "agent.store/Sizes", "parameter": "sizes", "order": False},
        {"from": "agent.server/Server", "to": "agent.store/Store", "parameter": "store", "order": False},
        {
            "from": "agent.server/Server.serve",
            "to": "agent.server/Server",
            "parameter": "self",
            "order": False,
        },
    ]
    assert [node["id"] for node in data["invokes"]] == ["agent.server/Server.serve"]
    assert data["settings"][0] == {
        "name": "mtu",
        "module": "agent.store",
        "struct": "Sizes",
        "type": "int",
        "value": "0",
        "origin": "default",
        "help": "Bytes.",
    }
    assert [(hook["name"], hook["constructor"], hook["after"]) for hook in data["hooks"]] == [
        ("listen", "agent.server/Server", []),
        ("jobs of Server", "agent.server/Server", ["agent.server/Server:0"]),
    ]


def test_dot_draws_a_cluster_per_module_and_an_arrow_per_need() -> None:
    dot = Hive(agent).graph().dot()
    assert dot.startswith('digraph "hive" {')
    for line in (
        'subgraph "cluster_agent.store" {',
        'label="Keeps things";',
        '"agent.store/Unused" [label="Unused", style=dashed];',
        '"agent.server/Server.serve" [label="Server.serve", shape=ellipse];',
        '"agent.server/Server" -> "agent.store/Store";',
    ):
        assert line in dot
    assert dot.count("{") == dot.count("}")


def test_a_fake_shows_with_what_it_replaces() -> None:
    class Fake(Store):
        def __init__(self) -> None: ...

    graph = Hive(agent, replace(Store, Fake())).graph()
    stores = [
        (node.kind, node.replaced, node.built) for node in graph.constructors if node.provides == "Store"
    ]
    assert stores == [("provide", True, False), ("replace", False, True)]
    assert ("agent.server/Server", "hive/Store") in [(edge.source, edge.target) for edge in graph.edges]


def test_two_nodes_of_a_name_in_one_module_have_different_ids() -> None:
    graph = Hive(agent, invoke(Server.serve, Server.serve)).graph()
    assert [node.id for node in graph.invokes][1:] == ["hive/Server.serve", "hive/Server.serve#2"]


def test_a_graph_with_faults_is_none() -> None:
    with pytest.raises(GraphError, match="nothing provides Sizes"):
        Hive(provide(Store)).graph()
