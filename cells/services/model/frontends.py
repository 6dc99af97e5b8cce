"""Computes the frontends of a Service: addresses, ports, scopes, traffic policies and annotations.

``ServiceCatalog`` calls ``frontends_of`` with the service's backends and this node. Pure functions.

Source: core/v1 ServiceSpec; KEP-1860 (ipMode), KEP-2086 (internal traffic policy).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from operator import attrgetter
from typing import Final

import msgspec

from cells.kubernetes.objects.core import Service, ServicePort
from cells.kubernetes.objects.kind import Object, selector_of
from cells.services import (
    ANY_PROTOCOL,
    EXPOSURE_LABEL,
    EXTERNAL,
    FIRST_BYTES_OF_SPECIAL,
    INTERNAL,
    IPV4,
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    IPAddress,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
    ServingNode,
    address_end,
    host_of,
    is_port,
    is_special,
    parse_host,
    parse_prefix,
)
from cells.services.model.backends import Affinity, Backends, addresses_of

__all__ = [
    "affinity_of",
    "faults_of",
    "frontends_of",
    "is_global",
    "is_headless",
    "is_shared",
    "visible_in_cluster",
]


# Annotations of services.
#
# Source: Cilium 1.17, pkg/annotation/k8s.go. An invalid value is reported and ignored.

PREFIX = "service.cilium.io/"
TYPES = PREFIX + "type"
"""The types of a service's frontends, such as ``LoadBalancer`` or ``LoadBalancer,ClusterIP``."""
ALGORITHM = PREFIX + "lb-algorithm"
"""``random`` or ``maglev``, if bpf-lb-algorithm-annotation lets services choose."""
FORWARDING = PREFIX + "forwarding-mode"
"""``dsr`` or ``snat``, if bpf-lb-mode-annotation or bpf-lb-algorithm-annotation lets services choose."""
SOURCE_RANGES = PREFIX + "src-ranges-policy"
"""``deny`` refuses the clients in loadBalancerSourceRanges; ``allow`` refuses all others."""
NODE_SELECTOR = PREFIX + "node-selector"
"""A label selector for the nodes that serve it; takes precedence over EXPOSURE_LABEL."""

GLOBAL = PREFIX + "global"
"""``true``: services with this name in remote clusters contribute backends."""
AFFINITY = PREFIX + "affinity"
"""The preferred backends of a global service: ``local`` or ``remote``."""
SHARED = PREFIX + "shared"
"""Whether remote clusters may use backends of a global service; read by the exporter of services."""

_TYPES = frozenset({"ClusterIP", "NodePort", "LoadBalancer"})
_KEYS = (FORWARDING, ALGORITHM, EXPOSURE_LABEL, NODE_SELECTOR, SOURCE_RANGES, TYPES, GLOBAL, AFFINITY, SHARED)
_ALIASES: Final = {
    GLOBAL: "io.cilium/global-service",
    AFFINITY: "io.cilium/service-affinity",
    SHARED: "io.cilium/shared-service",
}
"""Old names, which count if the new name is absent."""
_NAMES: Final = {alias: name for name, alias in _ALIASES.items()}
_REQUESTS = "requests are not balanced, connections are"
_UNSUPPORTED = {
    PREFIX + "lb-l7": ("enabled", _REQUESTS),
    PREFIX + "lb-l7-algorithm": ("", _REQUESTS),
    PREFIX + "proxy-delegation": ("delegate-if-local", "packets are not handed to a proxy of the node"),
    PREFIX + "global-sync-endpoint-slices": ("true", "slices of remote clusters are not copied"),
    PREFIX + "weight": ("", "it is one of EndpointSlices, and weighs their backends"),
}
"""Unsupported annotations: the value that requests the feature, and what happens instead.

An empty value means any. An annotation that needs a second one is reported with that one.
"""


class ServiceAnnotations(msgspec.Struct, frozen=True, gc=False):
    """The annotations of a service, parsed."""

    types: frozenset[str] = _TYPES
    algorithm: str = ""
    forwarding: str = ""
    deny: bool = False


NOTHING = ServiceAnnotations()


def service_annotations(service: Service, options: LoadBalancerOptions) -> ServiceAnnotations:
    """Parse the annotations; choices that the agent's options do not allow are ignored."""
    given = service.metadata.annotations
    if not given:
        return NOTHING
    algorithm = given.get(ALGORITHM, "").lower() if options.bpf_lb_algorithm_annotation else ""
    forwarding = given.get(FORWARDING, "").lower() if options.bpf_lb_mode_annotation else ""
    return ServiceAnnotations(
        types=_types(given.get(TYPES, "")) or _TYPES,
        algorithm=algorithm if algorithm in {"random", "maglev"} else "",
        forwarding=forwarding if forwarding in {"dsr", "snat"} else "",
        deny=given.get(SOURCE_RANGES, "").lower() == "deny",
    )


def _types(text: str) -> frozenset[str]:
    """Parse a list of types; empty if any is unknown."""
    asked = frozenset(one.strip() for one in text.split(",")) if text else frozenset()
    return asked if asked <= _TYPES else frozenset()


def is_global(service: Object) -> bool:
    """Whether the service has backends in remote clusters, if the agent is in a cluster mesh."""
    given = service.annotations
    return bool(given) and _annotation(given, GLOBAL) == "true"


def is_shared(service: Object) -> bool:
    """Whether remote clusters may use its backends: a global service without ``shared: false``."""
    return is_global(service) and _annotation(service.annotations, SHARED, "true") == "true"


def affinity_of(service: Object) -> Affinity:
    """Return the preferred backends of a global service; invalid values mean no preference."""
    return _AFFINITIES.get(_annotation(service.annotations, AFFINITY), "") if is_global(service) else ""


def _annotation(given: Mapping[str, str], name: str, otherwise: str = "") -> str:
    return given.get(name, given.get(_ALIASES[name], otherwise)).lower()


_AFFINITIES: Final[Mapping[str, Affinity]] = {"local": "local", "remote": "remote"}


def is_exposed(service: Service, node: ServingNode) -> bool:
    """Whether this node serves the service; an invalid selector selects no node."""
    metadata = service.metadata
    given = metadata.annotations or {}
    selector = given.get(NODE_SELECTOR)
    if selector is not None:
        try:
            return selector_of(selector).matches(node.labels or {})
        except ValueError:
            return False
    wanted = given.get(EXPOSURE_LABEL, (metadata.labels or {}).get(EXPOSURE_LABEL))
    return wanted is None or wanted == node.exposure


def faults_of(service: Service, options: LoadBalancerOptions) -> Iterator[tuple[str, str]]:
    """Yield annotations without effect, with the reason, for the log."""
    given = service.metadata.annotations
    for name, text in (given or {}).items():
        known = _NAMES.get(name, name)
        if known.startswith(PREFIX) and (fault := _fault(known, text, service, options)):
            yield name, fault


def _fault(name: str, text: str, service: Service, options: LoadBalancerOptions) -> str:
    if name in (ALGORITHM, FORWARDING):
        return _fault_of_choice(name, text, service, options)
    if name in _ALIASES:
        return _fault_in_mesh(name, text.lower(), service, options)
    if name in _FAULTS:
        return _FAULTS[name](text, service, options)
    if name in _UNSUPPORTED:
        asks, instead = _UNSUPPORTED[name]
        return f"not supported: {instead}" if instead and text.lower() == (asks or text.lower()) else ""
    known = ", ".join(each.removeprefix(PREFIX) for each in _KEYS)
    return "" if name in _KEYS else f"not known: expected one of {known}"


def _fault_of_types(text: str, service: Service, _: LoadBalancerOptions) -> str:
    if not text:
        return ""
    wanted, spec = _types(text), service.spec
    if not wanted:
        return f"{text!r}: expected ClusterIP, NodePort or LoadBalancer, or a list of them: all are served"
    has = {
        "ClusterIP": spec.type != "ExternalName",
        "NodePort": spec.type in ("NodePort", "LoadBalancer"),
        "LoadBalancer": spec.type == "LoadBalancer" or bool(service.status.load_balancer.ingress),
    }
    if any(has[one] for one in wanted):
        return ""
    return f"{text!r}: a service of type {spec.type or 'ClusterIP'} has no such address: it is not served"


def _fault_of_ranges(text: str, service: Service, options: LoadBalancerOptions) -> str:
    if text.lower() not in {"allow", "deny"}:
        return f"{text!r}: expected allow or deny: only the ranges are served"
    if text.lower() != "deny":
        return ""
    if not options.enable_svc_source_range_check:
        return "enable-svc-source-range-check is off: no client is refused"
    if not service.spec.load_balancer_source_ranges:
        return "the service has no loadBalancerSourceRanges: no client is refused"
    return ""


def _fault_of_selector(text: str, _: Service, __: LoadBalancerOptions) -> str:
    try:
        selector_of(text)
    except ValueError as error:
        return f"{text!r}: {error}: no node has the service"
    return ""


def _fault_in_mesh(name: str, text: str, service: Service, options: LoadBalancerOptions) -> str:
    """Faults in annotations of global services."""
    if not options.global_services:
        asks = name == GLOBAL and text == "true"
        return "no remote clusters are followed: see cluster-id and clustermesh-config" if asks else ""
    words, meaning = _MESH_VALUES[name]
    if text not in words:
        return f"{text!r}: expected {' or '.join(words[:2])}: {meaning}"
    return "" if name == GLOBAL or is_global(service) else "the service is not global"


_MESH_VALUES: Final = {
    GLOBAL: (("true", "false"), "the service is not global"),
    AFFINITY: (("local", "remote", "none"), "no backend is preferred"),
    SHARED: (("true", "false"), "the service is not shared"),
}
"""Valid values, of which errors name the first two, and the effect of other values."""
_FAULTS = {TYPES: _fault_of_types, SOURCE_RANGES: _fault_of_ranges, NODE_SELECTOR: _fault_of_selector}


def _fault_of_choice(name: str, text: str, service: Service, options: LoadBalancerOptions) -> str:
    may, words, setting = {
        ALGORITHM: (options.bpf_lb_algorithm_annotation, ("random", "maglev"), "bpf-lb-algorithm-annotation"),
        FORWARDING: (options.bpf_lb_mode_annotation, ("dsr", "snat"), "bpf-lb-mode-annotation"),
    }[name]
    if not may:
        return f"{setting} is off"
    if text.lower() not in words:
        return f"{text!r}: expected {' or '.join(words)}"
    return "" if _is_external(service, options) else "no address of the service is served to clients outside"


def _is_external(service: Service, options: LoadBalancerOptions) -> bool:
    """Whether any frontend of the service may be for external clients."""
    spec = service.spec
    return (
        options.bpf_lb_external_clusterip
        or (options.enable_node_port and spec.type in ("NodePort", "LoadBalancer"))
        or (options.enable_node_port and bool(service.status.load_balancer.ingress))
        or (options.enable_external_ips and bool(spec.external_ips))
    )


DEFAULT_AFFINITY_TIMEOUT = 10800
LONGEST_AFFINITY_TIMEOUT = 86400
HEADLESS = "None"
LOCAL = "Local"
_NODE_PORT_TYPES = ("NodePort", "LoadBalancer")
NO_RANGES = ("0.0.0.0/32",)
"""A source range that matches no client, for both families."""
_CLUSTER_IP, _LOAD_BALANCER = ServiceType.CLUSTER_IP, ServiceType.LOAD_BALANCER
_EXTERNAL_IPS, _NODE_PORT = ServiceType.EXTERNAL_IPS, ServiceType.NODE_PORT
_SCOPED_TYPES = (_LOAD_BALANCER, _NODE_PORT)
_ONE_SCOPE, _TWO_SCOPES = (EXTERNAL,), (EXTERNAL, INTERNAL)
WILDCARDS: dict[int, IPAddress] = {4: IPv4Address(0), 6: IPv6Address(0)}


def frontends_of(
    service: Service, backends: Backends, node: ServingNode, options: LoadBalancerOptions
) -> list[Frontend]:
    """Return the frontends of a service on this node, with their backends.

    Empty for headless and ExternalName services, and for services that only other nodes serve.
    """
    if service.spec.type == "ExternalName" or is_headless(service):
        return []
    if not is_exposed(service, node):
        return []
    return _FrontendBuilder(service, backends, node, options).frontends()


def may_differ(service: Service, old: ServingNode, new: ServingNode, options: LoadBalancerOptions) -> bool:
    """Whether a change of the node may change the service's frontends or backends."""
    if old.name != new.name or (options.enable_service_topology and old.zone != new.zone):
        return True
    if old.node_port_addresses != new.node_port_addresses and service.spec.type in _NODE_PORT_TYPES:
        return True
    return is_exposed(service, old) != is_exposed(service, new)


def is_headless(service: Service) -> bool:
    """Whether the service has no cluster address: its name resolves to its backends."""
    return service.spec.cluster_ip == HEADLESS


class _FrontendBuilder:
    """Computes the frontends of one service on one node."""

    def __init__(
        self, service: Service, backends: Backends, node: ServingNode, options: LoadBalancerOptions
    ) -> None:
        self._service = service
        self._spec = service.spec
        self._name = ServiceName(service.metadata.namespace, service.metadata.name)
        self._backends = backends
        self._node = node
        self._options = options
        self._annotations = service_annotations(service, options)
        self._ext_local = self._spec.external_traffic_policy == LOCAL
        self._int_local = (
            options.enable_internal_traffic_policy and self._spec.internal_traffic_policy == LOCAL
        )

    def frontends(self) -> list[Frontend]:
        """Return ClusterIP, LoadBalancer, ExternalIPs and NodePort frontends, in this order."""
        spec, options = self._spec, self._options
        found: list[Frontend] = []
        cluster_ips = self._hosts(spec.cluster_ips or ((spec.cluster_ip,) if spec.cluster_ip else ()))
        ports = self._unique_ports()
        if cluster_ips and self._wants(_CLUSTER_IP):
            self._add(found, cluster_ips, ports, _CLUSTER_IP)
        ingress = self._service.status.load_balancer.ingress
        if ingress and options.enable_node_port and self._wants(_LOAD_BALANCER):
            # with ipMode Proxy, packets go to the load balancer itself
            hosts = self._hosts([one.ip for one in ingress if one.is_of_nodes])
            self._add(found, hosts, ports, _LOAD_BALANCER)
        if spec.external_ips and options.enable_external_ips:
            self._add(found, self._hosts(spec.external_ips), ports, _EXTERNAL_IPS)
        if spec.type in _NODE_PORT_TYPES and options.enable_node_port and self._wants(_NODE_PORT):
            families = {host[0] for host in cluster_ips}
            nodes = [WILDCARDS[version] for version in sorted(families)]
            nodes += [one for one in self._node.node_port_addresses if one.version in families]
            for port in ports:
                if port.node_port:
                    self._add(found, [host_of(one) for one in nodes], [port], _NODE_PORT)
        return found

    def _wants(self, type_: ServiceType) -> bool:
        """Whether the annotation allows frontends of this type."""
        return self._annotations is NOTHING or type_.text in self._annotations.types

    def _direct(self, port: ServicePort, type_: ServiceType) -> bool:
        """Whether remote backends answer external clients directly (DSR), if services may choose it."""
        if not self._options.bpf_lb_mode_annotation:
            return False
        mode = self._annotations.forwarding or self._options.bpf_lb_mode
        if mode != "hybrid" or self._options.bpf_lb_proto_diff:
            return mode == "dsr" or (mode == "hybrid" and port.protocol == "TCP")
        number = attrgetter("node_port" if type_ is _NODE_PORT else "port")
        return all(one.protocol == "TCP" for one in self._spec.ports or () if number(one) == number(port))

    def _unique_ports(self) -> Sequence[ServicePort]:
        """Return the ports, each number once per protocol, or once without bpf-lb-proto-diff."""
        ports = self._spec.ports or ()
        if len(ports) < 2:
            return ports
        found: dict[tuple[int, str], ServicePort] = {}
        for port in ports:
            protocol = port.protocol if self._options.bpf_lb_proto_diff else ""
            found.setdefault((port.port, protocol), port)
        return list(found.values())

    def _hosts(self, texts: Sequence[str]) -> list[bytes]:
        """Return distinct addresses of enabled families, except special ones."""
        found = []
        for text in dict.fromkeys(texts) if len(texts) > 1 else texts:
            host = parse_host(text)
            if host is None or not (
                self._options.enable_ipv4 if host[0] == IPV4 else self._options.enable_ipv6
            ):
                continue
            if host[1] not in FIRST_BYTES_OF_SPECIAL or not is_special(ip_address(host[1:])):
                found.append(host)
        return found

    def _add(
        self, found: list[Frontend], hosts: Sequence[bytes], ports: Sequence[ServicePort], type_: ServiceType
    ) -> None:
        """Add the frontends of these addresses and ports."""
        if not hosts:
            return
        options, annotations = self._options, self._annotations
        is_cluster_ip = type_ is _CLUSTER_IP
        outside = not is_cluster_ip or options.bpf_lb_external_clusterip
        checked = type_ is _LOAD_BALANCER or options.bpf_lb_source_range_all_types
        ranges = self._source_ranges() if checked else ()
        two_scopes = self._ext_local != self._int_local and not is_cluster_ip
        scopes = _TWO_SCOPES if two_scopes and type_ in _SCOPED_TYPES else _ONE_SCOPE
        affinity = self._affinity_timeout()
        for port in ports:
            number = port.node_port if type_ is _NODE_PORT else port.port
            protocol = PROTOCOLS.get(port.protocol) if options.bpf_lb_proto_diff else ANY_PROTOCOL
            if protocol is None or not is_port(number):
                continue
            end = address_end(number, protocol)
            for host in hosts:
                address = ServiceAddress.read(host + end)
                for scope in scopes:
                    backends = self._selected(host[0], scope, type_, port)
                    one = Frontend(
                        FrontendKey(address, scope),
                        type_,
                        self._name,
                        backends,
                        ext_local=self._ext_local,
                        int_local=self._int_local,
                        two_scopes=two_scopes,
                        affinity_timeout=affinity,
                        source_ranges=ranges,
                        source_ranges_deny=bool(ranges) and annotations.deny,
                        algorithm=annotations.algorithm if not is_cluster_ip else "",
                        direct=outside and self._direct(port, type_),
                        health_check_node_port=self._spec.health_check_node_port,
                        routable=outside and not address.is_wildcard,
                        port_name=port.name,
                    )
                    found.append(one)

    def _source_ranges(self) -> tuple[str, ...]:
        """Return the allowed or denied ranges; if none is valid, no client is allowed."""
        given = self._spec.load_balancer_source_ranges
        if not given or not self._options.enable_svc_source_range_check:
            return ()
        ranges = {str(one) for one in map(parse_prefix, given) if one}
        return tuple(sorted(ranges)) or (() if self._annotations.deny else NO_RANGES)

    def _affinity_timeout(self) -> int:
        if self._spec.session_affinity != "ClientIP":
            return 0
        config = self._spec.session_affinity_config
        client_ip = config.client_ip if config is not None else None
        if client_ip is None or client_ip.timeout_seconds <= 0:
            return DEFAULT_AFFINITY_TIMEOUT
        return min(client_ip.timeout_seconds, LONGEST_AFFINITY_TIMEOUT)

    def _selected(self, version: int, scope: int, type_: ServiceType, port: ServicePort) -> Sequence[Backend]:
        """Return the backends that the frontend's family, traffic policy and zone allow."""
        backends = self._of_family(port.name, version)
        if self._options.enable_service_topology:
            backends = self._in_zone(backends)
        if self._int_local if type_ is _CLUSTER_IP or scope == INTERNAL else self._ext_local:
            here = ("", self._node.name)  # backends of remote clusters have no node
            return tuple([one for one in backends if one.node in here])
        return backends

    def _of_family(self, port_name: str, version: int) -> Sequence[Backend]:
        """Return the backends of a family; they are sorted, so the first and last show if all match."""
        backends = self._backends.get(port_name, ())
        addresses = addresses_of(backends)
        if not addresses or addresses[0][0] == version == addresses[-1][0]:
            return backends
        return tuple([one for one in backends if one.address.version == version])

    def _in_zone(self, backends: Sequence[Backend]) -> Sequence[Backend]:
        """Return backends hinted for the node's zone, and unhintable ones; all if hints are missing."""
        zone = self._node.zone
        if not zone or self._ext_local or self._int_local:
            return backends
        every = [one for group in self._backends.values() for one in group if _takes_hints(one)]
        if any(one.hinted_zones is None for one in every):
            return backends
        near = {one.address for one in backends if _takes_hints(one) and zone in (one.hinted_zones or ())}
        if not near:
            return backends
        return tuple([one for one in backends if one.address in near or not _takes_hints(one)])


def _takes_hints(backend: Backend) -> bool:
    """Whether Kubernetes sets hints for the backend: only for local, ready endpoints."""
    return not backend.cluster and backend.state is BackendState.ACTIVE


def visible_in_cluster(frontends: Sequence[Frontend]) -> list[Frontend]:
    """Return the frontends for clients in the cluster: with two scopes, the internal one."""
    internal = {one.key.address for one in frontends if one.key.scope == INTERNAL}
    return [one for one in frontends if one.key.scope == INTERNAL or one.key.address not in internal]
