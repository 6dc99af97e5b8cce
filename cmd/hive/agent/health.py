"""``hive health``: which nodes of the cluster this node reaches, by the agent's probes."""

from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask
from hive.dbg.go_text import go_duration, short_age
from hive.dbg.health import paths_of, reach
from hive.output import fitted, shown_as_document, table_width

Json = dict[str, Any]

_FIRST = ("name", "status", "since")
_WORST = ("unreachable", "unknown", "reachable")
_PARTS = {"node": "host", "endpoint": "health-endpoint"}


@click.command()
@agent_options
def command(agent_socket: Path, timeout: float, output: str) -> None:
    """Show all nodes of the cluster with the result of each probe, the worst first.

    A cell has the round-trip time to each address of the node, the primary one first, or the error. Results
    are those of the last round of probes.
    """
    socket = agent_socket.with_name("health.sock")
    if agent_socket.exists() and not socket.exists():
        raise click.ClickException(
            "nodes are not probed: set enable-health-checking=true, and restart the agent"
        )
    found = ask("/v1beta/status", socket, timeout=timeout)
    if shown_as_document(found, output):
        return
    if not (nodes := found.get("nodes")):
        click.echo("No probes yet: the first round is not complete.", err=True)
        return
    rows = [
        _row(node) for node in sorted(nodes, key=lambda node: (_WORST.index(node_state(node)), node["name"]))
    ]
    for line in fitted(rows, table_width(output), "-o wide", first=_FIRST):
        click.echo(line)


def node_state(node: Json) -> str:
    """Return ``reachable``, ``unreachable`` or ``unknown``, by the node's worst path; without a path it is
    unknown.
    """
    states = {reach(path) for part in _PARTS.values() for path in paths_of(node.get(part))}
    return next((state for state in _WORST if state in states), "unknown")


def _row(node: Json) -> dict[str, str]:
    cells = {
        f"{title} {kind}": ", ".join(
            _outcome(path.get(kind)) for path in paths_of(node.get(part)) if path is not None
        )
        for title, part in _PARTS.items()
        for kind in ("icmp", "http")
    }
    return {"name": node["name"], "status": node_state(node), "since": short_age(node.get("since")), **cells}


def _outcome(outcome: Json | None) -> str:
    if outcome is None:
        return "-"
    failure = outcome.get("status", "")
    return failure.rpartition(": ")[2] if failure else go_duration(outcome.get("latency", 0))
