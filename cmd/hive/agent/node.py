"""``hive node``: the nodes of the cluster, by the running agent."""

from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask
from hive.output import fitted, shown_as_document, table_width

_FIRST = ("name", "ipv4 address", "ipv6 address", "source")


@click.group()
def command() -> None:
    """Show the nodes of the cluster, their addresses and pod ranges."""


@command.command("list")
@agent_options
def list_nodes(agent_socket: Path, timeout: float, output: str) -> None:
    """List all nodes, this one first."""
    answer = ask("/v1/cluster/nodes", agent_socket, timeout=timeout)
    found = sorted(
        answer.get("nodes-added") or (), key=lambda node: (node["name"] != answer["self"], node["name"])
    )
    if shown_as_document(found, output):
        return
    if not found:
        click.echo("No nodes: the agent does not know its own node yet.", err=True)
        return
    for line in fitted([_row(node) for node in found], table_width(output), "-o wide", first=_FIRST):
        click.echo(line)


def _row(node: dict[str, Any]) -> dict[str, str]:
    primary = node.get("primary-address") or {}
    ends = {
        f"{family} {column}": (primary.get(family) or {}).get(key, "")
        for family in ("ipv4", "ipv6")
        for column, key in (("address", "ip"), ("pod range", "alloc-range"))
    }
    return {"name": node["name"], **ends, "source": node.get("source", "")}
