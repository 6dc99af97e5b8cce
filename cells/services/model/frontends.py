"""A Service to the addresses it is served at.

Source: core/v1 ServiceSpec; KEP-1860 (ipMode), KEP-2086 (internal traffic policy).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address

from cells.kubernetes import Service, ServicePort
from cells.services.model.annotations import is_exposed, wishes_of
from cells.services.model.backends import Backends
from cells.services.model.options import LoadBalancerOptions, Node
from cells.services.model.reserved import is_special
from cells.services.model.types import (
    ANY_PROTOCOL,
    EXTERNAL,
    INTERNAL,
    PROTOCOLS,
    Address,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    IPAddress,
    ServiceName,
    ServiceType,
    is_port,
    parse_address,
    parse_prefix,
)

DEFAULT_AFFINITY_TIMEOUT = 10800
LONGEST_AFFINITY_TIMEOUT = 86400
HEADLESS = "None"
LOCAL = "Local"
NOBODY = ("0.0.0.0/32",)
"""A range that no client is in, of either family."""
WILDCARDS: dict[int, IPAddress] = {4: IPv4Address(0), 6: IPv6Address(0)}


def frontends_of(
    service: Service, backends: Backends, node: Node, options: LoadBalancerOptions
) -> list[Frontend]:
    """The frontends of a service on this node, with their backends.

    None for a headless or external-name service, and for one that is exposed on other nodes only.
    """
    if service.spec.type == "ExternalName" or is_headless(service):
        return []
    if not is_exposed(service, node):
        return []
    return list(_Conversion(service, backends, node, options).frontends())


def is_headless(service: Service) -> bool:
    """Whether it has no address: its name stands for its backends'."""
    return service.spec.cluster_ip == HEADLESS


class _Conversion:
    """One service, on one node, at one moment."""

    def __init__(
        self, service: Service, backends: Backends, node: Node, options: LoadBalancerOptions
    ) -> None:
        self._service = service
        self._spec = service.spec
        self._name = ServiceName(service.metadata.namespace, service.metadata.name)
        self._backends = backends
        self._node = node
        self._options = options
        self._wishes = wishes_of(service, options)
        self._ext_local = self._spec.external_traffic_policy == LOCAL
        self._int_local = (
            options.enable_internal_traffic_policy and self._spec.internal_traffic_policy == LOCAL
        )

    def frontends(self) -> Iterator[Frontend]:
        """Cluster addresses, load balancer addresses, external addresses, node ports, in this order."""
        spec, options = self._spec, self._options
        cluster_ips = self._addresses(spec.cluster_ips or ((spec.cluster_ip,) if spec.cluster_ip else ()))
        ports = self._unique_ports()
        if self._wants(ServiceType.CLUSTER_IP):
            yield from self._at(cluster_ips, ports, ServiceType.CLUSTER_IP)
        if options.enable_node_port and self._wants(ServiceType.LOAD_BALANCER):
            yield from self._at(self._ingress(), ports, ServiceType.LOAD_BALANCER)
        if options.enable_external_ips:
            yield from self._at(self._addresses(spec.external_ips or ()), ports, ServiceType.EXTERNAL_IPS)
        node_ports = options.enable_node_port and self._wants(ServiceType.NODE_PORT)
        if node_ports and spec.type in ("NodePort", "LoadBalancer"):
            families = {address.version for address in cluster_ips}
            nodes = [WILDCARDS[version] for version in sorted(families)]
            nodes += [one for one in self._node.node_port_addresses if one.version in families]
            for port in ports:
                if port.node_port:
                    yield from self._at(nodes, [port], ServiceType.NODE_PORT)

    def _ingress(self) -> list[IPAddress]:
        """Addresses of load balancers; what is sent to a proxy goes there."""
        every = self._service.status.load_balancer.ingress or ()
        return self._addresses([one.ip for one in every if one.is_of_nodes])

    def _wants(self, type_: ServiceType) -> bool:
        """Whether the service is to have such frontends."""
        return type_.text in self._wishes.types

    def _direct(self, protocol: int) -> bool:
        """Whether its backends on other nodes answer clients outside themselves, where it may say so."""
        if not self._options.bpf_lb_mode_annotation:
            return False
        mode = self._wishes.forwarding or self._options.bpf_lb_mode
        return mode == "dsr" or (mode == "hybrid" and protocol != PROTOCOLS["UDP"])

    def _unique_ports(self) -> list[ServicePort]:
        """The ports, each number once for a protocol, or once at all where protocols are not told apart."""
        found: dict[tuple[int, str], ServicePort] = {}
        for port in self._spec.ports or ():
            protocol = port.protocol if self._options.bpf_lb_proto_diff else ""
            found.setdefault((port.port, protocol), port)
        return list(found.values())

    def _addresses(self, texts: Iterable[str]) -> list[IPAddress]:
        parsed = [parse_address(text) for text in dict.fromkeys(texts)]
        return [
            one for one in parsed if one is not None and self._options.serves(one) and not is_special(one)
        ]

    def _at(
        self, addresses: Sequence[IPAddress], ports: Sequence[ServicePort], type_: ServiceType
    ) -> Iterator[Frontend]:
        if not addresses:
            return
        two_scopes = self._ext_local != self._int_local and type_ is not ServiceType.CLUSTER_IP
        twins = two_scopes and type_ in (ServiceType.LOAD_BALANCER, ServiceType.NODE_PORT)
        for port in ports:
            number = port.node_port if type_ is ServiceType.NODE_PORT else port.port
            protocol = PROTOCOLS.get(port.protocol) if self._options.bpf_lb_proto_diff else ANY_PROTOCOL
            if protocol is None or not is_port(number):
                continue
            for ip in addresses:
                for scope in (EXTERNAL, INTERNAL) if twins else (EXTERNAL,):
                    key = FrontendKey(Address(ip, number, protocol), scope)
                    yield self._frontend(key, type_, port, two_scopes=two_scopes)

    def _frontend(
        self, key: FrontendKey, type_: ServiceType, port: ServicePort, *, two_scopes: bool
    ) -> Frontend:
        is_cluster_ip = type_ is ServiceType.CLUSTER_IP
        checked = type_ is ServiceType.LOAD_BALANCER or self._options.bpf_lb_source_range_all_types
        ranges = self._source_ranges() if checked else ()
        return Frontend(
            key=key,
            type=type_,
            service=self._name,
            backends=self._selected(key, type_, port),
            ext_local=self._ext_local,
            int_local=self._int_local,
            two_scopes=two_scopes,
            affinity_timeout=self._affinity_timeout(),
            source_ranges=ranges,
            algorithm=self._wishes.algorithm if not is_cluster_ip else "",
            direct=self._direct(key.address.protocol)
            and not (is_cluster_ip and not self._options.bpf_lb_external_clusterip),
            source_ranges_deny=bool(ranges) and self._wishes.deny,
            health_check_node_port=self._health_check_port(type_),
            routable=not key.address.is_wildcard
            and (not is_cluster_ip or self._options.bpf_lb_external_clusterip),
            port_name=port.name,
        )

    def _source_ranges(self) -> tuple[str, ...]:
        """Whom it is served to, or with the annotation not. Of ranges that all are unreadable, nobody."""
        given = self._spec.load_balancer_source_ranges
        if not given or not self._options.enable_svc_source_range_check:
            return ()
        ranges = {str(one) for one in map(parse_prefix, given) if one}
        return tuple(sorted(ranges)) or (() if self._wishes.deny else NOBODY)

    def _health_check_port(self, type_: ServiceType) -> int:
        served = type_ in (ServiceType.LOAD_BALANCER, ServiceType.NODE_PORT)
        return self._spec.health_check_node_port if served and self._ext_local else 0

    def _affinity_timeout(self) -> int:
        if self._spec.session_affinity != "ClientIP":
            return 0
        config = self._spec.session_affinity_config
        client_ip = config.client_ip if config is not None else None
        if client_ip is None:
            return DEFAULT_AFFINITY_TIMEOUT
        return min(max(client_ip.timeout_seconds, 1), LONGEST_AFFINITY_TIMEOUT)

    def _selected(self, key: FrontendKey, type_: ServiceType, port: ServicePort) -> tuple[Backend, ...]:
        """The backends of the frontend's family that its traffic policy and zone leave."""
        backends = self._in_zone(self._of_family(port.name, key.address.version))
        if type_ is ServiceType.CLUSTER_IP or key.scope == INTERNAL:
            local = self._int_local
        else:
            local = self._ext_local
        if local:
            return tuple([one for one in backends if one.node in ("", self._node.name)])
        return backends

    def _of_family(self, port_name: str, version: int) -> tuple[Backend, ...]:
        """They are in the order of their addresses, so the ends tell whether all are of one."""
        backends = self._backends.get(port_name, ())
        if backends and backends[0].address.version == version == backends[-1].address.version:
            return backends
        return tuple([one for one in backends if one.address.version == version])

    def _in_zone(self, backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        """Those hinted for our zone, all where hints cannot decide."""
        zone = self._node.zone
        if not self._options.enable_service_topology or not zone or self._ext_local or self._int_local:
            return backends
        every = [one for group in self._backends.values() for one in group]
        if any(one.hinted_zones is None for one in every):
            return backends
        return tuple([one for one in backends if zone in (one.hinted_zones or ())]) or backends


def selectable(backends: Sequence[Backend]) -> tuple[list[Backend], list[Backend]]:
    """The backends that new connections may go to, and the others.

    Active ones; of those the preferred, if there are any. Where none is active, terminating ones serve on.
    """
    active = [one for one in backends if one.state is BackendState.ACTIVE]
    if len(active) == len(backends):
        return active, []
    if not active:
        active = [one for one in backends if one.state is BackendState.TERMINATING]
    chosen = set(map(id, active))
    return active, [one for one in backends if id(one) not in chosen]


def seen_inside(frontends: Sequence[Frontend]) -> list[Frontend]:
    """The frontends as clients in the cluster see them: of an address with two scopes the internal one."""
    internal = {one.key.address for one in frontends if one.key.scope == INTERNAL}
    return [one for one in frontends if one.key.scope == INTERNAL or one.key.address not in internal]


def backends_by_port(backends: Backends) -> Iterator[tuple[str, int, int, list[Backend]]]:
    """The backends that clients of a headless service get, by name, number and protocol of their port."""
    for name, some in backends.items():
        found: dict[tuple[int, int], list[Backend]] = {}
        for one in selectable(some)[0]:
            found.setdefault((one.address.port, one.address.protocol), []).append(one)
        for (port, protocol), meant in found.items():
            yield name, port, protocol, meant
