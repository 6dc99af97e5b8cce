"""The views of a graph as text, for the command of a hive and for its shell.

Needs:  a Graph.
Gives:  VIEWS, show(), unset().
"""

import os.path
from collections.abc import Callable, Iterator

from lifecycle.graph.parts import ConstructorInfo, HookInfo, InvokeInfo
from lifecycle.graph.query import find_module, find_type
from lifecycle.graph.query import unused as unneeded
from lifecycle.graph.query import why as chains_to
from lifecycle.graph.value import Graph
from lifecycle.settings.sources import UNSET

__all__ = ["VIEWS", "show", "unset"]


def show(graph: Graph, view: str = "tree", name: str = "", *more: str) -> str:
    """A view of the graph; of a module, or for ``why`` of a type. Raises ValueError("one line")."""
    if view not in VIEWS:
        raise ValueError(f"{view}: no such view; expected one of {', '.join(VIEWS)}")
    if more or (view == "why" and not name):
        raise ValueError(f"inspect {view}: expected {'a type' if view == 'why' else 'one module, or none'}")
    if view == "why":
        return "\n".join(_why(graph, name))
    if name:
        module = find_module(graph, name)
        return graph.tree(module) if view == "tree" else VIEWS[view](graph.only(module))
    return VIEWS[view](graph)


def unset(graph: Graph) -> list[str]:
    """Required settings that nobody has given."""
    return [setting.name for setting in graph.settings if setting.origin == UNSET]


def _settings(graph: Graph) -> Iterator[str]:
    module = None
    for one in graph.settings:
        if one.module != module:
            module = one.module
            yield module
        if one.origin == UNSET:
            yield f"  {one.name} is required, and unset"
        else:
            yield f"  {one.name} = {one.value or '(nothing)'}  ({one.origin})"


def _hooks(graph: Graph) -> Iterator[str]:
    numbers = {hook.id: number for number, hook in enumerate(graph.hooks, 1)}
    by_id = {hook.id: hook for hook in graph.hooks}
    for hook in graph.hooks:
        yield f"{numbers[hook.id]:3}  {hook.name}  {hook.module}"
        if needs := _direct(hook, by_id):
            yield "     after " + ", ".join(f"{numbers[need]} {by_id[need].name}" for need in needs)


def _direct(hook: HookInfo, by_id: dict[str, HookInfo]) -> list[str]:
    """What it waits for, without what one of these waits for anyway."""
    needs = [need for need in hook.after if need in by_id]
    above: set[str] = set()
    pending = [need for one in needs for need in by_id[one].after]
    while pending:
        if (one := pending.pop()) not in above and one in by_id:
            above.add(one)
            pending += by_id[one].after
    return [need for need in needs if need not in above]


def _unused(graph: Graph) -> Iterator[str]:
    for node in unneeded(graph):
        yield f"{_named(node)} at {_place(node)}"


def _why(graph: Graph, wanted: str) -> Iterator[str]:
    nodes = {node.id: node for node in graph.nodes}
    roots = {root.id for root in graph.invokes}
    for node in find_type(graph, wanted):
        yield f"{_named(node)} at {_place(node)}"
        chains = chains_to(graph, node.id)
        if not any(chain[0].source in roots for chain in chains):
            yield "  Nothing invoked needs it."
        for number, chain in enumerate(chains, 1):
            verb = "invoked" if chain[0].source in roots else "provided, not needed:"
            yield f"{number:3}. {verb} {_named(nodes[chain[0].source])}"
            for edge in chain:
                verb, role = ("comes after", "") if edge.order else ("needs", f" as {edge.parameter}")
                yield f"     {verb} {_named(nodes[edge.target])}{role}"


def _named(node: ConstructorInfo | InvokeInfo) -> str:
    provides = node.provides if isinstance(node, ConstructorInfo) else node.name
    return f"{provides if provides == node.name else f'{provides} from {node.name}'} ({node.module})"


def _place(node: ConstructorInfo | InvokeInfo) -> str:
    short = os.path.relpath(node.file)
    return f"{node.file if short.startswith('..') else short}:{node.line}"


def _lines(view: Callable[[Graph], Iterator[str]], nothing: str) -> Callable[[Graph], str]:
    return lambda graph: "\n".join(view(graph)) or nothing


VIEWS: dict[str, Callable[[Graph], str]] = {
    "tree": Graph.tree,
    "settings": _lines(_settings, "There are no settings."),
    "hooks": _lines(_hooks, "There are no hooks."),
    "unused": _lines(_unused, "Everything that is provided is needed."),
    "why": Graph.tree,  # of a type: see show()
    "dot": Graph.dot,
    "mermaid": Graph.mermaid,
    "json": Graph.json,
    "html": Graph.html,
}
"""What ``inspect`` can show."""
