"""The views of ``hive inspect`` for people, and as JSON for programs.

Needs: a graph.   Gives: tinted(), why(), unused(), settings(), hooks(), differences(): lines to print.
Styles are for click.echo, which drops them where the output is no terminal.
"""

import itertools
import json
import os.path
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hive.output import BAD, GOOD, QUIET, json_text, terminal_width

if TYPE_CHECKING:
    from lifecycle.graph import ConstructorInfo, Graph, GraphChange, HookInfo, InvokeInfo

PLAIN_WIDTH = 80
_VERBS = {"set": "yellow", "provide": "cyan", "invoke": "magenta", "hook": "green"}
_FAULTS = re.compile(r"\b(missing|duplicate|in a cycle|cannot be used)\b(?=[,)])")
_LINE = re.compile(r"^(\s*· )(\w+)(\s.*)$")


def width() -> int:
    """Columns to fill: those of the terminal, 80 elsewhere."""
    return terminal_width() or PLAIN_WIDTH


def tinted(tree: str) -> str:
    """A tree with its modules bold and its verbs coloured."""
    return "\n".join(map(_tinted_line, tree.splitlines()))


def _tinted_line(line: str) -> str:
    if found := _LINE.match(line):
        before, verb, after = found.groups()
        after = _FAULTS.sub(lambda fault: click.style(fault[0], fg=BAD, bold=True), after)
        return f"{before}{click.style(verb, fg=_VERBS.get(verb))}{after}"
    indent, name, title = re.match(r"^( *)(\S*)(.*)$", line).groups()  # type: ignore[union-attr]  # matches any line
    # what a line above did not hold goes on further to the right than any module stands
    return line if title.startswith(", ") else f"{indent}{click.style(name, bold=True)}{title}"


def why(graph: "Graph", wanted: str, *, as_json: bool) -> list[str]:
    """For every constructor of that type: where it is, and who leads to it. Raises ValueError for none."""
    from lifecycle.graph import find_type
    from lifecycle.graph import why as chains_to

    found = [(node, chains_to(graph, node.id)) for node in find_type(graph, wanted)]
    if as_json:
        told = [{"constructor": node, "chains": chains} for node, chains in found]
        return [msgspec.json.format(msgspec.json.encode(told).decode(), indent=2)]
    nodes = {node.id: node for node in graph.nodes}
    roots = {root.id for root in graph.invokes}
    lines = []
    for node, chains in found:
        lines += [f"{click.style(_named(node), bold=True)} at {place(node)}"]
        if not any(chain[0].source in roots for chain in chains):
            lines.append("  Nothing invoked needs it.")
        for number, chain in enumerate(chains, 1):
            verb = "invoked" if chain[0].source in roots else "provided, not needed:"
            lines.append(f"{number:3}. {verb} {_named(nodes[chain[0].source])}")
            lines += [
                f"     needs {_named(nodes[edge.target])}{click.style(f' as {edge.parameter}', fg=QUIET)}"
                for edge in chain
            ]
    return lines


def _named(node: "ConstructorInfo | InvokeInfo") -> str:
    provides = getattr(node, "provides", node.name)
    shown = provides if provides == node.name else f"{provides} from {node.name}"
    return f"{shown} ({node.module})"


def place(node: "ConstructorInfo | InvokeInfo") -> str:
    """File and line; relative to the working directory when it is below it."""
    short = os.path.relpath(node.file)
    return f"{node.file if short.startswith('..') else short}:{node.line}"


def unused(graph: "Graph", module: str | None, *, as_json: bool) -> list[str]:
    """What nothing invoked needs, by module."""
    from lifecycle.graph import unused as unneeded

    found = [node for node in unneeded(graph) if _inside(node.module, module)]
    if as_json:
        return [json_text(msgspec.to_builtins(found))]
    if not found:
        return ["Everything that is provided is needed."]
    lines = []
    for scope, nodes in itertools.groupby(found, key=lambda node: node.module):
        lines.append(click.style(scope, bold=True))
        for node in nodes:
            shown = node.provides if node.provides == node.name else f"{node.provides} from {node.name}"
            marks = [mark for mark in ("private" * node.private, node.kind) if mark not in {"", "provide"}]
            held = f" ({', '.join(marks)})" if marks else ""
            lines.append(f"  {shown}{held}{click.style(f'  {place(node)}', fg=QUIET)}")
    return lines


def settings(graph: "Graph", module: str | None, *, as_json: bool) -> list[str]:
    """Every setting with its value and where that came from, by module."""
    found = [setting for setting in graph.settings if _inside(setting.module, module)]
    if as_json:
        return [json_text(msgspec.to_builtins(found))]
    lines = []
    for scope, members in itertools.groupby(found, key=lambda setting: setting.module):
        lines.append(click.style(scope, bold=True))
        for setting in members:
            value = setting.value or "(nothing)"
            colour = QUIET if setting.origin == "default" else "yellow"
            origin = click.style(f"  ({setting.origin})", fg=colour)
            lines.append(f"  {setting.name} = {value}{origin}")
    return lines or ["There are no settings."]


def hooks(graph: "Graph", module: str | None, *, as_json: bool) -> list[str]:
    """Hooks in an order they may start in; each starts once those it waits for have started."""
    found = [hook for hook in graph.hooks if _inside(hook.module, module)]
    if as_json:
        return [json_text(msgspec.to_builtins(found))]
    numbers = {hook.id: number for number, hook in enumerate(graph.hooks, 1)}
    by_id = {hook.id: hook for hook in graph.hooks}
    waits = direct_waits(graph.hooks)
    lines = []
    for hook in found:
        scope = click.style(f"  {hook.module}", fg=QUIET)
        lines.append(f"{numbers[hook.id]:3}  {click.style(hook.name, bold=True)}{scope}")
        if needs := waits[hook.id]:
            text = "after " + ", ".join(f"{numbers[need]} {by_id[need].name}" for need in needs)
            lines += textwrap.wrap(
                text, width(), initial_indent=" " * 5, subsequent_indent=" " * 11, break_long_words=False
            )
    return lines or ["There are no hooks."]


def direct_waits(hooks: "Sequence[HookInfo]") -> dict[str, list[str]]:
    """For each hook those it waits for, without those that one of the others waits for anyway."""
    before: dict[str, set[str]] = {}
    waits = {}
    for hook in hooks:  # each stands after all it waits for
        above: set[str] = set().union(*(before.get(need, set()) for need in hook.after))
        waits[hook.id] = [need for need in hook.after if need not in above]
        before[hook.id] = above | set(hook.after)
    return waits


def differences(changes: "Sequence[GraphChange]", *, as_json: bool) -> Iterable[str]:
    """What was added (+), removed (-) and changed (~), by kind."""
    if as_json:
        yield json_text(msgspec.to_builtins(changes))
        return
    if not changes:
        yield "No differences."
    signs = {"added": ("+", GOOD), "removed": ("-", BAD), "changed": ("~", "yellow")}
    for kind, members in itertools.groupby(changes, key=lambda change: change.kind):
        yield click.style(kind, bold=True)
        for change in members:
            sign, colour = signs[change.what]
            yield click.style(f"  {sign} {change.id}", fg=colour)
            for one in change.altered:
                yield f"      {one.field}: {_shown(one.before)} -> {_shown(one.after)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _inside(scope: str, module: str | None) -> bool:
    return module is None or scope == module or scope.startswith(f"{module}.")
