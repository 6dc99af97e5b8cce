"""What a service's spec asks for and does not get: for the log, since nothing else would tell.

Gives: unserved_of.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.kubernetes import SERVICE_TYPES, Service, ServicePort
from cells.services.model.options import LoadBalancerOptions
from cells.services.model.reserved import SPECIAL_ADDRESS, is_special
from cells.services.model.types import PROTOCOLS, is_port, parse_address, parse_prefix


def unserved_of(service: Service, options: LoadBalancerOptions) -> Iterator[tuple[str, str]]:
    """Parts of the spec that are not served, with the reason."""
    spec = service.spec
    if spec.type == "ExternalName" or spec.cluster_ip == "None":
        return
    if spec.type and spec.type not in SERVICE_TYPES:
        yield "type", f"{spec.type!r}: expected one of {', '.join(SERVICE_TYPES)}: served as ClusterIP"
    for name, texts in (("clusterIPs", spec.cluster_ips), ("externalIPs", spec.external_ips)):
        yield from ((name, reason) for text in texts or () for reason in _faults_in_address(name, text))
    for text in spec.load_balancer_source_ranges or ():
        if parse_prefix(text) is None:
            yield "loadBalancerSourceRanges", f"{text!r}: expected an IP network: left out"
    first: dict[int, ServicePort] = {}
    for port in spec.ports or ():
        served = first.setdefault(port.port, port)
        if not options.bpf_lb_proto_diff and _leads_to(port) != _leads_to(served):
            what = f"bpf-lb-proto-diff is off: {port.protocol} is served as {served.protocol} is"
            yield f"port {port.port}", f"{what}, by its target"
        yield from ((f"port {port.port}", reason) for reason in _faults(port, options))


def _faults_in_address(name: str, text: str) -> Iterator[str]:
    """Special addresses outside are reported with all others that no service may have."""
    parsed = parse_address(text)
    if text and parsed is None:
        yield f"{text!r}: expected an IP address"
    elif parsed is not None and name == "clusterIPs" and is_special(parsed):
        yield f"{text}: {SPECIAL_ADDRESS}"


def _leads_to(port: ServicePort) -> tuple[int | str, int]:
    return port.target_port or port.port, port.node_port


def _faults(port: ServicePort, options: LoadBalancerOptions) -> Iterator[str]:
    if port.protocol not in PROTOCOLS:
        yield f"{port.protocol!r}: expected TCP, UDP or SCTP"
    elif not is_port(port.port) or not (is_port(port.node_port) or port.node_port == 0):
        yield f"{port.node_port if is_port(port.port) else port.port}: expected a port, 1 to 65535"
    elif port.protocol == "SCTP":
        yield from _faults_in_sctp(port, options)


def _faults_in_sctp(port: ServicePort, options: LoadBalancerOptions) -> Iterator[str]:
    """Its checksum is over the whole packet, so ports are not translated. A named target may be any."""
    if not options.enable_sctp:
        yield "enable-sctp is off: SCTP is dropped"
        return
    target = 0 if isinstance(port.target_port, str) else port.target_port or port.port
    for number in (port.port, port.node_port if options.enable_node_port else 0):
        if target and number and number != target:
            yield f"{number}: SCTP keeps its port, and the target's is {target}: expected one number"
