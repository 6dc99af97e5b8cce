"""Terminal output of ``hive inspect``: width and colours; the text is lifecycle's."""

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
    """Return the columns of the terminal, 80 elsewhere."""
    return terminal_width() or PLAIN_WIDTH


def paint(text: str, role: str) -> str:
    """Return a text in the style of its role."""
    return click.style(text, **_STYLES[role]) if text else ""


def coloured(tree: str) -> str:
    """Return a tree with bold modules and coloured verbs."""
    return "\n".join(map(_tinted_line, tree.splitlines()))


def _tinted_line(line: str) -> str:
    if found := _LINE.match(line):
        before, verb, after = found.groups()
        after = _FAULTS.sub(lambda fault: click.style(fault[0], fg=BAD, bold=True), after)
        return f"{before}{click.style(verb, fg=_VERBS.get(verb))}{after}"
    indent, name, title = re.match(r"^( *)(\S*)(.*)$", line).groups()  # type: ignore[union-attr]  # matches any line
    # continuation lines are indented further than any module
    return line if title.startswith(", ") else f"{indent}{click.style(name, bold=True)}{title}"
