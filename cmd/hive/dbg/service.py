"""``cilium-dbg service``, ``lrp``, ``prefilter`` and ``recorder``: load balancing, filters, captures.

Source: Cilium 1.17, cilium-dbg/cmd/{service,lrp,prefilter,recorder}*.go.
"""

from ipaddress import ip_network
from typing import Any, Final

import click

from hive.dbg.go_text import SERVICE, Shape, aligned, model, output_option, printed, socket_text
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail

_DEPRECATED: Final = "Deprecation warning: --id parameter will change from int to string in v1.14"
_RULES: Final[Shape] = {"status": {"realized": {"deny[]": {}}}}


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
            f" ({each.get('state', 'active')}){' (preferred)' if affinity and each.get('preferred') else ''}"
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
        for one in ask("GET /service"):
            _delete(str((one.get("spec") or {}).get("id", 0)))
        return
    if not number:
        raise click.ClickException("Missing service id argument\n")
    click.echo(_DEPRECATED)
    _delete(_number(number))


def _delete(number: str) -> None:
    ask_or_fail(f"Cannot delete service {number}", "DELETE /service/{id}", id=number)
    click.echo(f"Service {number} deleted successfully")


@service.command("update")
@click.option("--id", "number", type=int, default=0, help="Identifier")
@click.option("--frontend", default="", help="Frontend address")
@click.option("--backends", default="", help="Backend address or addresses (<IP:Port>)")
@click.option(
    "--backend-weights", default="", help="Backend weights (100 default, 0 means maintenance state)"
)
@click.option("--states", default="", help="Backend state(s) as {active(default),terminating,...}")
@click.option("--protocol", default="tcp", help="Protocol for service (e.g. TCP, UDP)")
@click.option("--k8s-node-port", is_flag=True, help="Set service as a k8s NodePort")
@click.option("--k8s-external", is_flag=True, help="Set service as a k8s ExternalIPs")
@click.option("--k8s-host-port", is_flag=True, help="Set service as a k8s HostPort")
@click.option("--k8s-load-balancer", is_flag=True, help="Set service as a k8s LoadBalancer")
@click.option(
    "--k8s-cluster-internal", is_flag=True, help="Set service as cluster-internal for externalTrafficPolicy"
)
@click.option(
    "--k8s-ext-traffic-policy", default="Cluster", help="Set service with k8s externalTrafficPolicy"
)
@click.option(
    "--k8s-int-traffic-policy", default="Cluster", help="Set service with k8s internalTrafficPolicy"
)
@click.option("--k8s-traffic-policy", default="Cluster", help="Set service with k8s externalTrafficPolicy")
@click.option("--local-redirect", is_flag=True, help="Set service as Local Redirect")
def update_service(
    number: int,
    frontend: str,
    backends: str,
    backend_weights: str,
    states: str,
    protocol: str,
    k8s_node_port: bool,
    k8s_external: bool,
    k8s_host_port: bool,
    k8s_load_balancer: bool,
    k8s_cluster_internal: bool,
    k8s_ext_traffic_policy: str,
    k8s_int_traffic_policy: str,
    k8s_traffic_policy: str,
    local_redirect: bool,
) -> None:
    """Update a service"""
    kinds = {
        "NodePort": k8s_node_port,
        "ExternalIPs": k8s_external,
        "HostPort": k8s_host_port,
        "LoadBalancer": k8s_load_balancer,
        "LocalRedirect": local_redirect,
    }
    chosen = [kind for kind, wanted in kinds.items() if wanted]
    if len(chosen) > 1:
        raise click.ClickException("Can only set one of --k8s-* and --local-redirect for a service\n")
    click.echo(_DEPRECATED)
    addresses = [_address(text) for text in backends.split(",") if text]
    weights = [_weight(text) for text in backend_weights.split(",") if text] or [100] * len(addresses)
    words = [text for text in states.split(",") if text] or ["active"] * len(addresses)
    if len({len(addresses), len(weights), len(words)}) > 1:
        raise click.ClickException("There must be as many weights and states as backends\n")
    spec = {
        "id": number,
        "frontend-address": {
            **_address(frontend),
            "protocol": protocol.lower(),
            "scope": "internal" if k8s_cluster_internal else "external",
        },
        "backend-addresses": [
            {**address, "state": word, "weight": weight}
            for address, word, weight in zip(addresses, words, weights, strict=True)
        ],
        "flags": {
            "type": chosen[0] if chosen else "ClusterIP",
            "trafficPolicy": k8s_traffic_policy,
            "extTrafficPolicy": k8s_ext_traffic_policy,
            "intTrafficPolicy": k8s_int_traffic_policy,
        },
    }
    try:
        ask("GET /service/{id}", id=str(number))
        click.echo(f"Updating existing service with id '{number}'")
        verb = "Updated"
    except RequestFailedError as error:
        if error.status != 404:
            raise click.ClickException(f"Cannot get service '{number}': {error}\n") from error
        click.echo(f"Creating new service with id '{number}'")
        verb = "Added"
    ask_or_fail("Cannot add/update service", "PUT /service/{id}", id=str(number), body=spec)
    click.echo(f"{verb} service with {len(addresses)} backends")


def _weight(text: str) -> int:
    if not text.isdecimal():
        reason = f'strconv.ParseUint: parsing "{text}": invalid syntax'
        raise click.ClickException(f'invalid argument "{text}" for "--backend-weights" flag: {reason}')
    return int(text)


def _address(text: str) -> dict[str, Any]:
    address, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise click.ClickException(f"Cannot parse address {text!r}: expected ADDRESS:PORT\n")
    return {"ip": address.strip("[]"), "port": int(port)}


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
            address = socket_text(frontend.get("ip", ""), frontend.get("port", 0))
            backends = "".join(f"{_backend(each)}, " for each in mapping.get("backends") or ())
            lines.append(f"\t|\t{address}/{frontend.get('protocol', '')} -> {backends}")
    click.echo(aligned("\n".join(lines)))


def _backend(one: dict[str, Any]) -> str:
    address = one.get("backend-address") or {}
    return f"{socket_text(address.get('ip', ''), address.get('port', 0))}({one.get('pod-id', '')})"


@click.group(cls=Group)
def prefilter() -> None:
    """Manage XDP CIDR filters"""


@prefilter.command("list")
@output_option
def list_prefilters(output: str) -> None:
    """List CIDR filters"""
    found = _filters()
    if output:
        click.echo(printed(model(found, _RULES), output))
        return
    realized = found["status"]["realized"]
    click.echo("\n".join((f"Revision: {realized.get('revision', 0)}", *(realized.get("deny") or ()))))


def _filters() -> Any:
    try:
        found = ask("GET /prefilter")
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get CIDR list: {error}") from error
    if not (found.get("status") or {}).get("realized"):
        raise click.ClickException("Cannot get CIDR list: empty response")
    return found


_revision = click.option("--revision", type=click.IntRange(0), default=0, help="Update revision")


@prefilter.command("update")
@click.option("--cidr", multiple=True, help="List of CIDR prefixes to block")
@_revision
def update_prefilters(cidr: tuple[str, ...], revision: int) -> None:
    """Update CIDR filters"""
    _change_filters("PATCH", cidr, revision)


@prefilter.command("delete")
@click.option("--cidr", multiple=True, help="List of CIDR prefixes to delete")
@_revision
def delete_prefilters(cidr: tuple[str, ...], revision: int) -> None:
    """Delete CIDR filters"""
    _change_filters("DELETE", cidr, revision)


def _is_prefix(text: str) -> bool:
    address, _, bits = text.partition("/")
    try:
        return (
            bits.isdecimal() and "%" not in address and bool(ip_network((address, int(bits)), strict=False))
        )
    except ValueError:
        return False


def _change_filters(method: str, cidr: tuple[str, ...], revision: int) -> None:
    prefixes = [one for text in cidr for one in text.split(",")]
    for prefix in prefixes:
        if not _is_prefix(prefix):
            raise click.ClickException(f'Cannot parse CIDR "{prefix}": invalid CIDR address: {prefix}')
    body = {"deny": prefixes, "revision": revision}
    doing, done = {"PATCH": ("add/update", "Updated"), "DELETE": ("delete", "Deleted")}[method]
    try:
        ask(f"{method} /prefilter", body={key: value for key, value in body.items() if value})
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot {doing} prefilter: {error}") from error
    click.echo(f"{done} {len(prefixes)} prefilter entries")


@click.group(cls=Group)
def recorder() -> None:
    """Introspect or mangle pcap recorder"""


@recorder.command("list")
@output_option
def list_recorders(output: str) -> None:
    """List current pcap recorders"""
    found = _listed("recorder", "GET /recorder")
    click.echo(printed(model(found), output) if output else _recorders(found), nl=bool(output))
    masks = _listed("recorder mask", "GET /recorder/masks")
    click.echo(printed(model(masks), output) if output else _masks(masks))


def _listed(what: str, operation: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = ask(operation)
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get {what} list: {error}") from error
    return found


def _realized(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the realized specifications; report each entry without one on standard error."""
    specs = [(one.get("status") or {}).get("realized") for one in found]
    for spec in specs:
        if spec is None:
            click.echo("error parsing recorder: empty state", err=True, nl=False)
    return [spec for spec in specs if spec is not None]


_HALF: Final = 8
"""Hexadecimal digits of a mask of IPv4."""


def _masks(found: list[dict[str, Any]]) -> str:
    masks = _realized(found)
    masks.sort(key=lambda one: (len(one.get("src-prefix-mask", "")) == _HALF, -one.get("priority", 0)))
    lines = ["Users\tPriority   \tWildcard Masks\t"]
    lines += [
        f"{mask.get('users', 0)}\t{mask.get('priority', 0)}\t{mask.get('src-prefix-mask', '')}:"
        f"{mask.get('src-port-mask', '')}\t->\t{mask.get('dst-prefix-mask', '')}:"
        f"{mask.get('dst-port-mask', '')}\t{mask.get('protocol-mask', '')}"
        for mask in masks
    ]
    return aligned("\n".join(lines))


def _recorders(found: list[dict[str, Any]]) -> str:
    lines = ["ID\tCapture Length\tWildcard Filters\t"]
    for spec in sorted(_realized(found), key=lambda one: one.get("id", 0)):
        length = spec.get("capture-length", 0)
        before = f"{spec.get('id', 0)}\t{f'<= {length}' if length else 'full'}"
        filters = spec.get("filters") or ()
        if not filters:
            lines.append(f"{before}\t(none)")
        for each in filters:
            source = f"{each.get('src-prefix', '')}:{each.get('src-port', '')}"
            destination = f"{each.get('dst-prefix', '')}:{each.get('dst-port', '')}"
            lines.append(f"{before}\t{source}\t->\t{destination}\t{each.get('protocol', '')}")
            before = "\t"
    return aligned("\n".join(lines) + "\n\n")


@recorder.command("get")
@needed("number", "Missing recorder id argument\n")
@output_option
def get_recorder(number: str, output: str) -> None:
    """Display individual pcap recorder"""
    found = ask_or_fail(f"Cannot get recorder '{number}'", "GET /recorder/{id}", id=_number(number))
    click.echo(printed(model(found), output) if output else _recorders([found]), nl=bool(output))


@recorder.command("delete")
@needed("number", "Missing recorder id argument\n")
def delete_recorder(number: str) -> None:
    """Delete individual pcap recorder"""
    ask_or_fail(f"Cannot delete recorder {number}", "DELETE /recorder/{id}", id=_number(number))


@recorder.command("update")
@click.option("--id", "number", type=int, default=0, help="Identifier for the recorder")
@click.option("--caplen", type=int, default=0, help="Capture Length (0 is full capture)")
@click.option(
    "--filters", default="", help="List of filters ('<srcCIDR> <srcPort> <dstCIDR> <dstPort> <proto>')"
)
def update_recorder(number: int, caplen: int, filters: str) -> None:
    """Update individual pcap recorder"""
    keys = ("src-prefix", "src-port", "dst-prefix", "dst-port", "protocol")
    rules = [dict(zip(keys, text.split(), strict=False)) for text in filters.split(",") if text]
    if not rules or any(len(rule) != len(keys) for rule in rules):
        raise click.ClickException(
            f"Invalid filter '{filters}': expected '<srcCIDR> <srcPort> <dstCIDR> ...'\n"
        )
    try:
        ask("GET /recorder/{id}", id=str(number))
        click.echo(f"Updating existing recorder with id '{number}'")
    except RequestFailedError as error:
        if error.status != 404:
            raise click.ClickException(f"Cannot get recorder '{number}': {error}\n") from error
        click.echo(f"Creating new recorder with id '{number}'")
    try:
        ask(
            "PUT /recorder/{id}",
            id=str(number),
            body={"id": number, "capture-length": caplen, "filters": rules},
        )
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot add/update recorder: {error}\n") from error
    click.echo(f"Updated recorder with {len(rules)} filter" + ("s" if len(rules) > 1 else ""))


COMMANDS: Final = {"service": service, "lrp": lrp, "prefilter": prefilter, "recorder": recorder}
