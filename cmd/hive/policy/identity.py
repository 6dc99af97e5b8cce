"""``hive identity``: the security identities of the running agent."""

from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask
from hive.output import shown_as_document, table


@click.group()
def command() -> None:
    """Show security identities: the numbers of sets of labels in maps, events and policies."""


@command.command("list")
@click.argument("labels", nargs=-1)
@click.option(
    "--endpoints",
    is_flag=True,
    help="Only identities of this node's endpoints, with the number of endpoints.",
)
@agent_options
def list_identities(
    labels: tuple[str, ...], endpoints: bool, agent_socket: Path, timeout: float, output: str
) -> None:
    """List identities, or those that have all LABELS (source:key=value)."""
    if endpoints:
        answer = ask("/v1/identity/endpoints", agent_socket, timeout=timeout)
        found = [one["identity"] | {"refCount": one.get("refCount", 0)} for one in answer]
    else:
        found = ask("/v1/identity", agent_socket, timeout=timeout)
    found = [one for one in found if set(labels) <= set(one.get("labels", ()))]
    found.sort(key=lambda one: one["id"])
    if shown_as_document(found, output):
        return
    if not found:
        wanted = f" has {' and '.join(labels)}: a label is source:key=value" if labels else " is known yet"
        click.echo(f"No identities: none{wanted}.", err=True)
        return
    _show(found, counted=endpoints)


@command.command()
@click.argument("number")
@agent_options
def get(number: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the labels of identity NUMBER."""
    if not number.isdigit():
        expected = "expected an identity's number, such as 32768"
        raise click.UsageError(f"{number}: {expected}; hive identity list LABEL finds it by a label")
    missing = f"there is no identity {number}; hive identity list shows all"
    found = ask(f"/v1/identity/{number}", agent_socket, timeout=timeout, missing=missing)
    if shown_as_document(found, output):
        return
    _show([found], counted=False)


def _show(found: list[dict[str, Any]], *, counted: bool) -> None:
    rows = [("ID", *(("ENDPOINTS",) if counted else ()), "LABELS")]
    for one in found:
        first, *more = one.get("labels", []) or [""]
        rows.append((str(one["id"]), *((str(one["refCount"]),) if counted else ()), first))
        rows.extend(("",) * (len(rows[0]) - 1) + (label,) for label in more)
    for line in table(rows):
        click.echo(line)
