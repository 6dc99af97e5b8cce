"""How ``hive inspect`` looks on a terminal: its width and its colours; what it shows is lifecycle's."""

import re
from typing import Any

import click

from hive.output import BAD, GOOD, QUIET, terminal_width

PLAIN_WIDTH = 80
_STYLES: dict[str, dict[str, Any]] = {
    "module": {"bold": True},
    "name": {"bold": True},
    "quiet": {"fg": QUIET},
    "given": {"fg": "yellow"},
    "missing": {"fg": BAD},
    "added": {"fg": GOOD},
    "removed": {"fg": BAD},
    "changed": {"fg": "yellow"},
}
_VERBS = {"set": "yellow", "provide": "cyan", "invoke": "magenta", "hook": "green"}
_FAULTS = re.compile(r"\b(missing|duplicate|in a cycle|cannot be used)\b(?=[,)])")
_LINE = re.compile(r"^(\s*· )(\w+)(\s.*)$")


def width() -> int:
    """Columns to fill: those of the terminal, 80 elsewhere."""
    return terminal_width() or PLAIN_WIDTH


def paint(text: str, role: str) -> str:
    """A text in the style of what it is."""
    return click.style(text, **_STYLES[role]) if text else ""


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
