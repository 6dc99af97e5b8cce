"""Which addresses no service may have outside, and no policy may redirect: those of the cluster itself, and
of no host at all.

Who may write Services may put any address into externalIPs (CVE-2020-8554). An address that the cluster uses
would draw its traffic away from it. Load balancers' addresses come from controllers, as users cannot write a
status: those may be a node's (the class ``io.cilium/node``) or one that they share with the API server. Local
redirect policies are of a namespace, and take no cluster address of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, NamedTuple

import msgspec

from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, NodeIP
from cells.kubernetes.objects.core import SERVICE_TYPES, Pod, Service, ServicePort
from cells.services import (
    PROTOCOLS,
    Frontend,
    IPAddress,
    LoadBalancerOptions,
    ServiceName,
    ServiceType,
    is_port,
    parse_address,
    parse_prefix,
)

__all__ = [
    "EXTERNAL_IPS",
    "HOST_IP",
    "INGRESS",
    "Holder",
    "RefusedAddress",
    "Reservation",
    "ReservedAddresses",
    "cluster_reservations",
    "is_special",
    "node_reservations",
    "pod_reservations",
    "unserved_of",
]


IPNetwork = IPv4Network | IPv6Network

SPECIAL: Final[tuple[IPNetwork, ...]] = tuple(
    map(
        ip_network,
        ("0.0.0.0", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "::", "::1", "fe80::/10", "ff00::/8"),
    )
)
"""Unspecified, loopback, link-local and multicast: what Kubernetes refuses as an endpoint's address, too."""

EXTERNAL_IPS, INGRESS = "externalIPs", "status.loadBalancer.ingress"
"""The fields of a Service that have addresses outside."""
HOST_IP: Final = "hostIP"
"""The field of a pod's port that has an address of the node."""
FOREIGN_HOST_IP: Final = "is not an address of this node's devices"
SPECIAL_ADDRESS: Final = "is loopback, link-local, multicast or unspecified"

_OUTSIDE: Final = (ServiceType.EXTERNAL_IPS, ServiceType.LOAD_BALANCER)


class Holder(Enum):
    """What kind of address it is; the first that holds an address counts."""

    CLUSTER_IP = 1
    ROUTER = 2
    NODE = 3
    SYSTEM = 4
    """An endpoint of the API server or of the cluster's DNS."""
    POD = 5


class Reservation(NamedTuple):
    """An address or a range, and its use in words."""

    what: IPAddress | IPNetwork
    holder: Holder
    use: str
    namespace: str = ""
    """Of the service whose cluster address it is."""


class RefusedAddress(msgspec.Struct, frozen=True):
    """An address that a service, or a host port of a pod, asks for and does not get."""

    service: ServiceName
    """Of a pod ``pod/NAME``, which no service is called."""
    address: IPAddress
    part: str
    """The field of the object."""
    reason: str
    announced_only: bool = False
    """Whether it would not be served anyway, and is refused to be announced: by BGP, or on the network."""

    @property
    def outcome(self) -> str:
        """What becomes of it, in words."""
        return "not announced" if self.announced_only else "not served"

    @property
    def object_name(self) -> str:
        """Namespace and name of the Service or Pod."""
        return f"{self.service.namespace}/{self.service.name.removeprefix('pod/')}"


class ReservedAddresses:
    """Addresses and ranges in use, by the object that has them."""

    def __init__(self) -> None:
        self._by_object: dict[str, frozenset[Reservation]] = {}
        self._held: dict[IPAddress | IPNetwork, dict[Reservation, int]] = {}
        self._lengths: dict[int, dict[int, int]] = {4: {}, 6: {}}
        """How many ranges have each length, by family: an address is looked up once for each."""

    def replace(self, name: str, reservations: Iterable[Reservation]) -> frozenset[IPAddress | IPNetwork]:
        """An object has these and no others; returns the addresses and ranges that changed."""
        reservations = frozenset(
            each if isinstance(each.what, IPv4Network | IPv6Network) else each._replace(what=plain(each.what))
            for each in reservations
        )
        before = self._by_object.get(name, frozenset())
        if reservations == before:
            return frozenset()
        if reservations:
            self._by_object[name] = reservations
        else:
            del self._by_object[name]
        for each in before - reservations:
            self._count(each, -1)
        for each in reservations - before:
            self._count(each, 1)
        return frozenset(each.what for each in before ^ reservations)

    def _count(self, one: Reservation, step: int) -> None:
        held = self._held.setdefault(one.what, {})
        held[one] = held.get(one, 0) + step
        if not held[one]:
            del held[one]
        if not held:
            del self._held[one.what]
        if isinstance(one.what, IPv4Network | IPv6Network):
            lengths = self._lengths[one.what.version]
            lengths[one.what.prefixlen] = lengths.get(one.what.prefixlen, 0) + step
            if not lengths[one.what.prefixlen]:
                del lengths[one.what.prefixlen]

    def serves(self, frontend: Frontend, options: LoadBalancerOptions) -> bool:
        """Whether its service may have the frontend's address."""
        ip, type_ = frontend.key.address.ip, frontend.type
        return type_ not in _OUTSIDE or not self.refusal(ip, type_, options)

    def refusal(self, ip: IPAddress, type_: ServiceType, options: LoadBalancerOptions) -> str:
        """Why no service may have the address for such a frontend; empty where one may."""
        address = plain(ip)
        if is_special(address):
            return SPECIAL_ADDRESS
        found = sorted(set(self._of(address)), key=lambda one: (one.holder.value, one.use))
        of_node = any(one.holder is Holder.NODE for one in found)
        for one in found:
            if one.holder is Holder.NODE or (one.holder is Holder.POD and of_node):
                if type_ is ServiceType.LOAD_BALANCER or options.enable_external_ips_of_nodes:
                    continue
            elif one.holder is Holder.SYSTEM and type_ is ServiceType.LOAD_BALANCER:
                continue
            return f"is {one.use}"
        return ""

    def redirect_refusal(self, ip: IPAddress, namespace: str) -> str:
        """Why no policy of the namespace may redirect the address; empty where one may.

        Addresses outside and link-local ones, such as those of metadata and DNS servers, may be redirected,
        and cluster addresses of the namespace's own services.
        """
        address = plain(ip)
        if is_special(address) and not address.is_link_local:
            return "is loopback, multicast or unspecified"
        found = sorted(set(self._of(address)), key=lambda one: (one.holder.value, one.use))
        for one in found:
            if one.holder is not Holder.CLUSTER_IP or one.namespace != namespace:
                return f"is {one.use}"
        return ""

    def _of(self, ip: IPAddress) -> Iterator[Reservation]:
        yield from self._held.get(ip, ())
        bits = ip.max_prefixlen
        network = IPv4Network if ip.version == 4 else IPv6Network
        for length in self._lengths[ip.version]:
            shift = bits - length
            yield from self._held.get(network((int(ip) >> shift << shift, length)), ())


def node_reservations(
    name: str, addresses: Iterable[NodeIP], ranges: Iterable[IPNetwork]
) -> Iterator[Reservation]:
    """A node's addresses, and the ranges of its pods."""
    for each in addresses:
        if each.type == CILIUM_INTERNAL_IP:
            yield Reservation(each.ip, Holder.ROUTER, f"the router's address of node {name}")
        else:
            yield Reservation(each.ip, Holder.NODE, f"an address of node {name}")
    for cidr in ranges:
        yield Reservation(cidr, Holder.POD, f"in {cidr}, the pods' range of node {name}")


def pod_reservations(pod: Pod) -> Iterator[Reservation]:
    """A pod's addresses. Those in the node's network have the node's."""
    if pod.spec.host_network or pod.finished:
        return
    for ip in map(parse_address, pod.addresses):
        if ip is not None:
            yield Reservation(ip, Holder.POD, f"the address of pod {pod.namespace}/{pod.name}")


def plain(ip: IPAddress) -> IPAddress:
    """The address itself; of an IPv4 address that is written as IPv6, the IPv4 address."""
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def is_special(ip: IPAddress) -> bool:
    """Whether it is no host's that others could ask."""
    address = plain(ip)
    return any(address in network for network in SPECIAL if network.version == address.version)


def outside_addresses(
    service: Service, options: LoadBalancerOptions
) -> Iterator[tuple[ServiceType, str, IPAddress, bool]]:
    """The addresses at which clients outside are to reach it, with the field they are in, and whether it is
    served there. Where it is not, as a headless one, it may still be announced."""
    served = service.spec.type != "ExternalName" and service.spec.cluster_ip != "None"
    for each in service.status.load_balancer.ingress or ():
        ip = parse_address(each.ip) if each.is_of_nodes else None
        if ip is not None:
            yield ServiceType.LOAD_BALANCER, INGRESS, ip, served and options.enable_node_port
    for text in service.spec.external_ips or ():
        ip = parse_address(text)
        if ip is not None:
            yield ServiceType.EXTERNAL_IPS, EXTERNAL_IPS, ip, served and options.enable_external_ips


def cluster_reservations(service: Service) -> frozenset[Reservation]:
    """The cluster addresses of a service, served here or not."""
    spec = service.spec
    use = f"the cluster address of {service.metadata.namespace}/{service.metadata.name}"
    parsed = [parse_address(text) for text in (*(spec.cluster_ips or ()), spec.cluster_ip or "")]
    of = service.metadata.namespace
    return frozenset(Reservation(ip, Holder.CLUSTER_IP, use, of) for ip in parsed if ip is not None)


# What a service's spec asks for and does not get: for the log, since nothing else would tell.


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
