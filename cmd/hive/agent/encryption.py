"""``hive encryption``: rotates the node's WireGuard key, and shows the progress."""

import time
from pathlib import Path

import click

from hive.client import agent_options, ask, socket_option, timeout_option
from hive.output import shown_as_document

_PATH = "/encryption/rotation"
_PACE = 1.0
"""Polling interval of a rotation in seconds."""


@click.group()
def command() -> None:
    """Rotate this node's WireGuard key without interrupting traffic, and show the progress."""


@command.command()
@click.option(
    "--wait/--no-wait", default=True, help="Wait until the rotation is complete.", show_default=True
)
@socket_option
@timeout_option
def rotate(agent_socket: Path, timeout: float, wait: bool) -> None:
    """Rotate the key of this node.

    Other nodes change to the next key while the current one still works. The rotation waits up to five
    minutes for unreachable nodes. Keys of several nodes are rotated one after the other.
    """
    state = ask(_PATH, agent_socket, timeout=timeout, method="POST")
    wanted = state["next_key"]
    click.echo(f"Next key: {wanted}")
    while wait and state["next_key"] == wanted:
        time.sleep(_PACE)
        state = ask(_PATH, agent_socket, timeout=timeout)
    if wait:
        click.echo("The rotation is complete.")
        if state["missed"]:
            names = ", ".join(state["missed"])
            raise click.ClickException(f"not changed in time, packets may have been lost: {names}")


@command.command()
@agent_options
def status(agent_socket: Path, timeout: float, output: str) -> None:
    """Show whether the key of this node is being rotated, and which nodes it waits for."""
    state = ask(_PATH, agent_socket, timeout=timeout)
    if shown_as_document(state, output):
        return
    click.echo(f"Key:       {state['public_key'] or 'none: enable-wireguard is not set'}")
    if state["next_key"]:
        click.echo(f"Next key:  {state['next_key']}, {state['step']}")
        click.echo(f"Waits for: {', '.join(state['waits_for']) or 'nothing'}")
    if state["missed"]:
        which = "this rotation" if state["next_key"] else "the last rotation"
        click.echo(f"Missed:    {', '.join(state['missed'])}, by {which}")
