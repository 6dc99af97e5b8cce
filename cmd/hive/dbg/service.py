"""``cilium-dbg service`` and ``lrp``: load balancing.

Source: Cilium 1.17, cilium-dbg/cmd/{service,lrp}*.go.
"""

import http
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from hive.dbg.go_text import (
    SERVICE,
    Unsigned,
    aligned,
    listed_words,
    model,
    output_option,
    parse_unsigned,
    printed,
    socket_text,
    tcp_address,
)
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail, ask_status

_DEPRECATED: Final = "Deprecation warning: --id parameter will change from int to string in v1.14"


@click.group(cls=Group)
def service() -> None:
    """Manage services & loadbalancers"""


@service.command("list")
@click.option("--clustermesh-affinity", is_flag=True, help="Print clustermesh affinity if available")
@output_option
def list_services(clustermesh_affinity: bool, output: str) -> None:
    """List services"""
    found = ask_or_fail("Cannot get services list", "GET /service")
    if output:
        click.echo(printed(model(found, SERVICE), output, "[cells.api.models.node:ServiceModel]"))
    else:
        click.echo(service_table(found, affinity=clustermesh_affinity), nl=False)


def service_table(services: list[dict[str, Any]], *, affinity: bool = False) -> str:
    """Return the frontends by number, with a line for each backend."""
    rows = []
    for one in services:
        if realized := (one.get("status") or {}).get("realized"):
            rows.append((realized, (one.get("spec") or realized).get("flags") or {}))
        else:
            click.echo("error parsing svc: empty state", nl=False, err=True)
    lines = ["ID\tFrontend\tService Type\tBackend\t"]
    for one, flags in sorted(rows, key=lambda row: row[0].get("id", 0)):
        frontend = one.get("frontend-address") or {}
        kind = flags.get("type", "") + (" (Remote)" if flags.get("cluster") else "")
        scope = "/i" if frontend.get("scope") == "internal" else ""
        address = socket_text(frontend.get("ip", ""), frontend.get("port", 0)) + scope
        backends = [
            f"{number} => {socket_text(each.get('ip', ''), each.get('port', 0))}"
            f" ({each.get('state', '')}){' (preferred)' if affinity and each.get('preferred') else ''}"
            for number, each in enumerate(one.get("backend-addresses") or (), 1)
        ]
        first, *others = backends or [""]
        lines.append(f"{one.get('id', 0)}\t{address}\t{kind}\t{first}\t")
        lines.extend(f"\t\t\t{text}\t" for text in others)
    return aligned("\n".join(lines) + "\n")


@service.command("get")
@needed("number", "Missing service id argument\n")
@output_option
def get_service(number: str, output: str) -> None:
    """Display service information"""
    found = ask_or_fail(f"Cannot get service '{number}'", "GET /service/{id}", id=_number(number))
    if not (found.get("status") or {}).get("realized"):
        raise click.ClickException(f"Cannot get service '{number}': empty response\n")
    text = (
        printed(model(found, SERVICE), output, "cells.api.models.node:ServiceModel")
        if output
        else service_table([found])
    )
    click.echo(text, nl=bool(output))


def _number(text: str) -> str:
    if not text.isdigit():
        raise click.ClickException(f"Unable to parse service ID: {text}")
    return text


@service.command("delete")
@click.argument("number", required=False)
@click.option("--all", "delete_all", is_flag=True, help="Delete all services")
def delete_service(number: str | None, delete_all: bool) -> None:
    """Delete a service"""
    if delete_all:
        for one in _all_services():
            realized = (one.get("status") or {}).get("realized")
            if realized is None:
                click.echo(
                    'level=error msg="Skipping service due to empty state" subsys=cilium-dbg', err=True
                )
                continue
            found = realized.get("id", 0)
            try:
                ask("DELETE /service/{id}", id=str(found))
            except RequestFailedError as error:
                reason = f"error={json.dumps(str(error))} serviceID={found}"
                click.echo(f'level=error msg="Cannot delete service" {reason} subsys=cilium-dbg', err=True)
        return
    click.echo(_DEPRECATED)
    if not number:
        raise click.ClickException("Missing service id argument\n")
    if not re.fullmatch(r"[+-]?[0-9]+", number):
        raise click.ClickException(f"strconv.ParseInt: parsing {json.dumps(number)}: invalid syntax")
    found = str(int(number))
    try:
        ask("DELETE /service/{id}", id=found)
    except RequestFailedError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Service {found} deleted successfully")


def _all_services() -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = ask("GET /service")
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get list of services: {error}") from error
    return found


@service.command("update")
@click.option("--id", "number", type=Unsigned((1 << 64) - 1), default=0, help="Identifier")
@click.option("--frontend", default="", help="Frontend address")
@click.option("--backends", multiple=True, help="Backend address or addresses (<IP:Port>)")
@click.option(
    "--backend-weights",
    multiple=True,
    help="Backend weights (100 default, 0 means maintenance state, only for maglev mode)",
)
@click.option(
    "--states", multiple=True, help="Backend state(s) as {active(default),terminating,quarantined,...}"
)
@click.option("--protocol", default="tcp", help="Protocol for service (e.g. TCP, UDP)")
@click.option("--k8s-node-port", is_flag=True, help="Set service as a k8s NodePort")
@click.option("--k8s-external", is_flag=True, help="Set service as a k8s ExternalIPs")
@click.option("--k8s-host-port", is_flag=True, help="Set service as a k8s HostPort")
@click.option("--k8s-load-balancer", is_flag=True, help="Set service as a k8s LoadBalancer")
@click.option("--k8s-cluster-internal", is_flag=True, help="Set service as cluster-internal")
@click.option("--k8s-ext-traffic-policy", default="Cluster", help="Set the externalTrafficPolicy")
@click.option("--k8s-int-traffic-policy", default="Cluster", help="Set the internalTrafficPolicy")
@click.option("--local-redirect", is_flag=True, help="Set service as Local Redirect")
def update_service(
    number: int,
    frontend: str,
    backends: tuple[str, ...],
    backend_weights: tuple[str, ...],
    states: tuple[str, ...],
    protocol: str,
    k8s_node_port: bool,
    k8s_external: bool,
    k8s_host_port: bool,
    k8s_load_balancer: bool,
    k8s_cluster_internal: bool,
    k8s_ext_traffic_policy: str,
    k8s_int_traffic_policy: str,
    local_redirect: bool,
) -> None:
    """Update a service"""
    weights = [_weight(text) for text in listed_words(backend_weights)]
    addresses, words = listed_words(backends), listed_words(states)
    click.echo(_DEPRECATED)
    spec: dict[str, Any] = {"id": number} if number else {}
    spec["frontend-address"] = {
        **_frontend_address(frontend),
        "protocol": protocol.lower(),
        "scope": "internal" if k8s_cluster_internal else "external",
    }
    of_all_services = not number and not frontend and bool(addresses)
    _announce_update(number, of_all_services=of_all_services, states=words)
    kinds = {
        "NodePort": k8s_node_port,
        "ExternalIPs": k8s_external,
        "HostPort": k8s_host_port,
        "LoadBalancer": k8s_load_balancer,
        "LocalRedirect": local_redirect,
    }
    chosen = [kind for kind, wanted in kinds.items() if wanted] or ["ClusterIP"]
    if len(chosen) > 1:
        raise click.ClickException(
            "Can only set one of --k8s-external, --k8s-node-port, --k8s-load-balancer, --k8s-host-port, "
            "--local-redirect for a service"
        )
    outside, inside = map(_traffic_policy, (k8s_ext_traffic_policy, k8s_int_traffic_policy))
    spec["flags"] = {
        "type": chosen[0],
        "trafficPolicy": outside,
        "extTrafficPolicy": outside,
        "intTrafficPolicy": inside,
    }
    if not addresses:
        click.echo("Reading backend list from stdin...")
        addresses = sys.stdin.read().splitlines()
    if weights:
        _check_weights(weights, addresses)
    found = _requested_backends(addresses, words, weights)
    if not of_all_services and not spec["frontend-address"].get("port"):
        for text, one in zip(addresses, found, strict=True):
            if one.get("port"):
                raise click.ClickException(f"L4 backend found ({text}) with L3 frontend")
    if found:
        spec["backend-addresses"] = found
    if of_all_services:
        spec["updateServices"] = True
    try:
        created = ask_status("PUT /service/{id}", id=str(number), body=spec) == http.HTTPStatus.CREATED
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot add/update service: {error}") from error
    click.echo(f"{'Added' if created else 'Updated'} service with {len(found)} backends")


def _announce_update(number: int, *, of_all_services: bool, states: Sequence[str]) -> None:
    """Print what is updated: states of backends in all services, a service, or a new one."""
    try:
        known = ask("GET /service/{id}", id=str(number))
    except RequestFailedError:
        known = None
    if of_all_services:
        if not states:
            raise click.ClickException("Cannot update empty backend states")
        click.echo("Updating backend states ")
    elif known is None:
        click.echo(f"Creating new service with id '{number}'")
    elif not (known.get("status") or {}).get("realized"):
        raise click.ClickException(f"Cannot update service {number}: empty state")
    else:
        click.echo(f"Updating existing service with id '{number}'")


def _traffic_policy(text: str) -> str:
    return "Local" if text.lower() == "local" else "Cluster"


def _weight(text: str) -> int:
    try:
        return parse_unsigned(text, (1 << 64) - 1)
    except ValueError as error:
        raise click.UsageError(f'invalid argument "{text}" for "--backend-weights" flag: {error}') from error


def _check_weights(weights: Sequence[int], backends: Sequence[str]) -> None:
    """Raise click.ClickException unless the agent is a mere load balancer, and each backend has a weight."""
    failure = "Unable to retrieve cilium configuration"
    try:
        status = ask("GET /config").get("status")
    except RequestFailedError as error:
        raise click.ClickException(f"{failure}: {error}") from error
    if status is None:
        raise click.ClickException(f"{failure}: empty response")
    if status.get("datapathMode") != "lb-only":
        raise click.ClickException("Backend weights are supported currently only in lb-only mode")
    if len(weights) != len(backends):
        raise click.ClickException("Mismatch between number of backend weights and number of backends")


_STATES: Final = frozenset({"", "active", "terminating", "quarantined", "maintenance"})


def _requested_backends(
    backends: Sequence[str], states: Sequence[str], weights: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the models of backends; a single state is that of all. Raises click.ClickException."""
    if len(states) == 1 and states[0].lower() not in _STATES:
        raise click.ClickException(f"Invalid backend state ({states[0]})")
    if len(states) not in {0, 1, len(backends)}:
        given, having = " ".join(states), " ".join(backends)
        raise click.ClickException(f"Invalid number of backend states ([{given}]) for backends ([{having}])")
    found = []
    for number, text in enumerate(backends):
        try:
            ip, port = tcp_address(text)
        except ValueError as error:
            raise click.ClickException(f'Cannot parse backend address "{text}": {error}') from error
        state = states[number] if number < len(states) else states[0] if states else "active"
        if state.lower() not in _STATES:
            raise click.ClickException(f"Invalid backend state ({state}) for backend ({text})")
        weight = weights[number] & 0xFFFF if weights else 100
        one = {"ip": ip, **({"port": port} if port else {}), **({"state": state} if state else {})}
        found.append({**one, "weight": weight})
    return found


def _frontend_address(text: str) -> dict[str, Any]:
    try:
        ip, port = tcp_address(text)
    except ValueError as error:
        raise click.ClickException(f"Unable to parse frontend address: {error}\n") from error
    return {"ip": ip, **({"port": port} if port else {})}


@click.group(cls=Group)
def lrp() -> None:
    """Manage local redirect policies"""


@lrp.command("list")
@output_option
def list_redirects(output: str) -> None:
    """List local redirect policies"""
    found = ask_or_fail("Cannot get lrp list", "GET /lrp")
    if output:
        click.echo(printed(model(found), output))
        return
    lines = ["LRP namespace\tLRP name\tFrontendType\tMatching Service"]
    for one in found:
        keys = ("namespace", "name", "frontend-type", "service-id")
        lines.append("\t".join(one.get(key, "") for key in keys))
        for mapping in one.get("frontend-mappings") or ():
            frontend = mapping.get("frontend-address") or {}
            address = f"{frontend.get('ip', '')}:{frontend.get('port', 0)}"
            backends = "".join(f"{_backend(each)}, " for each in mapping.get("backends") or ())
            lines.append(f"\t|\t{address}/{frontend.get('protocol', '')} -> {backends}")
    click.echo(aligned("\n".join(lines)))


def _backend(one: dict[str, Any]) -> str:
    address = one.get("backend-address") or {}
    return f"{address.get('ip', '')}:{address.get('port', 0)}({one.get('pod-id', '')})"


COMMANDS: Final = {"service": service, "lrp": lrp}
