"""``cilium-dbg policy``, ``identity``, ``ip`` and ``fqdn``: rules, identities and addresses.

Source: Cilium 1.17, cilium-dbg/cmd/{policy,identity,ip,fqdn}*.go.
"""

import json
import re
import sys
import time
from collections.abc import Iterable
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import click

from hive.dbg.go_text import (
    Shape,
    aligned,
    go_duration,
    is_prefix,
    model,
    output_option,
    printable_labels,
    printed,
    table,
    with_source,
)
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail

RESERVED: Final = {
    0: "unknown",
    1: "host",
    2: "world",
    3: "unmanaged",
    4: "health",
    5: "init",
    6: "remote-node",
    7: "kube-apiserver",
    8: "ingress",
    9: "world-ipv4",
    10: "world-ipv6",
}
_SELECTORS: Final[Shape] = {"identities[]": {}}


@click.group(cls=Group)
def policy() -> None:
    """Manage security policies"""


@policy.command("get")
@click.argument("labels", nargs=-1)
@output_option
def get_policy(labels: tuple[str, ...], output: str) -> None:
    """Display policy node information"""
    found = ask_or_fail("Cannot get policy", "GET /policy", body=list(labels))
    if output:
        click.echo(printed(model(found), output))
    else:
        click.echo(f"{found.get('policy', '')}\nRevision: {found.get('revision', 0)}")


@policy.command("delete")
@click.argument("labels", nargs=-1)
@click.option("--all", "delete_all", is_flag=True, help="Delete all policies")
@output_option
def delete_policy(labels: tuple[str, ...], delete_all: bool, output: str) -> None:
    """Delete policy rules"""
    if not labels and not delete_all:
        raise click.ClickException("Please use --all flag to delete all policies")
    found = ask_or_fail("Cannot delete policy", "DELETE /policy", body=list(labels)) or {}
    click.echo(printed(model(found), output) if output else f"Revision: {found.get('revision', 0)}")


@policy.command("import")
@needed("path", "Missing path argument\n")
@click.option("--replace", is_flag=True, help="Replace existing policy")
@click.option("--replace-with-labels", multiple=True, help="Replace existing policies with these labels")
@click.option("--print", "show", is_flag=True, help="Print policy after import")
@output_option
def import_policy(
    path: str, replace: bool, replace_with_labels: tuple[str, ...], show: bool, output: str
) -> None:
    """Import security policy in JSON format"""
    rules = _rules(path)
    if not rules:
        click.echo("No policy specified", nl=False)
        return
    query = {"replace": "true" if replace else "false"}
    if replace_with_labels:
        query["replace-with-labels"] = ",".join(replace_with_labels)
    text = json.dumps(rules, indent=2, ensure_ascii=False)
    found = ask_or_fail("Cannot import policy", "PUT /policy", body=text, query=query) or {}
    if output:
        click.echo(printed(model(found), output))
    elif show:
        click.echo(f"{found.get('policy', '')}\nRevision: {found.get('revision', 0)}")
    else:
        click.echo(f"Revision: {found.get('revision', 0)}")


@policy.command("validate")
@needed("path", "Missing path argument\n")
def validate_policy(path: str) -> None:
    """Validate a policy"""
    raise click.ClickException(f"use hive policy check {path}: it reads the objects that hold the rules")


def _rules(path: str) -> list[dict[str, Any]]:
    """Return the rules of a file, or of the files of a folder, as the client sends them. Raises
    ClickException.
    """
    place = Path(path)
    try:
        files = sorted(place.rglob("*.json")) if place.is_dir() else [place]
        found = [json.loads(file.read_text()) for file in files]
    except (OSError, ValueError) as error:
        raise click.ClickException(f"Cannot parse policy {path}: {error}\n") from error
    rules = [rule for one in found for rule in (one if isinstance(one, list) else [one])]
    return [_defaulted(rule) for rule in rules]


def _defaulted(rule: dict[str, Any]) -> dict[str, Any]:
    """Return a rule with the sources of its labels, and whether it denies by default."""
    new = dict(rule)
    for name in ("endpointSelector", "nodeSelector"):
        if name in new:
            new[name] = _sourced(new[name])
    if "labels" in new:
        new["labels"] = [
            {"key": one.get("key", ""), "value": one.get("value", ""), "source": one.get("source", "")}
            for one in new["labels"]
        ]
    new.setdefault(
        "enableDefaultDeny",
        {way: bool(rule.get(way) or rule.get(f"{way}Deny")) for way in ("ingress", "egress")},
    )
    return new


def _sourced(selector: dict[str, Any]) -> dict[str, Any]:
    labels = selector.get("matchLabels") or {}
    named = {key if ":" in key else f"any:{key}": value for key, value in labels.items()}
    return {**selector, "matchLabels": named} if named else selector


@policy.command()
@click.option("-v", "--verbose", is_flag=True, help="Print the selectors' policies in full")
@output_option
def selectors(verbose: bool, output: str) -> None:
    """Display cached information about selectors"""
    found = ask_or_fail("Cannot get policy", "GET /policy/selectors")
    if output:
        click.echo(
            printed(
                [model(one, _SELECTORS) for one in found],
                output,
                "[cells.api.models.node:SelectorIdentityMapping]",
            )
        )
        return
    lines = ["SELECTOR\tLABELS\tUSERS\tIDENTITIES\n"]
    for one in sorted(found, key=lambda each: str(each.get("selector", ""))):
        first, *others = one.get("identities") or [""]
        labels = _policy_labels(one.get("labels") or (), verbose)
        numbers = f"{first}\t" if others or first != "" else ""
        lines.append(f"{one.get('selector', '')}\t{labels}\t{one.get('users', 0)}\t{numbers}\n")
        lines.extend(f"\t\t\t{identity}\t\n" for identity in others)
    click.echo(aligned("".join(lines)), nl=False)


def _policy_labels(labels: Iterable[dict[str, str]], verbose: bool) -> str:
    ordered = sorted(labels, key=lambda one: one.get("key", ""))
    if verbose:
        texts = (
            f"{one.get('source', '')}:{one.get('key', '')}"
            + (f"={value}" if (value := one.get("value")) else "")
            for one in ordered
        )
        return f"[{' '.join(texts)}]" if ordered else ""
    values = {one.get("key", ""): one.get("value", "") for one in ordered if one.get("source") == "k8s"}
    place = values.get("io.cilium.k8s.policy.namespace", "")
    return f"{place}/{values.get('io.cilium.k8s.policy.name', '')}" if place else ""


@policy.command()
@needed("number", "invalid revision\n")
@click.option("--sleep-time", type=int, default=1, help="Sleep interval between checks (seconds)")
@click.option("--fail-wait-time", type=int, default=60, help="Wait time after which command fails (seconds)")
@click.option("--max-wait-time", type=int, default=360, help="Wait time after which command fails (seconds)")
def wait(number: str, sleep_time: int, fail_wait_time: int, max_wait_time: int) -> None:
    """Wait for all endpoints to have updated to a given policy revision"""
    if not re.fullmatch("[+-]?[0-9]{1,18}", number):
        reason = f"strconv.ParseInt: parsing {json.dumps(number)}: invalid syntax"
        raise click.ClickException(f"invalid revision '{number}': {reason}")
    revision, start, waited = int(number), time.monotonic(), False
    while True:
        endpoints = ask_or_fail("cannot list endpoints", "GET /endpoint")
        states = [_progress(one, revision) for one in endpoints]
        ready, failed = states.count("ready"), states.count("failed")
        if ready == len(states):
            if waited:
                click.echo()
            return
        passed = time.monotonic() - start
        duration = go_duration(int(passed * 1e9))
        if failed and passed > fail_wait_time:
            raise click.ClickException(f"\n{failed} endpoints have failed regeneration after {duration}\n")
        if passed > max_wait_time:
            late = len(states) - ready
            raise click.ClickException(
                f"\n{late} endpoints still not ready after {duration} ({failed} failed)\n"
            )
        progress = f"{ready}/{len(states)}"
        gap = " " * 14
        click.echo(f"\rWaiting for endpoints to run policy revision {revision}: {progress}{gap}", nl=False)
        time.sleep(sleep_time)
        waited = True


def _progress(endpoint: dict[str, Any], revision: int) -> str:
    """Return ``ready`` at this revision, ``late``, or ``failed``."""
    status = endpoint.get("status") or {}
    realized, state = (status.get("policy") or {}).get("realized"), status.get("state")
    if realized is None or state is None:
        return "failed"
    if state == "ready" and realized.get("policy-revision", 0) >= revision:
        return "ready"
    return "failed" if state == "not-ready" else "late"


@click.group(cls=Group)
def identity() -> None:
    """Manage security identities"""


@identity.command("list")
@click.argument("labels", nargs=-1)
@click.option("--endpoints", is_flag=True, help="list identities of locally managed endpoints")
@output_option
def list_identities(labels: tuple[str, ...], endpoints: bool, output: str) -> None:
    """List identities"""
    try:
        if endpoints:
            found = ask("GET /identity/endpoints")
        else:
            found = ask("GET /identity", body=list(labels) or None)
    except RequestFailedError as error:
        what = "" if endpoints else f" for given labels [{' '.join(labels)}]"
        end = "" if endpoints else "\n"
        raise click.ClickException(f"Cannot get identities{what}. err: {error}{end}") from error
    found.sort(key=lambda one: (one.get("identity") or {} if endpoints else one).get("id", 0))
    if output:
        kind = (
            "[cells.api.models.node:IdentityEndpoints]" if endpoints else "[cells.api.models:IdentityModel]"
        )
        click.echo(printed(model(found), output, kind))
    elif endpoints:
        rows = [(one.get("identity") or {}, f"{one.get('refCount', 0)}\t") for one in found]
        click.echo(_identities(rows, "ID\tLABELS\tREFCOUNT"), nl=False)
    else:
        _print_identities(found)


def _print_identities(found: list[dict[str, Any]]) -> None:
    click.echo(_identities([(one, "") for one in found], "ID\tLABELS"), nl=False)


def _identities(rows: list[tuple[dict[str, Any], str]], header: str) -> str:
    lines = [header]
    for one, count in rows:
        for place, label in enumerate(printable_labels(one.get("labels") or ())):
            start = "" if place else str(one.get("id", 0))
            lines.append(f"{start}\t{label}" + (f"\t{'' if place else count}" if count else ""))
    return aligned("\n".join(lines) + "\n")


@identity.command("get")
@click.argument("number", required=False)
@click.option("--label", multiple=True, help="Label to lookup")
@output_option
def get_identity(number: str | None, label: tuple[str, ...], output: str) -> None:
    """Retrieve information about an identity"""
    labels = [one for text in label for one in text.split(",")]
    if not number and not labels:
        raise click.ClickException("Invalid identity ID\n")
    try:
        found = ask("GET /identity", body=labels) if labels else [ask("GET /identity/{id}", id=str(number))]
    except RequestFailedError as error:
        what = f"labels [{' '.join(labels)}]" if labels else f"given ID {number}"
        raise click.ClickException(f"Cannot get identity for {what}: {error}\n") from error
    found.sort(key=lambda one: one.get("id", 0))
    if output:
        click.echo(printed(model(found), output, "[cells.api.models:IdentityModel]"))
    else:
        _print_identities(found)


@click.group(cls=Group)
def ip() -> None:
    """Manage IP addresses and associated information"""


@ip.command("list")
@click.option("-n", "--numeric", is_flag=True, help="Print numeric identities")
@click.option("-v", "--verbose", is_flag=True, help="Print all fields of ipcache")
@output_option
def list_addresses(numeric: bool, verbose: bool, output: str) -> None:
    """List IP addresses in the userspace IPCache"""
    _print_addresses(_addresses(), output, numeric=numeric, verbose=verbose)


@ip.command("get")
@click.argument("cidr", required=False)
@click.option("-l", "--labels", multiple=True, help="list of labels")
@click.option("-v", "--verbose", is_flag=True, help="Print all fields of ipcache")
@output_option
def get_address(cidr: str | None, labels: tuple[str, ...], verbose: bool, output: str) -> None:
    """Display IP Cache information"""
    wanted = [with_source(one) for text in labels for one in text.split(",")]
    if cidr and wanted:
        raise click.ClickException("Cannot provide both cidr and labels arguments concurrently\n")
    if wanted:
        _print_addresses_of(sorted(wanted), output, verbose=verbose)
        return
    if not cidr:
        raise click.ClickException("Missing cidr argument\n")
    if not is_prefix(cidr):
        reason = f"invalid CIDR address: {cidr}"
        raise click.ClickException(f"Unable to parse CIDR {json.dumps(cidr)}: {reason}")
    _print_addresses(_addresses({"cidr": cidr}), output, verbose=verbose)


def _print_addresses_of(labels: list[str], output: str, *, verbose: bool) -> None:
    """Print the addresses of identities with these labels."""
    rule = 27 * "="
    click.echo("\n".join((rule, "Labels:", *(f"    {label}" for label in labels), rule)))
    found = _addresses(body=labels)
    if verbose or output:
        _print_addresses(found, output, verbose=verbose)
        return
    rows = []
    for one in found:
        pod = one.get("metadata") or {}
        cells = (one.get("cidr", ""), one.get("hostIP", ""), one.get("identity", 0))
        rows.append((*cells, pod.get("name", ""), pod.get("namespace", "")))
    click.echo(table(("IP", "HOST", "IDENTITY", "POD", "NAMESPACE"), rows))


def _addresses(query: dict[str, str] | None = None, body: list[str] | None = None) -> list[dict[str, Any]]:
    """Return prefixes with their identities, in the client's order. Raises click.ClickException."""
    found: list[dict[str, Any]] = ask_or_fail(
        "Cannot get ipcache entries. err", "GET /ip", end="", query=query, body=body
    )
    return sorted(found, key=_prefix_order)


def _print_addresses(
    found: list[dict[str, Any]], output: str, *, numeric: bool = False, verbose: bool
) -> None:
    if output:
        click.echo(printed(model(found), output, "[cells.api.models.node:IPListEntry]"))
        return
    lines = ["IP\tIDENTITY\tSOURCE" + ("\tHOST\tENCRYPT_KEY" if verbose else "")]
    for one in found:
        number = one.get("identity", 0)
        first, *others = [str(number)] if numeric else identity_labels(number)
        source = (one.get("metadata") or {}).get("source", "")
        more = f"\t{one.get('hostIP', '')}\t{one.get('encryptKey', 0)}" if verbose else ""
        lines.append(f"{one.get('cidr', '')}\t{first}\t{source}{more}")
        lines.extend(f"\t{label}\t" for label in others)
    click.echo(aligned("\n".join(lines)))


def _prefix_order(one: dict[str, Any]) -> tuple[int, int, bytes]:
    try:
        network = ip_network(one.get("cidr", ""), strict=False)
    except ValueError:  # printed unchanged, first
        return -1, 0, str(one.get("cidr", "")).encode()
    return network.prefixlen, network.version, network.network_address.packed


def identity_labels(number: int) -> list[str]:
    """Return the labels of an identity; for an unknown one its name or number, with a message on stderr."""
    try:
        found = ask("GET /identity/{id}", id=str(number))
    except RequestFailedError as error:
        click.echo(f"Cannot get identity for ID {number}: {error}", err=True)
        return [RESERVED.get(number, str(number))]
    return printable_labels(found.get("labels") or ()) or [str(number)]


@click.group(cls=Group)
def fqdn() -> None:
    """Manage fqdn proxy"""


@fqdn.group(cls=Group)
def cache() -> None:
    """Manage fqdn proxy cache"""


@cache.command("list")
@click.option("-e", "--endpoint", default="", help="List cache entries for a specific endpoint id")
@click.option("-p", "--matchpattern", default="", help="List cache entries with FQDN that match matchpattern")
@click.option("-s", "--source", default="", help="List cache entries from a specific source")
@output_option
def list_cache(endpoint: str, matchpattern: str, source: str, output: str) -> None:
    """List fqdn proxy cache contents"""
    _print_cache(endpoint, matchpattern, source, output)


def _print_cache(endpoint: str, matchpattern: str, source: str, output: str) -> None:
    query = {name: value for name, value in (("matchpattern", matchpattern), ("source", source)) if value}
    try:
        if endpoint:
            found = ask("GET /fqdn/cache/{id}", id=endpoint, query=query)
        else:
            found = ask("GET /fqdn/cache", query=query)
    except RequestFailedError as error:
        if error.status != 404:
            raise click.ClickException(f"Error: {error}\n") from error
        found = []
    if output:
        click.echo(printed(model(found or []), output, "[cells.api.models.node:DNSLookup]"))
        return
    keys = ("endpoint-id", "source", "fqdn", "ttl", "expiration-time")
    rows = [(*(one.get(key, 0) for key in keys), ",".join(one.get("ips") or ())) for one in found or ()]
    header = ("Endpoint", "Source", "FQDN", "TTL", "ExpirationTime", "IPs")
    click.echo(table(header, rows, end="\t"))


@cache.command()
@click.option("-f", "--force", is_flag=True, help="Skip confirmation")
@click.option(
    "-p", "--matchpattern", default="", help="Delete cache entries with FQDN that match matchpattern"
)
def clean(force: bool, matchpattern: str) -> None:
    """Clean fqdn cache"""
    if not force:
        click.echo("Following cache entries are going to be deleted:")
        _print_cache("", matchpattern, "", "")
        click.echo("The command is non-revertible, do you want to continue [y/N]?")
        if sys.stdin.readline().split() != ["y"]:
            return
    ask_or_fail("Error", "DELETE /fqdn/cache", query={"matchpattern": matchpattern} if matchpattern else None)
    click.echo("FQDN proxy cache cleared")


@fqdn.command()
@output_option
def names(output: str) -> None:
    """Show internal state Cilium has for DNS names / regexes"""
    found = ask_or_fail("Error", "GET /fqdn/names")
    shape: Shape = {"DNSPollNames[]": {}, "FQDNPolicySelectors[]": {}}
    click.echo(printed(model(found, shape), output or "json", "cells.api.models.node:NameManager"))


COMMANDS: Final = {"policy": policy, "identity": identity, "ip": ip, "fqdn": fqdn}
