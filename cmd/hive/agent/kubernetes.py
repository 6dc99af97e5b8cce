"""``hive kubernetes``: the sources of the running agent's objects, and their state."""

import time
from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask
from hive.output import shown_as_document, table

HEAD = ("KIND", "STATE", "OBJECTS", "HEARD", "WRONG")


@click.group()
def command() -> None:
    """Show where the agent's Kubernetes objects come from: API servers, or a folder of manifests."""


@command.command()
@agent_options
def status(agent_socket: Path, timeout: float, output: str) -> None:
    """Show for each kind of object its source's state, the last update, and errors."""
    server = ask("/v1/healthz", agent_socket, timeout=timeout).get("kubernetes") or {}
    kinds, files = (
        [row["obj"] for row in ask(f"/statedb/dump/{name}", agent_socket, timeout=timeout)[name]]
        for name in ("k8s-sources", "manifests")
    )
    found = {"server": server, "kinds": kinds, "manifests": files}
    if shown_as_document(found, output):
        return
    if not kinds:
        click.echo("no source: the agent was given neither an API server nor a folder of manifests")
        return
    if files:
        click.echo(
            f"manifests: {len(files)} files, {sum(1 for one in files if one.get('error'))} with errors"
        )
    else:
        click.echo(f"API server: {server.get('state', '')} {server.get('msg', '')}".rstrip())
    rows = [HEAD, *(_row(one) for one in sorted(kinds, key=lambda one: str(one["kind"])))]
    for line in table(rows):
        click.echo(line)
    for one in files:
        if one.get("error"):
            click.echo(one["error"])
        if one.get("left_out"):
            click.echo(f"left out: {one['left_out']}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    wrong = [text for text in (one.get("error", ""), *one.get("broken", ())) if text]
    state = (
        one["state"]
        if one["synced"] or one["state"] in ("waiting", "absent")
        else f"{one['state']}, not synced"
    )
    return (one["kind"], state, str(one["objects"]), _age(one["changed"]), "; ".join(wrong))


def _age(heard: float) -> str:
    """Return the age of a time in seconds since the epoch; 0 is never."""
    if not heard:
        return "never"
    seconds = max(0, int(time.time() - heard))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit} ago"
    return f"{seconds}s ago"
