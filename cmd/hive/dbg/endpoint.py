"""``cilium-dbg endpoint``: the endpoints of this node.

Source: Cilium 1.17, cilium-dbg/cmd/endpoint*.go, pkg/endpoint/id.
"""

import contextlib
import json
from typing import Any, Final

import click

from hive.dbg.config import InvalidOptionError, option_lines, options_text, parse_option
from hive.dbg.go_text import ENDPOINT, aligned, model, output_option, printed, table, with_source
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail

_PREFIXES: Final = frozenset(
    {
        *("cilium-global", "cilium-local", "cni-attachment-id", "container-id", "container-name", "cep-name"),
        *("docker-endpoint", "docker-net-endpoint", "ipv4", "ipv6", "pod-name"),
    }
)
UNKNOWN: Final = "Unknown"
_ENFORCED: Final = {
    "none": ("Disabled", "Disabled"),
    "both": ("Enabled", "Enabled"),
    "ingress": ("Enabled", "Disabled"),
    "egress": ("Disabled", "Enabled"),
    "audit-both": ("Disabled (Audit)", "Disabled (Audit)"),
    "audit-ingress": ("Disabled (Audit)", "Disabled"),
    "audit-egress": ("Disabled", "Disabled (Audit)"),
}
_ENDPOINT_OPTIONS: Final = (
    *("ConntrackAccounting", "ConntrackLocal", "Debug", "DebugLB", "DebugPolicy", "DropNotification"),
    *("MonitorAggregationLevel", "PolicyAccounting", "PolicyAuditMode", "PolicyVerdictNotification"),
    *("SourceIPVerification", "TraceNotification"),
)
MISSING: Final = "Missing endpoint id argument\n"
NO_HEADERS: Final = "Do not print headers"


@click.group(cls=Group, aliases={"inspect": "get", "show": "get"})
def command() -> None:
    """Manage endpoints"""


def endpoint_id(text: str) -> str:
    """Return an endpoint's id as the API expects it. Raises click.ClickException for an unknown prefix.

    The agent refuses numbers that are none.
    """
    prefix, colon, _ = text.partition(":")
    if colon and prefix not in _PREFIXES:
        raise click.ClickException(
            f'Cannot parse endpoint id "{text}": unknown endpoint ID prefix "{prefix}"'
        )
    return text


@command.command("list")
@click.option("--no-headers", is_flag=True, help=NO_HEADERS)
@output_option
def list_endpoints(no_headers: bool, output: str) -> None:
    """List all endpoints"""
    endpoints = ask_or_fail("cannot get endpoint list", "GET /endpoint")
    endpoints.sort(key=lambda one: one.get("id", 0))
    if output:
        click.echo(printed(model(endpoints, ENDPOINT), output, "[cells.api.models:EndpointModel]"))
    else:
        click.echo(endpoint_table(endpoints, headers=not no_headers), nl=False)


def endpoint_table(endpoints: list[dict[str, Any]], *, headers: bool = True) -> str:
    """Return the table of endpoints, with a line for each of their labels."""
    lines = []
    if headers:
        lines.append(
            "ENDPOINT\tPOLICY (ingress)\tPOLICY (egress)\tIDENTITY\tLABELS (source:key[=value])\t"
            "IPv6\tIPv4\tSTATUS\t\n"
        )
        lines.append("\tENFORCEMENT\tENFORCEMENT\t\t\t\t\t\t\n")
    for one in endpoints:
        status = one.get("status") or {}
        realized = (status.get("policy") or {}).get("realized") or {}
        ingress, egress = _ENFORCED.get(realized.get("policy-enabled", ""), (UNKNOWN, UNKNOWN))
        ipv6, ipv4 = _addresses(status.get("networking"))
        identity = status.get("identity")
        first, *others = sorted((status.get("labels") or {}).get("security-relevant") or ["no labels"])
        number = "<no label id>" if identity is None else identity.get("id", 0)
        state = status.get("state", UNKNOWN)
        lines.append(
            f"{one.get('id', 0)}\t{ingress}\t{egress}\t{number}\t{first}\t{ipv6}\t{ipv4}\t{state}\t\n"
        )
        lines.extend(f"\t\t\t\t{label}\t\t\t\t\n" for label in others)
    return aligned("".join(lines))


def _addresses(networking: dict[str, Any] | None) -> tuple[str, str]:
    """The first IPv6 and IPv4 address."""
    if networking is None:
        return UNKNOWN, UNKNOWN
    pairs = networking.get("addressing") or []
    if not pairs:
        return "No address", "No address"
    return pairs[0].get("ipv6", ""), pairs[0].get("ipv4", "")


@command.command()
@click.argument("endpoint", required=False)
@click.option("-l", "--labels", multiple=True, help="list of labels")
@output_option
def get(endpoint: str | None, labels: tuple[str, ...], output: str) -> None:
    """Display endpoint information"""
    chosen = [label for text in labels for label in text.split(",")]
    if endpoint and chosen:
        raise click.ClickException("Cannot provide both endpoint ID and labels arguments concurrently\n")
    if not endpoint and not chosen:
        raise click.ClickException(MISSING)
    try:
        if endpoint:
            endpoint_id(endpoint)
            found = [ask("GET /endpoint/{id}", id=endpoint)]
        else:
            found = ask("GET /endpoint", body=chosen)
    except RequestFailedError as error:
        what = (
            f"endpoint {endpoint}" if endpoint else f"endpoints for given list of labels [{' '.join(chosen)}]"
        )
        raise click.ClickException(f"Cannot get {what}: {error}\n") from error
    value = model(found, ENDPOINT)
    if output:
        click.echo(printed(value, output, "[cells.api.models:EndpointModel]"))
    else:
        click.echo(printed(_expanded(value), "json"))


def _expanded(value: Any) -> Any:
    """Return a value with embedded JSON texts, such as rules, decoded."""
    if isinstance(value, list):
        return [_expanded(one) for one in value]
    if isinstance(value, dict):
        return {key: _expanded(one) for key, one in value.items()}
    if isinstance(value, str) and value[:1] in {"{", "["}:
        with contextlib.suppress(ValueError):
            return _expanded(_sorted(json.loads(value)))
    return value


def _sorted(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


@command.command()
@needed("endpoint", MISSING)
@output_option
def health(endpoint: str, output: str) -> None:
    """View endpoint health"""
    endpoint_id(endpoint)
    found = ask_or_fail(f"Cannot get endpoint healthz {endpoint}", "GET /endpoint/{id}/healthz", id=endpoint)
    if output:
        click.echo(printed(model(found), output, "cells.api.models:EndpointHealth"))
        return
    rows = [
        ("Overall Health:", found.get("overallHealth", "")),
        ("BPF Health:", found.get("bpf", "")),
        ("Policy Health:", found.get("policy", "")),
        ("Connected:", "yes" if found.get("connected") else "no"),
    ]
    click.echo(aligned("\n".join(f"{name}\t{value}" for name, value in rows), least=2))


@command.command()
@needed("endpoint", MISSING)
@output_option
def log(endpoint: str, output: str) -> None:
    """View endpoint status log"""
    endpoint_id(endpoint)
    found = ask_or_fail(f"Cannot get endpoint log {endpoint}", "GET /endpoint/{id}/log", id=endpoint)
    if output:
        click.echo(printed(model(found), output, "[cells.api.models:EndpointStatusChange]"))
        return
    keys = ("timestamp", "code", "state", "message")
    rows = [[one.get(key, "") for key in keys] for one in found]
    click.echo(table(("Timestamp", "Status", "State", "Message"), rows))


@command.command()
@needed("endpoint", MISSING)
def disconnect(endpoint: str) -> None:
    """Disconnect an endpoint from the network"""
    endpoint_id(endpoint)
    ask_or_fail(f"Cannot disconnect endpoint {endpoint}", "DELETE /endpoint/{id}", id=endpoint)
    click.echo(f"Endpoint {endpoint} successfully disconnected")


@command.command()
@click.argument("endpoint", required=False)
@click.argument("options", nargs=-1)
@click.option("--list-options", is_flag=True, help="List available options")
@output_option
def config(endpoint: str | None, options: tuple[str, ...], list_options: bool, output: str) -> None:
    """View & modify endpoint configuration"""
    if list_options:
        click.echo(options_text(_ENDPOINT_OPTIONS), nl=False)
        return
    if not endpoint:
        raise click.ClickException(MISSING)
    endpoint_id(endpoint)
    failure = f"Cannot get configuration of endpoint {endpoint}"
    status = ask_or_fail(failure, "GET /endpoint/{id}/config", id=endpoint)
    realized = status.get("realized") or {}
    if not options:
        if output:
            click.echo(printed(model(status), output))
        else:
            click.echo(option_lines(status.get("immutable") or {}), nl=False)
            click.echo(option_lines(realized.get("options") or {}), nl=False)
        return
    present = realized.get("options") or {}
    changed = {}
    for text in options:
        try:
            name, number = parse_option(text, (*_ENDPOINT_OPTIONS, *present))
        except InvalidOptionError as error:
            raise click.ClickException(f"Cannot parse option {text}: {error}") from error
        changed[name] = str(number)
    realized["options"] = {**present, **changed}
    ask_or_fail(
        f"Cannot update endpoint {endpoint}", "PATCH /endpoint/{id}/config", id=endpoint, body=realized
    )
    click.echo(f"Endpoint {endpoint} configuration updated successfully")


@command.command()
@needed("endpoint", MISSING)
@click.option("-a", "--add", multiple=True, help="Add/enable labels")
@click.option("-d", "--delete", multiple=True, help="Delete/disable labels")
def labels(endpoint: str, add: tuple[str, ...], delete: tuple[str, ...]) -> None:
    """Manage label configuration of endpoint"""
    endpoint_id(endpoint)
    added = [with_source(label) for text in add for label in text.split(",")]
    deleted = {with_source(label) for text in delete for label in text.split(",")}
    try:
        found = _labels(endpoint)
        if added or deleted:
            custom = ((found.get("spec") or {}).get("user")) or []
            user = [label for label in custom if label not in deleted]
            user += [label for label in added if label not in user]
            ask("PATCH /endpoint/{id}/labels", id=endpoint, body={"user": user})
            found = _labels(endpoint)
    except RequestFailedError as error:
        verb = "modifying" if added or deleted else "getting"
        raise click.ClickException(f"Error {verb} labels of endpoint {endpoint}: {error}\n") from error
    status = found["status"]
    enabled = {*((status.get("realized") or {}).get("user") or ()), *(status.get("security-relevant") or ())}
    rows = [(label, "Enabled") for label in sorted(enabled)]
    rows += [(label, "Disabled") for label in sorted(status.get("disabled") or ())]
    click.echo(aligned("".join(f"{label}\t{state}\n" for label, state in rows)), nl=False)


def _labels(endpoint: str) -> Any:
    found = ask("GET /endpoint/{id}/labels", id=endpoint)
    if not found.get("status"):
        raise click.ClickException("Cannot get endpoint labels: empty response\n")
    return found
