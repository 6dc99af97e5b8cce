"""``hive endpoint``: the endpoints of the running agent; the list in the columns operators know.

Needs: the agent's GET /v1/endpoint.   Gives: command.   Source of the columns: cilium-dbg endpoint list.
"""

from pathlib import Path
from typing import Any

import click

from hive.client import ask, socket_option, timeout_option
from hive.endpoint import change as endpoint_change
from hive.endpoint import detail as endpoint_detail
from hive.output import BAD, GOOD, QUIET, document, output_option, table, terminal_width

LABELS = 4
TITLES = "ENDPOINT", "POLICY (ingress)", "POLICY (egress)", "IDENTITY", "LABELS (source:key[=value])"
HEADER = (
    (*TITLES, "IPv6", "IPv4", "STATUS"),
    ("", "ENFORCEMENT", "ENFORCEMENT", "", "", "", "", ""),
)


@click.group()
def command() -> None:
    """Show the endpoints of the running agent, or change one's options and labels."""


for _detail in (*endpoint_detail.COMMANDS, *endpoint_change.COMMANDS):
    command.add_command(_detail)


@command.command("list")
@socket_option
@timeout_option
@output_option
@click.option("--no-headers", is_flag=True, help="Leave the header out.")
def list_endpoints(agent_socket: Path, timeout: float, output: str, no_headers: bool) -> None:
    """List the endpoints: one for every pod interface on this node.

    A terminal too narrow for the labels shows them below their endpoint; if need be, the IPv6 address too.
    """
    endpoints = ask("/v1/endpoint", agent_socket, timeout=timeout)
    endpoints.sort(key=lambda endpoint: endpoint["id"])
    if (text := document(endpoints, output)) is not None:
        click.echo(text)
        return
    for line in render(endpoints, terminal_width(), headers=not no_headers):
        click.echo(line)


def render(endpoints: list[dict[str, Any]], width: int | None, *, headers: bool = True) -> list[str]:
    """The lines of the table; `width` None for as wide as it needs to be."""
    header = list(HEADER) if headers else []
    rows = [(_cells(endpoint), _labels(endpoint)) for endpoint in endpoints]
    wide: list[tuple[str, ...]] = [*header]
    for cells, labels in rows:
        first, *more = labels or [""]
        wide.append((*cells[:LABELS], first, *cells[LABELS:]))
        wide.extend(("",) * LABELS + (label,) + ("",) * (len(cells) - LABELS) for label in more)
    lines = table(wide, len(header)) if wide else []
    if width is None or all(len(click.unstyle(line)) <= width for line in lines):
        return lines
    short = [(*line[:LABELS], *line[LABELS + 1 :]) for line in header]
    lines = _stacked(short, rows, len(header))
    if all(len(click.unstyle(line)) <= width for line in lines):
        return lines
    below = [
        ((*cells[:LABELS], "", *cells[LABELS + 1 :]), [cells[LABELS], *labels]) for cells, labels in rows
    ]
    return _stacked(short, below, len(header))


def _stacked(
    header: list[tuple[str, ...]], rows: list[tuple[tuple[str, ...], list[str]]], header_lines: int
) -> list[str]:
    # The policy columns share their first words, and IPv6 stays away while nobody has it in its column.
    short = [
        tuple(
            cell.replace("POLICY (ingress)", "INGRESS").replace("POLICY (egress)", "EGRESS") for cell in line
        )
        for line in header[:1]
    ]
    everything = [*short, *(cells for cells, _ in rows)]
    if not any(cells[LABELS] for cells, _ in rows):
        everything = [(*line[:LABELS], *line[LABELS + 1 :]) for line in everything]
    lines = table(everything, min(header_lines, 1))
    result = lines[: len(short)]
    for line, (_, labels) in zip(lines[len(short) :], rows, strict=True):
        result.append(line)
        result.extend(click.style(f"    {label}", fg=QUIET) for label in labels if label)
    return result


def _cells(endpoint: dict[str, Any]) -> tuple[str, ...]:
    status = endpoint["status"]
    enabled = status.get("policy", {}).get("realized", {}).get("policy-enabled", "none")
    ips = addresses(endpoint)
    state = status["state"]
    colour = {"ready": GOOD, "not-ready": BAD, "invalid": BAD}.get(state)
    return (
        str(endpoint["id"]),
        _enforcement(enabled, "ingress"),
        _enforcement(enabled, "egress"),
        str(status.get("identity", {}).get("id", "<no label id>")),
        ips.get("ipv6", ""),
        ips.get("ipv4", ""),
        click.style(state, fg=colour),
    )


def addresses(endpoint: dict[str, Any]) -> dict[str, str]:
    """The address of each family an endpoint has: ``ipv4``, ``ipv6``."""
    pairs: list[dict[str, str]] = endpoint["status"].get("networking", {}).get("addressing") or [{}]
    return pairs[0]


def _enforcement(enabled: str, direction: str) -> str:
    if enabled in {direction, "both"}:
        return "Enabled"
    return "Disabled (Audit)" if enabled in {f"audit-{direction}", "audit-both"} else "Disabled"


def _labels(endpoint: dict[str, Any]) -> list[str]:
    labels: list[str] = endpoint["status"].get("labels", {}).get("security-relevant") or []
    return sorted(labels) or ["no labels"]
