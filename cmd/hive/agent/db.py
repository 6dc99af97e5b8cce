"""``hive db``: the tables of the running agent, and their changes."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from hive import completion
from hive.client import agent_options, ask, follow
from hive.output import (
    BAD,
    GOOD,
    cell_text,
    document,
    fitted,
    shown_as_document,
    table,
    table_width,
    terminal_width,
)

FIRST = (
    *("kind", "namespace", "name", "pod_namespace", "pod_name", "address", "prefix", "ipv4", "ipv6"),
    *("identity", "direction", "source", "destination", "service", "state", "error"),
)
"""The most important fields of all tables."""


@click.group()
def command() -> None:
    """Show the tables of the running agent: its sources and derived state."""


@command.command("list")
@agent_options
def list_tables(agent_socket: Path, timeout: float, output: str) -> None:
    """List the tables."""
    tables = ask("/statedb/tables", agent_socket, timeout=timeout)
    if shown_as_document(tables, output):
        return
    rows = [("TABLE", "ROWS", "REVISION", "STATE")]
    for one in tables:
        waits = ", ".join(one["waits-for"])
        state = "complete" if one["initialized"] else f"waits for {waits}"
        colour = GOOD if one["initialized"] else BAD
        rows.append((one["name"], str(one["rows"]), str(one["revision"]), click.style(state, fg=colour)))
    _print(table(rows))


@command.command()
@click.argument("name", metavar="TABLE", shell_complete=completion.tables)
@click.argument("key", required=False)
@agent_options
@click.option("--columns", metavar="A,B", help="Show these columns.")
@click.option("--wide", is_flag=True, help="Show all columns, in lines of any width.")
def show(
    name: str,
    key: str | None,
    agent_socket: Path,
    timeout: float,
    output: str,
    columns: str | None,
    wide: bool,
) -> None:
    """Show the rows of a table, or all fields of the row with one KEY.

    On a terminal, columns that do not fit are omitted and named at the end.
    """
    rows = ask(f"/statedb/dump/{quote(name, safe='')}", agent_socket, timeout=timeout)[name]
    if key is not None:
        rows = [row for row in rows if cell_text(row["key"]) == key]
        if not rows:
            raise click.ClickException(f"table {name} has no row with the key {key}")
    if (text := document(rows, output)) is not None:
        click.echo(text)
    elif key is not None:
        _print(table([(f"{field}:", cell_text(value)) for field, value in _fields(rows[0])], header_lines=0))
    else:
        wanted = [] if columns is None else columns.split(",")
        _print(render(rows, None if wide or wanted else table_width(output), wanted))


@command.command()
@click.argument("name", metavar="TABLE", shell_complete=completion.tables)
@agent_options
def watch(name: str, agent_socket: Path, timeout: float, output: str) -> int:
    """Show all rows of a table (+), then rows that change (~) or are removed (-), until ctrl-C.

    With -o json, each is a line of JSON.
    """
    known: dict[str, dict[str, Any]] = {}
    try:
        for change in follow(f"/statedb/changes/{quote(name, safe='')}", agent_socket, timeout):
            if "err" in change:
                raise click.ClickException(f"table {name} cannot be read: {change['err']}")
            text = json.dumps(change) if output == "json" else document(change, output)
            _print([text] if text is not None else describe(change, known, terminal_width()))
    except KeyboardInterrupt:
        pass
    return 0


def render(rows: list[dict[str, Any]], width: int | None, columns: Sequence[str] = ()) -> list[str]:
    """Return the rows as a table: `columns`, or all non-empty ones, as many as fit into `width`."""
    records = [dict(_fields(row)) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    if unknown := [name for name in columns if name not in names and records]:
        raise click.ClickException(f"there is no column {unknown[0]}; there are: {', '.join(names)}")
    more = "--columns, --wide, -o json, or name a key"
    return fitted(records, width, more, columns, () if columns else FIRST)


def describe(change: dict[str, Any], known: dict[str, dict[str, Any]], width: int | None) -> list[str]:
    """Return a change as text, and update the known rows."""
    key = cell_text(change["key"])
    before, now = known.pop(key, None), dict(_fields(change))
    if change["deleted"]:
        return [click.style(f"- {key}", fg=BAD)]
    known[key] = now
    if before is None:
        sign, colour = "+", GOOD
        parts = [
            f"{name}={cell_text(value)}" for name, value in now.items() if name != "key" and cell_text(value)
        ]
    else:
        sign, colour = "~", "yellow"
        parts = [
            f"{name}: {cell_text(before.get(name)) or 'none'} → {cell_text(now.get(name)) or 'none'}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
    text = f"{sign} {key}  {'  '.join(parts)}".rstrip()
    lines = [text] if width is None else textwrap.wrap(text, width, subsequent_indent="    ")
    return [click.style(lines[0][:1], fg=colour) + lines[0][1:], *lines[1:]]


def _fields(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return key and fields of a row, without a field that repeats the key."""
    value = row["obj"]
    if not isinstance(value, dict):
        return [("key", row["key"]), ("value", value)]
    key = [] if row["key"] in value.values() else [("key", row["key"])]
    return [*key, *value.items()]


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
