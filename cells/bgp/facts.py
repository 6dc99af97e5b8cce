"""What the controller of BGP reads, each fact a row of its own: services' addresses, pools, passwords.

Why:    a backend that comes or goes on another node changes no row here, and a Secret is read for its
        password alone, which no table shows.
Source: Cilium 1.17, BGP control plane; Kubernetes, virtual IPs and service proxies: traffic policies.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any, Final, NamedTuple

import msgspec

from cells.base.addresses import Family, IPNetwork
from cells.kubernetes.objects.cilium_pools import CiliumPodIPPool
from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.kubernetes.objects.kind import Key, Kind, Object
from cells.node.ipam.ranges import PodRange
from cells.services.model.claims import EXTERNAL_IPS, INGRESS, RefusedAddress
from lifecycle import ReadTable, Secret

__all__ = [
    "CLUSTER_IP",
    "EXTERNAL_IP",
    "LOAD_BALANCER_IP",
    "SECRETS",
    "AnnouncedPool",
    "AnnouncedService",
    "BGPPassword",
    "LocalBackends",
    "announced_pools",
    "announced_services",
]


# Passwords.


class BGPPassword(msgspec.Struct, frozen=True):
    """What is read of a Secret: its key ``password``."""

    key: Key
    password: Secret
    """Empty where the Secret has none."""


class SecretObject(Object, frozen=True, gc=False):
    """A Secret as it comes; it is in no table."""

    data: dict[str, str] | None = None


def _password(found: SecretObject) -> BGPPassword:
    text = ""
    with suppress(binascii.Error, UnicodeDecodeError):  # as good as none
        text = base64.b64decode((found.data or {}).get("password", ""), validate=True).decode()
    return BGPPassword(found.key, Secret(text))


SECRETS: Final[Kind[Any]] = Kind(SecretObject, "v1", "secrets", kind="Secret").stored_as(_password)
"""Rows are BGPPasswords."""


# Services.

LOAD_BALANCER_IP, CLUSTER_IP, EXTERNAL_IP = "LoadBalancerIP", "ClusterIP", "ExternalIP"
BGP_CLASS: Final = "io.cilium/bgp-control-plane"
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
"""Labels that every service has for selectors."""
_LOCAL: Final = "Local"
_HEADLESS: Final = {"", "None"}


class AnnouncedService(msgspec.Struct, frozen=True):
    """A row of the table ``bgp-services``: the addresses of a service that this node may announce."""

    key: Key
    labels: Mapping[str, str]
    """With those that every service has for selectors."""
    addresses: tuple[tuple[str, IPNetwork], ...]
    """Each with its type: LoadBalancerIP, ClusterIP, ExternalIP."""


class LocalBackends(NamedTuple):
    """The families of a service's backends on this node that take new connections."""

    service: Key
    families: frozenset[Family]


def announced_services(
    services: ReadTable[tuple[str, str], Service],
    slices: ReadTable[tuple[str, str], EndpointSlice],
    refused: ReadTable[tuple[str, str, str], RefusedAddress],
    node: str,
) -> ReadTable[tuple[str, str], AnnouncedService]:
    """The table ``bgp-services``; each changed object costs its service alone."""

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
        services.left_join(backends, lambda service, found: (service, found), name="bgp-backed-services")
        .left_join(unserved, _announced, name="bgp-any-services")
        .filter(lambda row: row.addresses, name="bgp-services")
    )


def _has_local(endpoints: EndpointSlice, node: str) -> bool:
    """Whether a backend on the node is ready and does not end."""
    return any(
        one.node_name == node and one.conditions.ready is not False and not one.conditions.terminating
        for one in endpoints.endpoints or ()
    )


def _announced(
    backed: tuple[Service, LocalBackends | None], refused: frozenset[tuple[str, object]] | None
) -> AnnouncedService:
    service, backends = backed
    spec, here = service.spec, backends.families if backends is not None else frozenset()
    texts: list[tuple[str, str, str, str]] = []
    if spec.type == "LoadBalancer" and spec.load_balancer_class in {None, BGP_CLASS}:
        ingress = service.status.load_balancer.ingress or ()
        outside = spec.external_traffic_policy
        texts += [(LOAD_BALANCER_IP, INGRESS, each.ip, outside) for each in ingress if each.is_of_nodes]
    if spec.type != "ExternalName":  # no node serves its externalIPs
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
        if (part, ip) not in (refused or ()) and (policy != _LOCAL or Family.of(ip) in here):
            found[address_type, ip_network(ip)] = None
    labels = {**service.labels, NAME: service.name, NAMESPACE: service.namespace}
    return AnnouncedService(service.key, labels, tuple(found))


# Pools of pods' addresses.


class AnnouncedPool(NamedTuple):
    """What this node has of a pool."""

    name: str
    labels: Mapping[str, str]
    cidrs: tuple[IPNetwork, ...]
    mask_sizes: Mapping[Family, int]
    """How long the ranges are that a node is given."""

    @property
    def selectable(self) -> dict[str, str]:
        """Its labels, with those that every pool has for selectors."""
        own = {"io.cilium.podippool.name": self.name, "io.cilium.podippool.namespace": ""}
        return {**self.labels, **own}


def announced_pools(pools: Iterable[CiliumPodIPPool], ranges: Iterable[PodRange]) -> Iterator[AnnouncedPool]:
    """The pools that this node announces ranges of."""
    cidrs: dict[str, list[IPNetwork]] = {}
    for row in ranges:
        cidrs.setdefault(row.pool, []).append(row.network)
    for pool in sorted(pools, key=lambda one: one.name):
        if pool.name in cidrs:
            parts = {Family.IPV4: pool.spec.ipv4, Family.IPV6: pool.spec.ipv6}
            sizes = {family: part.mask_size for family, part in parts.items() if part is not None}
            yield AnnouncedPool(pool.name, pool.labels, tuple(cidrs[pool.name]), sizes)
