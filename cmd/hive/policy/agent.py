"""``hive policy list``, ``get``, ``selectors``, ``wait``: the policies of the running agent.

Source of ``get``, ``selectors`` and ``wait``: cilium-dbg policy.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask, socket_option, timeout_option
from hive.output import BAD, GOOD, detailed, shown_as_document, table_width

NAME, NAMESPACE = "io.cilium.k8s.policy.name", "io.cilium.k8s.policy.namespace"


@click.command("list")
@agent_options
@click.option("--refused", is_flag=True, help="Only objects that are refused, or not enforced as written.")
def list_policies(agent_socket: Path, timeout: float, output: str, refused: bool) -> None:
    """List the policy objects: whether each is in force as written, or why not.

    If an object is refused, its previous version stays in force. If this agent cannot enforce a single rule,
    the rest of the object is in force: the rule allows nothing, or denies everything that it could mean.
    While there is no Envoy to enforce HTTP rules, the connections that they select are dropped.
    """
    rows_of_table = ask("/statedb/dump/policies", agent_socket, timeout=timeout)["policies"]
    found: list[dict[str, Any]] = [row["obj"] for row in rows_of_table]
    found = [one for one in found if not (refused and one["valid"])]
    found.sort(key=lambda one: (one["kind"], one["namespace"], one["name"]))
    if shown_as_document(found, output):
        return
    if not found:
        click.echo(
            "No policies: none is refused." if refused else "No policies: the agent has no object.", err=True
        )
        return
    rows = []
    for one in found:
        path = f"{one['path']}: " if one.get("path") else ""
        valid = click.style("yes", fg=GOOD) if one["valid"] else click.style("no", fg=BAD)
        refusal = "" if one["valid"] else f"{path}{one['message']}"
        message = "; ".join(filter(None, (refusal, one.get("unenforced", ""))))
        cells = (one["kind"], one["namespace"], one["name"], valid, str(one["revision"]))
        rows.append((cells, [message] if message else []))
    header = ("KIND", "NAMESPACE", "NAME", "VALID", "REVISION", "MESSAGE")
    click.echo("\n".join(detailed(header, rows, table_width(output))))


@click.command()
@click.argument("labels", nargs=-1)
@agent_options
def get(labels: tuple[str, ...], agent_socket: Path, timeout: float, output: str) -> None:
    """Show the rules in force, or those that have all LABELS (source:key=value), and their revision."""
    missing = f"no rule has the labels {' '.join(labels)}"
    found = ask("/v1/policy", agent_socket, timeout=timeout, missing=missing, body=list(labels))
    if shown_as_document(found, output):
        return
    click.echo(found["policy"])
    click.echo(f"Revision: {found['revision']}")


@click.command()
@agent_options
def selectors(agent_socket: Path, timeout: float, output: str) -> None:
    """Show the selectors of this node's policies: their policy, what they select, and how many use them."""
    found = ask("/v1/policy/selectors", agent_socket, timeout=timeout)
    if shown_as_document(found, output):
        return
    if not found:
        click.echo("No selectors: no policy selects anything here.", err=True)
        return
    rows = []
    for one in found:
        labels = {label["key"]: label["value"] for label in one["labels"]}
        policy = "/".join(labels[key] for key in (NAMESPACE, NAME) if labels.get(key))
        identities = ", ".join(map(str, one["identities"] or ()))
        rows.append(((policy, str(one["users"]), identities or "none"), [one["selector"]]))
    header = ("POLICY", "USERS", "IDENTITIES", "SELECTOR")
    for line in detailed(header, rows, table_width(output), below=["IDENTITIES"]):
        click.echo(line)


@click.command()
@click.argument("revision", type=click.IntRange(min=0))
@socket_option
@timeout_option
@click.option(
    "--sleep-time", type=click.FloatRange(min=0.01), default=1.0, help="Seconds between two checks."
)
@click.option(
    "--fail-wait-time",
    type=click.FloatRange(min=0),
    default=60.0,
    help="Seconds until endpoints that are not ready count as failed.",
)
@click.option(
    "--max-wait-time", type=click.FloatRange(min=0), default=360.0, help="Maximum time to wait in seconds."
)
def wait(
    revision: int,
    agent_socket: Path,
    timeout: float,
    sleep_time: float,
    fail_wait_time: float,
    max_wait_time: float,
) -> int:
    """Wait until every endpoint's policy map has the rules of REVISION.

    Exits 1 if endpoints are not ready for --fail-wait-time, or after --max-wait-time.
    """
    began = time.monotonic()
    while True:
        endpoints = ask("/v1/endpoint", agent_socket, timeout=timeout)
        late = [one for one in endpoints if not _has(one, revision)]
        if not late:
            return 0
        waited = time.monotonic() - began
        stuck = [one["id"] for one in late if one["status"]["state"] != "ready"]
        if waited >= max_wait_time or (stuck and waited >= fail_wait_time):
            shown = ", ".join(str(one["id"]) for one in late)
            raise click.ClickException(f"endpoints without revision {revision} after {waited:.0f} s: {shown}")
        time.sleep(sleep_time)


def _has(endpoint: dict[str, Any], revision: int) -> bool:
    status = endpoint["status"]
    realized: int = status["policy"]["realized"].get("policy-revision", 0)
    return realized >= revision and status["state"] == "ready"


COMMANDS = (list_policies, get, selectors, wait)
