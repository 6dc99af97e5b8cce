"""The views of a graph as text, for commands on a terminal or over a socket."""

import itertools
import json
import os.path
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lifecycle.graph.diff import Change
from lifecycle.graph.parts import ConstructorInfo, Edge, HookInfo, InvokeInfo, SettingInfo
from lifecycle.graph.query import circles as circles_in
from lifecycle.graph.query import find_module, find_type
from lifecycle.graph.query import unused as unneeded
from lifecycle.graph.query import why as chains_to
from lifecycle.graph.value import Graph
from lifecycle.injection.cycles import Circle
from lifecycle.settings.sources import UNSET

__all__ = ["VIEWS", "WIDTH", "Paint", "differences", "show", "unset"]

WIDTH = 80
"""Default number of columns."""

Paint = Callable[[str, str], str]
"""Styles a text by role: module, name, quiet, given, missing, added, removed or changed."""


def _plain(text: str, _: str) -> str:
    return text


def show(
    graph: Graph,
    view: str = "tree",
    name: str = "",
    *more: str,
    paint: Paint = _plain,
    width: int = WIDTH,
    as_json: bool = False,
) -> str:
    """Return a view of the graph; of a module, or for ``why`` of a type. Raises ValueError("one line")."""
    if view not in VIEWS:
        raise ValueError(f"{view}: no such view; expected one of {', '.join(VIEWS)}")
    if more or (view == "why" and not name):
        raise ValueError(f"inspect {view}: expected {'a type' if view == 'why' else 'one module, or none'}")
    if view == "why":
        return _show_why(graph, name, paint, as_json=as_json)
    if view == "circles":
        return _show_circles(graph, name, paint, width, as_json=as_json)
    module = find_module(graph, name) if name else None
    if view == "tree":
        return graph.tree(module)
    if view in _DRAWINGS:
        return _DRAWINGS[view](graph if module is None else graph.only(module))
    return _show_list(graph, view, module, paint, width, as_json=as_json)


def _show_why(graph: Graph, name: str, paint: Paint, *, as_json: bool) -> str:
    all_chains = [(node, chains_to(graph, node.id)) for node in find_type(graph, name)]
    if as_json:
        return _json([{"constructor": node, "chains": chains} for node, chains in all_chains])
    return "\n".join(line for node, chains in all_chains for line in _why(graph, node, chains, paint))


def _show_circles(graph: Graph, name: str, paint: Paint, width: int, *, as_json: bool) -> str:
    if name:
        raise ValueError("inspect circles: expected no module: a circle is between several")
    circles = circles_in(graph)
    if as_json:
        return _json([circle._asdict() for circle in circles])
    return "\n".join(_circles(graph, circles, paint, width)) or VIEWS["circles"]


def _show_list(
    graph: Graph, view: str, module: str | None, paint: Paint, width: int, *, as_json: bool
) -> str:
    things: Mapping[str, Sequence[Any]] = {
        "settings": graph.settings,
        "hooks": graph.hooks,
        "unused": unneeded(graph),
    }
    shown = [item for item in things[view] if module is None or f"{item.module}.".startswith(f"{module}.")]
    if as_json:
        return _json(shown)
    return "\n".join(_LISTS[view](graph, shown, paint, width)) or VIEWS[view]


def unset(graph: Graph) -> list[str]:
    """Required settings without a value."""
    return [setting.name for setting in graph.settings if setting.origin == UNSET]


def differences(changes: Sequence[Change], *, paint: Paint = _plain, as_json: bool = False) -> str:
    """Added (+), removed (-) and changed (~) parts, by kind."""
    if as_json:
        return _json(changes)
    return "\n".join(_differences(changes, paint)) or "No differences."


def _differences(changes: Sequence[Change], paint: Paint) -> Iterator[str]:
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for kind, members in itertools.groupby(changes, key=lambda change: change.kind):
        yield paint(kind, "module")
        for change in members:
            yield paint(f"  {signs[change.what]} {change.id}", change.what)
            for field in change.altered:
                yield f"      {field.field}: {_shown(field.before)} -> {_shown(field.after)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _settings(_graph: Graph, settings: Sequence[SettingInfo], paint: Paint, _width: int) -> Iterator[str]:
    for scope, members in itertools.groupby(settings, key=lambda setting: setting.module):
        yield paint(scope, "module")
        for setting in members:
            if setting.origin == UNSET:
                yield f"  {setting.name} {paint('is required, and unset', 'missing')}"
            else:
                origin = paint(f"  ({setting.origin})", "quiet" if setting.origin == "default" else "given")
                yield f"  {setting.name} = {setting.value or '(nothing)'}{origin}"


def _hooks(graph: Graph, hooks: Sequence[HookInfo], paint: Paint, width: int) -> Iterator[str]:
    """Yield the hooks in a possible order of the start, numbered as in the whole graph."""
    numbers = {hook.id: number for number, hook in enumerate(graph.hooks, 1)}
    by_id = {hook.id: hook for hook in graph.hooks}
    waits = _direct_waits(graph.hooks)
    for hook in hooks:
        yield f"{numbers[hook.id]:3}  {paint(hook.name, 'name')}{paint(f'  {hook.module}', 'quiet')}"
        if needs := waits[hook.id]:
            text = "after " + ", ".join(f"{numbers[need]} {by_id[need].name}" for need in needs)
            yield from textwrap.wrap(
                text, width, initial_indent=" " * 5, subsequent_indent=" " * 11, break_long_words=False
            )


def _direct_waits(hooks: Sequence[HookInfo]) -> dict[str, list[str]]:
    """For each hook, the hooks that it waits for directly."""
    before: dict[str, set[str]] = {}
    waits = {}
    for hook in hooks:  # dependencies first
        above: set[str] = set().union(*(before.get(need, set()) for need in hook.after))
        waits[hook.id] = [need for need in hook.after if need not in above]
        before[hook.id] = above | set(hook.after)
    return waits


def _unused(
    _graph: Graph, constructors: Sequence[ConstructorInfo], paint: Paint, width: int
) -> Iterator[str]:
    for scope, nodes in itertools.groupby(constructors, key=lambda node: node.module):
        yield paint(scope, "module")
        for node in nodes:
            marks = [mark for mark in ("private" * node.private, node.kind) if mark not in {"", "provide"}]
            suffix = f" ({', '.join(marks)})" if marks else ""
            shown, place = f"  {_provided(node)}{suffix}", f"  {_place(node)}"
            if len(shown) + len(place) > width:
                yield shown
                shown, place = "    ", _place(node)
            yield f"{shown}{paint(place, 'quiet')}"


def _circles(graph: Graph, circles: Sequence[Circle[Edge]], paint: Paint, width: int) -> Iterator[str]:
    """Yield each circle with its modules and the edges that tie it."""
    nodes = {node.id: node for node in graph.nodes}
    for circle in circles:
        yield paint(f"{len(circle.modules)} modules need each other:", "missing")
        names = ", ".join(circle.modules)
        yield from textwrap.wrap(
            names, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        yield "  tied by:"
        for edge in circle.ties:
            verb = "comes after" if edge.order else "needs"
            yield f"    {_named(nodes[edge.source])} {verb} {_named(nodes[edge.target])}"


def _why(graph: Graph, node: ConstructorInfo, chains: Sequence[Sequence[Any]], paint: Paint) -> Iterator[str]:
    """Yield the place of a constructor, and the chains of dependencies to it."""
    nodes = {constructor.id: constructor for constructor in graph.nodes}
    roots = {root.id for root in graph.invokes}
    yield f"{paint(_named(node), 'name')} at {_place(node)}"
    if not any(chain[0].source in roots for chain in chains):
        yield "  Nothing invoked needs it."
    for number, chain in enumerate(chains, 1):
        verb = "invoked" if chain[0].source in roots else "provided, not needed:"
        yield f"{number:3}. {verb} {_named(nodes[chain[0].source])}"
        for edge in chain:
            verb, role = ("comes after", "") if edge.order else ("needs", f" as {edge.parameter}")
            yield f"     {verb} {_named(nodes[edge.target])}{paint(role, 'quiet')}"


def _provided(node: ConstructorInfo) -> str:
    return node.provides if node.provides == node.name else f"{node.provides} from {node.name}"


def _named(node: ConstructorInfo | InvokeInfo) -> str:
    shown = _provided(node) if isinstance(node, ConstructorInfo) else node.name
    return f"{shown} ({node.module})"


def _place(node: ConstructorInfo | InvokeInfo) -> str:
    """File and line; relative to the working directory if the file is below it."""
    short = os.path.relpath(node.file)
    return f"{node.file if short.startswith('..') else short}:{node.line}"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value).decode(), indent=2)


_LISTS: dict[str, Callable[[Graph, Any, Paint, int], Iterator[str]]] = {
    "settings": _settings,
    "hooks": _hooks,
    "unused": _unused,
}
_DRAWINGS: dict[str, Callable[[Graph], str]] = {
    "dot": Graph.dot,
    "mermaid": Graph.mermaid,
    "json": Graph.json,
    "html": Graph.html,
}

VIEWS: dict[str, str] = {
    "tree": "",
    "settings": "There are no settings.",
    "hooks": "There are no hooks.",
    "unused": "Everything that is provided is needed.",
    "circles": "No modules need each other in a circle.",
    "why": "",
    **dict.fromkeys(_DRAWINGS, ""),
}
"""The views of ``inspect``, each with the text for an empty view."""
