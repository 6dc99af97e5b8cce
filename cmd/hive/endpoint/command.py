"""``hive endpoint``: the endpoints of the running agent; the list has cilium-dbg's columns."""

from pathlib import Path
from typing import Any

import click

from hive.client import agent_options, ask
from hive.endpoint import change as endpoint_change
from hive.endpoint import detail as endpoint_detail
from hive.names import pod_of
from hive.output import BAD, GOOD, detailed, shown_as_document, table_width

HEADER = (
    *("ENDPOINT", "POD", "POLICY", "IDENTITY", "IPv4", "IPv6", "STATUS"),
    "LABELS (source:key[=value])",
)
_IPV6 = HEADER.index("IPv6")


@click.group()
def command() -> None:
    """Show the endpoints of the running agent, or change one's options and labels."""


for _detail in (*endpoint_detail.COMMANDS, *endpoint_change.COMMANDS):
    command.add_command(_detail)


@command.command("list")
@agent_options
@click.option("--no-headers", is_flag=True, help="Omit the header.")
def list_endpoints(agent_socket: Path, timeout: float, output: str, no_headers: bool) -> None:
    """List the endpoints: one for every pod on this node, and the host endpoint if it has a policy.

    POLICY is the direction that policies restrict: none, ingress, egress or both; with audit- they only
    report. On a narrow terminal labels are below.
    """
    endpoints = ask("/v1/endpoint", agent_socket, timeout=timeout)
    endpoints.sort(key=lambda endpoint: endpoint["id"])
    if shown_as_document(endpoints, output):
        return
    if not endpoints:
        click.echo("No endpoints: no pod runs on this node, or none was given to this agent.", err=True)
        return
    for line in render(endpoints, table_width(output))[no_headers:]:
        click.echo(line)


def render(endpoints: list[dict[str, Any]], width: int | None) -> list[str]:
    """Return the lines of the table; `width` None is unlimited."""
    rows = [(_cells(endpoint), _labels(endpoint)) for endpoint in endpoints]
    header: tuple[str, ...] = HEADER
    if not any(cells[_IPV6] for cells, _ in rows):
        header = (*HEADER[:_IPV6], *HEADER[_IPV6 + 1 :])
        rows = [((*cells[:_IPV6], *cells[_IPV6 + 1 :]), labels) for cells, labels in rows]
    return detailed(header, rows, width, below=[name for name in ("IPv6", "POD") if name in header])


def _cells(endpoint: dict[str, Any]) -> tuple[str, ...]:
    status = endpoint["status"]
    enabled = status.get("policy", {}).get("realized", {}).get("policy-enabled", "none")
    ips = addresses(endpoint)
    state = status["state"]
    colour = {"ready": GOOD, "not-ready": BAD, "invalid": BAD}.get(state)
    return (
        str(endpoint["id"]),
        pod_of(endpoint),
        enabled,
        str(status.get("identity", {}).get("id", "<no label id>")),
        ips.get("ipv4", ""),
        ips.get("ipv6", ""),
        click.style(state, fg=colour),
    )


def addresses(endpoint: dict[str, Any]) -> dict[str, str]:
    """Return the address of each family of an endpoint: ``ipv4``, ``ipv6``."""
    pairs: list[dict[str, str]] = endpoint["status"].get("networking", {}).get("addressing") or [{}]
    return pairs[0]


def _labels(endpoint: dict[str, Any]) -> list[str]:
    labels: list[str] = endpoint["status"].get("labels", {}).get("security-relevant") or []
    return sorted(labels) or ["no labels"]
