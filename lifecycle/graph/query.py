"""Queries of a graph: a part of it, why something is in it, what nothing needs, circles."""

from collections import defaultdict
from typing import TypeVar

import msgspec

from lifecycle.errors import suggestion
from lifecycle.graph.parts import ConstructorInfo, Edge, Parts
from lifecycle.injection.cycles import Circle, circles_of

__all__ = ["circles", "find_module", "find_type", "only", "unused", "why"]

G = TypeVar("G", bound=Parts)


def find_module(graph: Parts, text: str) -> str:
    """Return the full id of the module named ``agent.ipam`` or, if that is unambiguous, ``ipam``.

    Raises ValueError("one line") if none or more than one matches.
    """
    ids = [module.id for module in graph.modules]
    matches = [text] if text in ids else [module_id for module_id in ids if module_id.endswith(f".{text}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"module {text}: it may be {' or '.join(matches)}; give the whole id")
    tails = {module_id.rpartition(".")[2]: module_id for module_id in ids}
    raise ValueError(f"module {text}: no such module{suggestion(text, [*ids, *tails])}")


def find_type(graph: Parts, text: str) -> list[ConstructorInfo]:
    """Return the providers of the type that `text` names; also by name or id of a constructor.

    Raises ValueError("one line") if there is none.
    """
    nodes = [node for node in graph.constructors if not node.replaced]
    for fold in (str, str.casefold):  # exact matches first
        folded = fold(text)
        for name in ("provides", "id", "name"):
            if matches := [node for node in nodes if fold(getattr(node, name)) == folded]:
                return matches
    names = {name for node in nodes for name in (node.provides, node.name)}
    raise ValueError(f"type {text}: nothing in {graph.name} provides it{suggestion(text, sorted(names))}")


def only(graph: G, module: str) -> G:
    """Return the module and the modules inside it, with the constructors at the other end of their edges."""
    parents = {info.id: info.parent for info in graph.modules}
    if module not in parents:
        raise ValueError(f"module {module}: no such module")

    def inside(scope: str | None) -> bool:
        while scope is not None and scope != module:
            scope = parents[scope]
        return scope == module

    selected = {scope for scope in parents if inside(scope)}
    own = {node.id for node in graph.nodes if node.module in selected}
    edges = tuple(edge for edge in graph.edges if edge.source in own or edge.target in own)
    shown = own | {edge.source for edge in edges} | {edge.target for edge in edges}
    scopes: set[str] = set()
    for scope in (*selected, *(node.module for node in graph.nodes if node.id in shown)):
        ancestor: str | None = scope
        while ancestor is not None and ancestor not in scopes:
            scopes.add(ancestor)
            ancestor = parents[ancestor]
    hooks = [hook for hook in graph.hooks if hook.module in selected]
    awaited = {need for hook in hooks for need in hook.after} | {hook.id for hook in hooks}
    return msgspec.structs.replace(
        graph,
        modules=tuple(info for info in graph.modules if info.id in scopes),
        constructors=tuple(node for node in graph.constructors if node.id in shown),
        edges=edges,
        invokes=tuple(root for root in graph.invokes if root.id in shown),
        settings=tuple(setting for setting in graph.settings if setting.module in selected),
        faults=tuple(fault for fault in graph.faults if own & set(fault.nodes)),
        hooks=tuple(
            hook if hook.module in selected else msgspec.structs.replace(hook, after=())
            for hook in graph.hooks
            if hook.id in awaited
        ),
    )


def why(graph: Parts, target: str) -> list[list[Edge]]:
    """Return the shortest chain of dependencies from each invoked function to the constructor `target`.

    Shortest first. If nothing invoked needs it, the chains from constructors that nothing else needs.
    """
    users: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        users[edge.target].append(edge)
    towards: dict[str, Edge | None] = {target: None}
    reached = [target]
    for node in reached:  # breadth first: the first path found is a shortest one
        for edge in users[node]:
            if edge.source not in towards:
                towards[edge.source] = edge
                reached.append(edge.source)
    roots = [root.id for root in graph.invokes if root.id in towards]
    roots = roots or [node for node in reached if not users[node] and node != target]
    return sorted((_chain(towards, root) for root in roots), key=len)


def _chain(towards: dict[str, Edge | None], start: str) -> list[Edge]:
    chain = []
    edge = towards[start]
    while edge is not None:
        chain.append(edge)
        edge = towards[edge.target]
    return chain


def circles(graph: Parts) -> list[Circle[Edge]]:
    """Return the circles of a graph, largest first, each with the edges that tie it."""
    modules = {node.id: node.module for node in graph.nodes}
    return circles_of((modules[edge.source], modules[edge.target], edge) for edge in graph.edges)


def unused(graph: Parts) -> list[ConstructorInfo]:
    """Constructors, values and settings that no invoked function needs. Replaced ones are not listed."""
    return [node for node in graph.constructors if not node.built and not node.replaced]
