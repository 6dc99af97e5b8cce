"""Host ports of pods as frontends.

Source: core/v1 ContainerPort. Ports of the NodePort range are left to NodePort services. A hostIP is an
address of the node: who may create pods must not take another host's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address

from cells.kubernetes import ContainerPort, Pod
from cells.services.model.options import LoadBalancerOptions, Node
from cells.services.model.reserved import plain
from cells.services.model.types import (
    ANY_PROTOCOL,
    PROTOCOLS,
    Address,
    Backend,
    Frontend,
    FrontendKey,
    IPAddress,
    ServiceName,
    ServiceType,
    is_wildcard,
    parse_address,
)

WILDCARDS: Mapping[int, IPAddress] = {4: IPv4Address(0), 6: IPv6Address(0)}


def host_port_frontends(pod: Pod, node: Node, options: LoadBalancerOptions) -> list[Frontend]:
    """The frontends of a pod's host ports on this node; of two for one address the later."""
    if not options.enable_host_port or pod.spec.host_network or pod.finished:
        return []
    found: dict[FrontendKey, Frontend] = {}
    for port in _ports(pod):
        protocol = PROTOCOLS.get(port.protocol.upper())
        if not port.host_port or protocol is None:
            continue
        if options.node_port_min <= port.host_port <= options.node_port_max:
            continue
        for frontend in _frontends(pod, port, protocol if options.bpf_lb_proto_diff else ANY_PROTOCOL, node):
            if options.serves(frontend.key.address.ip):
                found[frontend.key] = frontend
    return list(found.values())


def foreign_host_ips(pod: Pod, own: Collection[IPAddress], options: LoadBalancerOptions) -> list[IPAddress]:
    """The addresses that a pod's host ports ask for, and that are not the node's ``own``."""
    if not options.enable_host_port or pod.spec.host_network or pod.finished:
        return []
    given = {parse_address(port.host_ip): None for port in _ports(pod) if port.host_port}
    return [
        ip for ip in given if ip is not None and not (is_wildcard(ip) or ip.is_loopback or plain(ip) in own)
    ]


def _frontends(pod: Pod, port: ContainerPort, protocol: int, node: Node) -> Iterator[Frontend]:
    given = parse_address(port.host_ip)
    loopback = given is not None and given.is_loopback
    addresses: list[IPAddress]
    if given is None or is_wildcard(given):
        addresses = [*node.node_port_addresses, *WILDCARDS.values()]
    else:
        addresses = [WILDCARDS[given.version]] if loopback else [given]
    parsed = map(parse_address, pod.addresses)
    own_addresses = [address for address in parsed if address is not None]
    pods = {address.version: address for address in reversed(own_addresses)}
    for address in addresses:
        own = pods.get(address.version)
        if own is None:
            continue
        yield Frontend(
            key=FrontendKey(Address(address, port.host_port, protocol)),
            type=ServiceType.HOST_PORT,
            service=ServiceName(pod.namespace, f"{pod.name}/host-port/{port.host_port}"),
            backends=(Backend(Address(own, port.container_port, protocol), weight=0),),
            loopback=loopback,
            routable=not is_wildcard(address),
        )


def _ports(pod: Pod) -> Iterator[ContainerPort]:
    """The ports of all containers."""
    for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        yield from container.ports or ()
