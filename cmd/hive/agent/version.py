"""``hive version``: the versions of this command and of the running agent."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import click

from hive.client import agent_options, ask
from hive.output import fact_lines, shown_as_document, table_width


@click.command()
@agent_options
def command(agent_socket: Path, timeout: float, output: str) -> None:
    """Show the version of this command and, if an agent runs on this node, that of the agent."""
    found = {
        "hive": metadata.version("hive-agent"),
        "agent": _agent(agent_socket, timeout),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    if shown_as_document(found, output):
        return
    facts = [(name, version or "none runs here") for name, version in found.items()]
    for line in fact_lines(facts, table_width(output)):
        click.echo(line)


def _agent(agent_socket: Path, timeout: float) -> str:
    """Return the agent's version; empty without an agent."""
    if not agent_socket.exists():
        return ""
    return str(ask("/v1/debuginfo", agent_socket, timeout=timeout).get("cilium-version", ""))
