"""Compute the routes and export policies of CiliumBGPAdvertisements.

Input:  advertisements; pod CIDRs of this node, CiliumPodIPPools, services and EndpointSlices.
Output: the table ``bgp-services``; by Announced.to(), the policy statements of a peer and address family.
Why:    services have their own table, so backends that are added or removed on other nodes change no row.
Source: Cilium 1.17, BGP control plane; Kubernetes, virtual IPs and service proxies: traffic policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Final, NamedTuple

import msgspec

from cells.base.addresses import Family, IPNetwork
from cells.bgp.speaker_state import (
    IPV4_UNICAST,
    IPV6_UNICAST,
    AfiSafi,
    BGPFault,
    BGPPeer,
    PolicyStatement,
    PrefixMatch,
    without_zone,
)
from cells.kubernetes.objects.cilium_bgp import (
    COMMUNITIES,
    BGPAdvertisement,
    BGPAttributes,
    CiliumBGPAdvertisement,
)
from cells.kubernetes.objects.cilium_pools import CiliumPodIPPool
from cells.kubernetes.objects.core import EndpointSlice, Service, served_by
from cells.kubernetes.objects.kind import Key, LabelSelector
from cells.node.ipam.ranges import PodRange
from cells.services.model.claims import EXTERNAL_IPS, INGRESS, RefusedAddress
from lifecycle import ReadTable

__all__ = [
    "MAX_32",
    "Announced",
    "AnnouncedPool",
    "AnnouncedService",
    "BadValueError",
    "LocalBackends",
    "announced_pools",
    "announced_services",
    "decimal",
    "network_order",
]


MAX_32: Final = 0xFFFFFFFF


class BadValueError(ValueError):
    """An invalid value of a resource; the message has the value and what was expected."""


def decimal(text: str, most: int) -> int | None:
    """Parse decimal digits; None for other texts and for numbers above ``most``."""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most:
        return int(text)
    return None


def network_order(network: IPNetwork) -> tuple[int, bytes, int]:
    """Sort key of networks: IPv4 first."""
    return network.version, network.network_address.packed, network.prefixlen


# Services.

LOAD_BALANCER_IP, CLUSTER_IP, EXTERNAL_IP = "LoadBalancerIP", "ClusterIP", "ExternalIP"
BGP_CLASS: Final = "io.cilium/bgp-control-plane"
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
"""Labels that selectors see on every service."""
_LOCAL: Final = "Local"
_HEADLESS: Final = {"", "None"}


class AnnouncedService(msgspec.Struct, frozen=True):
    """A row of the table ``bgp-services``: the addresses of a service that this node may announce."""

    key: Key
    labels: Mapping[str, str]
    """Labels of the service, with NAME and NAMESPACE."""
    addresses: tuple[tuple[str, IPNetwork], ...]
    """Address type (LoadBalancerIP, ClusterIP, ExternalIP) and address."""


class LocalBackends(NamedTuple):
    """The address families in which a service has ready, non-terminating backends on this node."""

    service: Key
    families: frozenset[Family]


def announced_services(
    services: ReadTable[tuple[str, str], Service],
    slices: ReadTable[tuple[str, str], EndpointSlice],
    refused: ReadTable[tuple[str, str, str], RefusedAddress],
    node: str,
    proxy: str = "",
) -> ReadTable[tuple[str, str], AnnouncedService]:
    """Return the table ``bgp-services``; a changed object recomputes only its service.

    Only services of the proxy with this name are announced, see served_by().
    """

    def served(service: Service) -> bool:
        return served_by(service.labels, proxy)

    def local(endpoints: EndpointSlice) -> Iterator[tuple[Key, Key, Family]]:
        kinds = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}
        family = kinds.get(endpoints.address_type)
        if endpoints.service and family is not None and _has_local(endpoints, node):
            yield endpoints.key, (endpoints.namespace, endpoints.service), family

    backends = slices.flat_map(local, key=lambda row: row[0], name="bgp-local-slices").group(
        lambda row: row[1],
        lambda key, rows: LocalBackends(key, frozenset(family for _, _, family in rows)),
        name="bgp-local-backends",
    )
    unserved = refused.group(
        lambda row: (row.service.namespace, row.service.name),
        lambda _, rows: frozenset((row.part, row.address) for row in rows),
        name="bgp-refused",
    )
    return (
        services.filter(served, name="bgp-own-services")
        .left_join(backends, lambda service, found: (service, found), name="bgp-backed-services")
        .left_join(unserved, _announced, name="bgp-any-services")
        .filter(lambda row: row.addresses, name="bgp-services")
    )


def _has_local(endpoints: EndpointSlice, node: str) -> bool:
    """Return whether an endpoint of this node is ready and not terminating."""
    return any(
        one.node_name == node and one.conditions.ready is not False and not one.conditions.terminating
        for one in endpoints.endpoints or ()
    )


def _announced(
    backed: tuple[Service, LocalBackends | None], refused: frozenset[tuple[str, object]] | None
) -> AnnouncedService:
    service, backends = backed
    spec, local_families = service.spec, backends.families if backends is not None else frozenset()
    texts: list[tuple[str, str, str, str]] = []
    if spec.type == "LoadBalancer" and spec.load_balancer_class in {None, BGP_CLASS}:
        ingress = service.status.load_balancer.ingress or ()
        external_policy = spec.external_traffic_policy
        texts += [
            (LOAD_BALANCER_IP, INGRESS, each.ip, external_policy) for each in ingress if each.is_of_nodes
        ]
    if spec.type != "ExternalName":  # externalIPs of ExternalName services have no frontends
        texts += [
            (EXTERNAL_IP, EXTERNAL_IPS, text, spec.external_traffic_policy)
            for text in spec.external_ips or ()
        ]
    if spec.cluster_ip not in _HEADLESS and spec.cluster_ips:
        own = dict.fromkeys((spec.cluster_ip, *spec.cluster_ips))
        texts += [(CLUSTER_IP, "", text, spec.internal_traffic_policy) for text in own]
    found: dict[tuple[str, IPNetwork], None] = {}
    for address_type, part, text, policy in texts:
        try:
            ip = ip_address(text)
        except ValueError:  # a name
            continue
        if (part, ip) not in (refused or ()) and (policy != _LOCAL or Family.of(ip) in local_families):
            found[address_type, ip_network(ip)] = None
    labels = {**service.labels, NAME: service.name, NAMESPACE: service.namespace}
    return AnnouncedService(service.key, labels, tuple(found))


# CiliumPodIPPools.


class AnnouncedPool(NamedTuple):
    """The ranges of a CiliumPodIPPool on this node."""

    name: str
    labels: Mapping[str, str]
    cidrs: tuple[IPNetwork, ...]
    mask_sizes: Mapping[Family, int]
    """Prefix lengths of the ranges that nodes allocate from the pool."""

    @property
    def selectable(self) -> dict[str, str]:
        """Labels of the pool, with those that Cilium adds for selectors."""
        own = {"io.cilium.podippool.name": self.name, "io.cilium.podippool.namespace": ""}
        return {**self.labels, **own}


def announced_pools(pools: Iterable[CiliumPodIPPool], ranges: Iterable[PodRange]) -> Iterator[AnnouncedPool]:
    """Yield the pools from which this node has ranges."""
    cidrs: dict[str, list[IPNetwork]] = {}
    for row in ranges:
        cidrs.setdefault(row.pool, []).append(row.network)
    for pool in sorted(pools, key=lambda one: one.name):
        if pool.name in cidrs:
            parts = {Family.IPV4: pool.spec.ipv4, Family.IPV6: pool.spec.ipv6}
            sizes = {family: part.mask_size for family, part in parts.items() if part is not None}
            yield AnnouncedPool(pool.name, pool.labels, tuple(cidrs[pool.name]), sizes)


# Advertisements.

POD_CIDR, POOL, SERVICE = "PodCIDR", "CiliumPodIPPool", "Service"
_UNICAST: Final = {IPV4_UNICAST: Family.IPV4, IPV6_UNICAST: Family.IPV6}


class _Attributes(NamedTuple):
    """Path attributes that a policy adds to routes."""

    communities: tuple[int, ...] = ()
    large: tuple[tuple[int, int, int], ...] = ()
    preference: int | None = None

    def united(self, other: _Attributes) -> _Attributes:
        """Return the union of communities, with the higher local preference."""
        preferences = [one for one in (self.preference, other.preference) if one is not None]
        return _Attributes(
            tuple(dict.fromkeys((*self.communities, *other.communities))),
            tuple(dict.fromkeys((*self.large, *other.large))),
            max(preferences, default=None),
        )


class _Routes(NamedTuple):
    """Routes of one pool or service, or the pod CIDRs of the node."""

    name: str
    """Suffix of the policy name, after peer and family."""
    matches: tuple[PrefixMatch, ...]
    """Sorted prefix matches; the network of each is a route."""


class _EntryRoutes(NamedTuple):
    """One advertisement of a CiliumBGPAdvertisement, with the routes that it selects by family."""

    attributes: _Attributes
    routes: Mapping[Family, Sequence[_Routes]]


class Announced:
    """The routes of all advertisements, computed once for all peers."""

    def __init__(
        self,
        advertisements: Iterable[CiliumBGPAdvertisement],
        pod_cidrs: Sequence[IPNetwork],
        pools: Sequence[AnnouncedPool],
        services: Sequence[AnnouncedService],
    ) -> None:
        self._pod_cidrs, self._pools, self._services = pod_cidrs, pools, services
        self.faults: list[BGPFault] = []
        """Advertisements that cannot be applied."""
        self._objects: list[tuple[dict[str, str], list[_EntryRoutes]]] = []
        for each in sorted(advertisements, key=lambda one: one.name):
            entries: list[_EntryRoutes] = []
            for entry in each.spec.advertisements:
                try:
                    attributes, routes = _attributes(entry.attributes), _grouped_routes(self._routes(entry))
                except BadValueError as error:
                    subject = f"CiliumBGPAdvertisement/{each.name}"
                    fault = BGPFault("", subject, f"{entry.advertisement_type} is not announced: {error}")
                    self.faults.append(fault)
                    continue
                entries.append(_EntryRoutes(attributes, routes))
            self._objects.append((each.labels, entries))

    def to(
        self, peer: BGPPeer, family: AfiSafi, selector: LabelSelector | None
    ) -> Iterator[tuple[str, PolicyStatement]]:
        """Yield the policies of a peer for a family: name and statement that matches the routes."""
        version = _UNICAST.get(family)
        if selector is None or version is None:
            return
        found: dict[str, list[tuple[_Routes, _Attributes]]] = {}
        for labels, entries in self._objects:
            if not selector.matches(labels):
                continue
            for entry in entries:
                for routes in entry.routes[version]:
                    _unite(found.setdefault(routes.name, []), routes, entry.attributes)
        for name, parts in found.items():
            for routes, attributes in parts:
                statement = PolicyStatement(
                    (without_zone(peer.address),),
                    routes.matches,
                    communities=attributes.communities,
                    large_communities=attributes.large,
                    local_preference=attributes.preference,
                )
                yield f"{peer.name}-{family.afi}-{name}", statement

    def _routes(self, entry: BGPAdvertisement) -> Iterator[_Route]:
        """Yield the routes that an advertisement selects. Raises BadValueError."""
        if entry.advertisement_type == POD_CIDR:
            yield from ((POD_CIDR, cidr, cidr.prefixlen) for cidr in self._pod_cidrs)
        elif entry.advertisement_type == POOL:
            for pool in self._pools:
                if entry.selector is not None and entry.selector.matches(pool.selectable):
                    for cidr in pool.cidrs:
                        length = pool.mask_sizes.get(Family.of(cidr), cidr.prefixlen)
                        yield f"{POOL}-{pool.name}", cidr, length
        elif entry.service is None or not entry.service.addresses:
            types = f"{LOAD_BALANCER_IP}, {CLUSTER_IP}, {EXTERNAL_IP}"
            raise BadValueError(f"service.addresses is missing: expected some of {types}")
        elif entry.selector is not None:
            yield from _service_routes(entry.selector, set(entry.service.addresses), self._services)


def _unite(parts: list[tuple[_Routes, _Attributes]], routes: _Routes, attributes: _Attributes) -> None:
    """Add routes to a policy, or unite the attributes if it has them. Services may share a policy name."""
    for number, (known, before) in enumerate(parts):
        if known.matches == routes.matches:
            parts[number] = known, before.united(attributes)
            return
    parts.append((routes, attributes))


_Route = tuple[str, IPNetwork, int]
"""Suffix of the policy name, the route, and the prefix length to match."""


def _grouped_routes(routes: Iterable[_Route]) -> dict[Family, list[_Routes]]:
    """Group routes by family and policy name."""
    grouped: dict[Family, dict[str, set[PrefixMatch]]] = {family: {} for family in Family}
    for name, network, length in routes:
        members = grouped[Family.of(network)].setdefault(name, set())
        members.add(PrefixMatch(network, length, length))
    return {
        family: [_Routes(name, _sorted(members)) for name, members in named.items()]
        for family, named in grouped.items()
    }


def _sorted(members: set[PrefixMatch]) -> tuple[PrefixMatch, ...]:
    if len(members) == 1:  # as of nearly every service
        return tuple(members)
    return tuple(sorted(members, key=lambda one: (network_order(one.cidr), one.min_length)))


def _service_routes(
    selector: LabelSelector, types: set[str], services: Iterable[AnnouncedService]
) -> Iterator[_Route]:
    for service in services:
        if selector.matches(dict(service.labels)):
            namespace, name = service.key
            for address_type, network in service.addresses:
                if address_type in types:
                    yield f"{SERVICE}-{name}-{namespace}-{address_type}", network, network.prefixlen


def _attributes(given: BGPAttributes | None) -> _Attributes:
    """Parse the attributes of an advertisement. Raises BadValueError."""
    if given is None:
        return _Attributes()
    preference = given.local_preference or None  # 0 is the same as none to a speaker
    if preference is not None and not 0 < preference <= MAX_32:
        raise BadValueError(f"localPreference={preference}: expected 0 to {MAX_32}")
    if (communities := given.communities) is None:
        return _Attributes(preference=preference)
    standard = [_standard(text) for text in communities.standard or ()]
    for name in communities.well_known or ():
        if name not in COMMUNITIES:
            raise BadValueError(f"community {name}: expected one of {', '.join(COMMUNITIES)}")
        standard.append(COMMUNITIES[name])
    large = [_large(text) for text in communities.large or ()]
    return _Attributes(tuple(dict.fromkeys(standard)), tuple(dict.fromkeys(large)), preference)


def _standard(text: str) -> int:
    """Parse a community (RFC 1997): two numbers of 16 bits, or one of 32."""
    parts = _numbers(text, MAX_32 if ":" not in text else 0xFFFF)
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0] << 16 | parts[1]
    raise BadValueError(f"community {text}: expected 0 to {MAX_32}, or two numbers such as 65000:100")


def _large(text: str) -> tuple[int, int, int]:
    """Parse a large community (RFC 8092): three numbers of 32 bits."""
    parts = _numbers(text, MAX_32)
    if len(parts) != 3:
        raise BadValueError(f"large community {text}: expected three numbers such as 65000:1:2")
    return parts[0], parts[1], parts[2]


def _numbers(text: str, most: int) -> list[int]:
    parts = [decimal(part, most) for part in text.split(":")]
    found = [part for part in parts if part is not None]
    if len(found) != len(parts):
        raise BadValueError(f"community {text}: expected decimal numbers up to {most}")
    return found
