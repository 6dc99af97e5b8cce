"""``hive bpf policy``: the policy maps of endpoints.

Source: the order of ``cilium-dbg bpf policy get``: denies first, then ingress, then by identity.
"""

from pathlib import Path
from typing import Any

import click

from hive import completion
from hive.client import agent_options
from hive.maps.bpf_rows import Row, family_of
from hive.maps.pinned import directory_of, root_option, rows_of
from hive.names import Names, endpoint_number
from hive.output import fitted, shown_as_document, table_width

_FIRST = ("pod", "verdict", "direction", "peer", "port/protocol")


@click.command()
@click.argument("endpoint", metavar="[ENDPOINT]", required=False, shell_complete=completion.endpoints)
@root_option
@agent_options
@click.option("--wide", is_flag=True, help="Show all columns, in lines of any width.")
def command(
    endpoint: str | None, bpf_root: Path, agent_socket: Path, timeout: float, output: str, wide: bool
) -> None:
    """Show the policy map of ENDPOINT (a number, pod or address), or of every endpoint.

    Denies come first. Identity 0 is any peer, ANY any protocol. Names of pods and labels come from the agent;
    without an agent only numbers are shown.
    """
    directory = directory_of(bpf_root)
    pins = {int(path.name.rpartition("_")[2]): path for path in directory.iterdir() if _is_policy(path)}
    chosen = sorted(pins) if endpoint is None else [_number(endpoint, agent_socket, timeout)]
    if endpoint is not None and chosen[0] not in pins:
        raise click.ClickException(
            f"endpoint {endpoint} has no policy map at {directory}; `hive bpf policy` shows all that have one"
        )
    names = Names(agent_socket, timeout, quiet=True)
    rows = [{"endpoint": one, **row} for one in chosen for row in sorted(rows_of(pins[one]), key=_place)]
    if shown_as_document(rows, output):
        return
    named = [_named(row, names) for row in rows]
    for line in fitted(named, None if wide else table_width(output), "--wide or -o json", first=_FIRST):
        click.echo(line)


def _number(endpoint: str, agent_socket: Path, timeout: float) -> int:
    number = endpoint_number(endpoint, agent_socket, timeout)
    if not number.isdigit():
        raise click.UsageError(f"{endpoint}: expected an endpoint's number, its pod or its address")
    return int(number)


def _named(row: dict[str, Any], names: Names) -> Row:
    """Return a row with the endpoint's pod and the peer's labels."""
    others = dict(row)
    endpoint, verdict, direction, identity = (
        others.pop(name) for name in ("endpoint", "verdict", "direction", "identity")
    )
    peer = names.identity(identity) if identity else "any"
    first = {"pod": names.endpoint(endpoint), "endpoint": endpoint, "verdict": verdict}
    return {**first, "direction": direction, "peer": peer, "identity": identity, **others}


def _is_policy(path: Path) -> bool:
    return family_of(path.name) == "cilium_policy"


def _place(row: Row) -> tuple[Any, ...]:
    return row["verdict"] != "deny", row["direction"] != "ingress", row["identity"], row["port/protocol"]
