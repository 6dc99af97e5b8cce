"""``hive map``: the agent's cached content of its maps, and its writes; ``hive bpf`` reads the kernel's."""

from pathlib import Path
from urllib.parse import quote

import click

from hive import completion
from hive.client import agent_options, ask, follow
from hive.output import document, fitted, shown_as_document, table, table_width


@click.group()
def command() -> None:
    """Show the maps that the agent writes, and its latest writes."""


@command.command("list")
@agent_options
def list_maps(agent_socket: Path, timeout: float, output: str) -> None:
    """List the maps, and the number of entries of those that only the agent writes."""
    found = ask("/v1/map", agent_socket, timeout=timeout)["maps"]
    if shown_as_document(found, output):
        return
    rows = [("NAME", "ROWS", "ERRORS")]
    for one in found:
        cache = one.get("cache")
        counts = (
            ("", "")
            if cache is None
            else (str(len(cache)), str(sum(1 for row in cache if row["last-error"])))
        )
        rows.append((Path(one["path"]).name, *counts))
    for line in table(rows):
        click.echo(line)


@command.command()
@click.argument("name", shell_complete=completion.maps)
@agent_options
def get(name: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the entries of map NAME, with or without cilium_, as the agent wrote them."""
    name = _whole(name)
    found = ask(_path(name), agent_socket, timeout=timeout, missing=_missing(name))
    if shown_as_document(found, output):
        return
    if found.get("cache") is None:
        raise click.ClickException(
            f"the agent has no copy of {name}; hive bpf dump {name} reads the kernel's"
        )
    rows = [
        {"key": row["key"], "value": row["value"], "state": row["desired-action"], "error": row["last-error"]}
        for row in found["cache"]
    ]
    for line in fitted(rows, table_width(output), "-o wide", first=("key", "value", "error")):
        click.echo(line)


@command.command()
@click.argument("name", shell_complete=completion.maps)
@click.option("-f", "--follow", "goes_on", is_flag=True, help="Continue with new writes, until ctrl-C.")
@agent_options
def events(name: str, goes_on: bool, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the latest writes of the agent to map NAME, with or without cilium_."""
    name = _whole(name)
    path = f"{_path(name)}/events?follow={'true' if goes_on else 'false'}"
    try:
        for one in follow(path, agent_socket, timeout, ends=not goes_on, missing=_missing(name)):
            if (text := document(one, output)) is None:
                error = f" error={one['last-error']}" if one["last-error"] else ""
                text = f"{one['timestamp']} {one['action']} {one['key']} {one['value']}{error}"
            click.echo(text)
    except KeyboardInterrupt:
        return


def _whole(name: str) -> str:
    return name if name.startswith(("cilium_", "hive_")) else f"cilium_{name}"


def _path(name: str) -> str:
    return f"/v1/map/{quote(name, safe='')}"


def _missing(name: str) -> str:
    return f"the agent knows no map {name}, or has no copy of it; hive map list names them"
