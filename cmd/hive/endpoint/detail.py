"""``hive endpoint get|log|health``: details of one endpoint.

An endpoint is given by its number, pod or address. Source: cilium-dbg's commands of the same names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from hive import completion
from hive.client import agent_options, ask
from hive.names import endpoint_number, labels_text, pod_of
from hive.output import (
    BAD,
    GOOD,
    document,
    fact_lines,
    fitted,
    shown_as_document,
    table,
    table_width,
    terminal_width,
)

_STATES = {"OK": GOOD, "Warning": BAD, "Failure": BAD}

endpoint_argument = click.argument("endpoint", metavar="ENDPOINT", shell_complete=completion.endpoints)


def one_path(endpoint: str, below: str, agent_socket: Path, timeout: float) -> str:
    """Return an endpoint's path in the API. Raises click.ClickException."""
    return f"/v1/endpoint/{quote(endpoint_number(endpoint, agent_socket, timeout), safe='')}{below}"


def ask_one(endpoint: str, below: str, agent_socket: Path, timeout: float) -> Any:
    """Return an endpoint from the API. Raises click.ClickException with one line."""
    path = one_path(endpoint, below, agent_socket, timeout)
    missing = f"there is no endpoint {endpoint}; hive endpoint list shows all"
    return ask(path, agent_socket, timeout=timeout, missing=missing)


@click.command()
@endpoint_argument
@agent_options
def get(endpoint: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show an endpoint: by its number, POD or NAMESPACE/POD, an address, cni-attachment-id:CONTAINER:eth0."""
    found = ask_one(endpoint, "", agent_socket, timeout)
    if (text := document([found], output)) is not None:  # a list, as cilium-dbg has it
        click.echo(text)
        return
    for line in fact_lines(list(_facts(found)), terminal_width()):
        click.echo(line)


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    status = found["status"]
    networking, names = status.get("networking", {}), status.get("external-identifiers", {})
    policy = status.get("policy", {}).get("realized", {})
    addresses = networking.get("addressing", [{}])[0]
    yield "Endpoint:", str(found["id"])
    yield "State:", status["state"]
    yield "Pod:", pod_of(found)
    yield "Container:", names.get("container-id", "")
    yield "IPv4:", addresses.get("ipv4", "")
    yield "IPv6:", addresses.get("ipv6", "")
    yield (
        "Interface:",
        f"{networking.get('interface-name', '')} (index {networking.get('interface-index', '')})",
    )
    yield "MAC:", networking.get("mac", "")
    yield "Host MAC:", networking.get("host-mac", "")
    labels = status.get("labels", {}).get("security-relevant", [])
    yield "Identity:", f"{status.get('identity', {}).get('id', '')} ({labels_text(labels)})"
    for number, label in enumerate(labels):
        yield "" if number else "Labels:", label
    yield "Enforced:", policy.get("policy-enabled", "none")
    yield "Policy revision:", str(policy.get("policy-revision", 0))
    for one in status.get("log", [])[:1]:
        yield "Last change:", f"{one.get('timestamp', '')} {one.get('state', '')} {one.get('message', '')}"


@click.command()
@endpoint_argument
@agent_options
def log(endpoint: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the log of an endpoint (a number, pod or address), latest entry first."""
    found = ask_one(endpoint, "/log", agent_socket, timeout)
    if shown_as_document(found, output):
        return
    rows = [{name: one.get(name, "") for name in ("timestamp", "code", "state", "message")} for one in found]
    for line in fitted(rows, table_width(output), "-o wide", first=("timestamp", "state", "message")):
        click.echo(line)


@click.command()
@endpoint_argument
@agent_options
def health(endpoint: str, agent_socket: Path, timeout: float, output: str) -> int:
    """Show the health of an endpoint (a number, pod or address). Exits 1 on a warning or failure."""
    found = ask_one(endpoint, "/healthz", agent_socket, timeout)
    if (text := document(found, output)) is not None:
        click.echo(text)
        return 0
    names = (("Overall:", "overallHealth"), ("Datapath:", "bpf"), ("Policy:", "policy"))
    rows = [
        (name, click.style(found.get(key, ""), fg=_STATES.get(found.get(key, "")))) for name, key in names
    ]
    rows.append(("Connected:", "yes" if found.get("connected") else "no"))
    for line in table(rows, header_lines=0):
        click.echo(line)
    return 1 if found.get("overallHealth") in {"Warning", "Failure"} else 0


COMMANDS = (get, log, health)
