"""``hive node``: the nodes of the cluster, as the running agent knows them.

Needs: the agent's /v1/cluster/nodes.   Gives: command.   Source of the columns: cilium-dbg node list.
"""

from pathlib import Path
from typing import Any

import click

from hive.client import ask, socket_option, timeout_option
from hive.output import document, output_option, table

HEAD = ("NAME", "IPV4 ADDRESS", "ENDPOINT CIDR", "IPV6 ADDRESS", "ENDPOINT CIDR", "SOURCE")


@click.group()
def command() -> None:
    """Show the nodes of the cluster, their addresses and pod ranges."""


@command.command("list")
@socket_option
@timeout_option
@output_option
def list_nodes(agent_socket: Path, timeout: float, output: str) -> None:
    """List all nodes, this one first."""
    answer = ask("/v1/cluster/nodes", agent_socket, timeout=timeout)
    found = sorted(
        answer.get("nodes-added") or (), key=lambda node: (node["name"] != answer["self"], node["name"])
    )
    if (text := document(found, output)) is not None:
        click.echo(text)
        return
    rows = [HEAD, *(_row(node) for node in found)]
    both = any(row[3] or row[4] for row in rows[1:])
    for line in table([row if both else (*row[:3], row[5]) for row in rows]):
        click.echo(line)


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    primary = node.get("primary-address") or {}
    ends = [
        (primary.get(family) or {}).get(key, "")
        for family in ("ipv4", "ipv6")
        for key in ("ip", "alloc-range")
    ]
    return (node["name"], *ends, node.get("source", ""))
