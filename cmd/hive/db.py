"""``hive db``: the tables of the running agent, and what changes in them.

Needs: the agent's GET /statedb/tables, /statedb/dump/{table}, /statedb/changes/{table}.   Gives: command.
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from hive.client import ask, follow, socket_option, timeout_option
from hive.output import BAD, GOOD, QUIET, json_text, output_option, table, terminal_width

GAP = 3
"""Blanks between columns, as hive.output.table() sets them."""


@click.group()
def command() -> None:
    """Look at the tables of the running agent: what it knows, and what follows from it."""


@command.command("list")
@socket_option
@timeout_option
@output_option
def list_tables(agent_socket: Path, timeout: float, output: str) -> None:
    """List the tables."""
    tables = ask("/statedb/tables", agent_socket, timeout=timeout)
    if output == "json":
        click.echo(json_text(tables))
        return
    rows = [("TABLE", "ROWS", "REVISION", "STATE")]
    for one in tables:
        waits = ", ".join(one["waits-for"])
        state = "complete" if one["initialized"] else f"waits for {waits}"
        colour = GOOD if one["initialized"] else BAD
        rows.append((one["name"], str(one["rows"]), str(one["revision"]), click.style(state, fg=colour)))
    _print(table(rows))


@command.command()
@click.argument("name", metavar="TABLE")
@click.argument("key", required=False)
@socket_option
@timeout_option
@output_option
@click.option("--columns", metavar="A,B", help="Show these columns.")
@click.option("--wide", is_flag=True, help="Show every column, however wide the lines get.")
def show(
    name: str,
    key: str | None,
    agent_socket: Path,
    timeout: float,
    output: str,
    columns: str | None,
    wide: bool,
) -> None:
    """Show the rows of a table, or all of the row with one KEY.

    On a terminal the columns that fit are shown; the others are named below.
    """
    rows = ask(f"/statedb/dump/{quote(name, safe='')}", agent_socket, timeout=timeout)[name]
    if key is not None:
        rows = [row for row in rows if _text(row["key"]) == key]
        if not rows:
            raise click.ClickException(f"table {name} has no row with the key {key}")
    if output == "json":
        click.echo(json_text(rows))
    elif key is not None:
        _print(table([(f"{field}:", _text(value)) for field, value in _fields(rows[0])], header_lines=0))
    else:
        wanted = [] if columns is None else columns.split(",")
        _print(render(rows, None if wide or wanted else terminal_width(), wanted))


@command.command()
@click.argument("name", metavar="TABLE")
@socket_option
@timeout_option
@output_option
def watch(name: str, agent_socket: Path, timeout: float, output: str) -> int:
    """Show every row of a table (+), then what changes (~) and goes (-), until ctrl-C.

    With -o json, a line of JSON for each.
    """
    known: dict[str, dict[str, Any]] = {}
    try:
        for change in follow(f"/statedb/changes/{quote(name, safe='')}", agent_socket, timeout):
            if "err" in change:
                raise click.ClickException(f"table {name} cannot be read: {change['err']}")
            lines = [json.dumps(change)] if output == "json" else describe(change, known, terminal_width())
            _print(lines)
    except KeyboardInterrupt:
        pass
    return 0


def render(rows: list[dict[str, Any]], width: int | None, columns: Sequence[str] = ()) -> list[str]:
    """The rows as a table: `columns`, or every one that holds something, as far as `width` goes."""
    records = [dict(_fields(row)) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    if unknown := [name for name in columns if name not in names and records]:
        raise click.ClickException(f"there is no column {unknown[0]}; there are: {', '.join(names)}")
    cells = {name: [_text(record.get(name)) for record in records] for name in columns or names}
    filled = [name for name in cells if columns or any(cells[name])]
    needs = {name: max(len(name), *map(len, cells[name])) + GAP for name in filled}
    fits, used = set(filled[:1]), sum(needs[name] for name in filled[:1]) - GAP
    for name in sorted(filled[1:], key=needs.__getitem__):  # the narrow ones: most facts for the width
        if width is None or used + needs[name] <= width:
            fits.add(name)
            used += needs[name]
    shown = [name for name in filled if name in fits]
    hidden = [name for name in filled if name not in fits]
    lines = table([[name.upper() for name in shown], *zip(*(cells[name] for name in shown), strict=True)])
    if not rows:
        lines = [click.style("no rows", fg=QUIET)]
    if hidden:
        note = f"not shown: {', '.join(hidden)} (--columns, --wide, -o json, or name a key)"
        lines += [click.style(line, fg=QUIET) for line in textwrap.wrap(note, width or 80)]
    return lines


def describe(change: dict[str, Any], known: dict[str, dict[str, Any]], width: int | None) -> list[str]:
    """A change in words, given what was known of the rows, which is brought up to date."""
    key = _text(change["key"])
    before, now = known.pop(key, None), dict(_fields(change))
    if change["deleted"]:
        return [click.style(f"- {key}", fg=BAD)]
    known[key] = now
    if before is None:
        sign, colour = "+", GOOD
        parts = [f"{name}={_text(value)}" for name, value in now.items() if name != "key" and _text(value)]
    else:
        sign, colour = "~", "yellow"
        parts = [
            f"{name}: {_text(before.get(name)) or 'none'} → {_text(now.get(name)) or 'none'}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
    text = f"{sign} {key}  {'  '.join(parts)}".rstrip()
    lines = [text] if width is None else textwrap.wrap(text, width, subsequent_indent="    ")
    return [click.style(lines[0][:1], fg=colour) + lines[0][1:], *lines[1:]]


def _fields(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """Key and fields of a row; a field that is the key is not told twice."""
    value = row["obj"]
    if not isinstance(value, dict):
        return [("key", row["key"]), ("value", value)]
    key = [] if row["key"] in value.values() else [("key", row["key"])]
    return [*key, *value.items()]


def _text(value: object) -> str:
    match value:
        case None | "" | [] | {}:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case float():
            return f"{value:.3f}".rstrip("0").rstrip(".")
        case list() if not any(isinstance(item, dict | list) for item in value):
            return ", ".join(map(_text, value))
    return json.dumps(value)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
