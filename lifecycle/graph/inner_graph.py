"""The graph of a hive combined with that of an inner hive."""

from typing import Any

import msgspec

from lifecycle.graph.parts import Edge
from lifecycle.graph.value import Graph

__all__ = ["with_inner_graph"]


def with_inner_graph(graph: Graph, inner: Graph) -> Graph:
    """Both graphs in one: `inner` stands below the module of its name.

    A type that its InnerHive shares is a supplied value in the inner graph, with an edge to its provider in
    the outer hive.
    """
    stem = [node.id for node in graph.constructors if node.module == inner.name and node.kind == "provide"]
    needed = {edge.target for edge in graph.edges if edge.source in stem}
    provided = {node.provides for node in graph.constructors if node.id in needed}
    shared = [
        Edge(source=node.id, target=target, parameter="shared")
        for node in inner.constructors
        if node.kind == "supply" and node.module == inner.name and node.provides in provided
        for target in stem
    ]
    both: dict[str, Any] = {
        field: (*getattr(graph, field), *getattr(inner, field))
        for field in ("constructors", "invokes", "settings", "hooks")
    }
    modules = (*graph.modules, *(module for module in inner.modules if module.id != inner.name))
    edges = (*graph.edges, *inner.edges, *shared)
    return msgspec.structs.replace(graph, modules=modules, edges=edges, **both)
