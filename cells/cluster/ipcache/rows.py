"""The rows of cilium_ipcache: claims of prefixes and their precedence."""

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

import msgspec

from cells.base.addresses import IPAddress, IPNetwork
from cells.cluster.identity.numbers import (
    HOST,
    KUBE_APISERVER,
    LOCAL,
    REMOTE_NODE,
    REMOTE_NODES,
    UNKNOWN,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
)
from cells.maps.map import Map
from cells.maps.records.cluster import IpcacheValue, ipcache_key, ipcache_prefix
from cells.maps.target import Codec, MapTarget, record

__all__ = [
    "OF_CLUSTER",
    "IpcacheEntry",
    "IpcacheTarget",
    "Prefix",
    "Source",
    "ipcache_target",
    "prefix_of",
    "tunnel_endpoint_of",
]


# Claims about a prefix, and which of several takes precedence.
#
# Source: Cilium 1.17, the sources of ipcache entries and their order.
#
# A prefix is stored as its text: a network of the module ipaddress takes seven times the memory and is looked
# up ten times slower, and a cluster has a row for each of its pods.


class Source(StrEnum):
    """The source of a claim, in order of precedence."""

    KUBE_APISERVER = "kube-apiserver"
    LOCAL = "local"
    """This agent: addresses of the node, and of its endpoints."""
    KVSTORE = "kvstore"
    CUSTOM_RESOURCE = "custom-resource"
    KUBERNETES = "k8s"
    CLUSTERMESH = "clustermesh"
    DIRECTORY = "directory"
    API = "api"
    GENERATED = "generated"
    """Created for policies that select prefixes."""
    RESTORED = "restored"
    """Left by an earlier agent, for an endpoint that is not restored yet."""
    UNSPEC = "unspec"

    def has_precedence_over(self, other: "Source") -> bool:
        """Return whether a claim of this source has precedence over one of the other."""
        return _STRENGTH[self] < _STRENGTH[other]


Prefix = str
"""A network in the form of ``str()``: ``10.0.1.7/32``, ``fd00::/64``."""

_PODS: Final = {"cep", "pod"}
"""Kinds of resources that are pods: CiliumEndpoints, and Pods of manifests."""
OF_CLUSTER: Final = "pod-of-"
"""The prefix of the resource kind of a remote cluster's pods; the cluster's name follows."""

_NODES: Final = {HOST, REMOTE_NODE, KUBE_APISERVER}
_OUTSIDE: Final = {UNKNOWN, WORLD, WORLD_IPV4, WORLD_IPV6}
_STRENGTH: Final = {source: strength for strength, source in enumerate(Source)}


class IpcacheEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claim, or a row of the table: the effective claim, with the other claims in ``shadowed``."""

    prefix: Prefix
    identity: int
    source: Source
    resource: str
    """The owner of a claim: ``<kind>/<namespace>/<name>``, for example ``ep//12``.

    It has one claim of a prefix.
    """
    tunnel_endpoint: IPv4Address = IPv4Address(0)
    """The node to which packets are tunnelled; 0.0.0.0: local, or no tunnel."""
    encrypt_key: int = 0
    skip_tunnel: bool = False
    shadowed: "tuple[IpcacheEntry, ...]" = ()
    """Other claims of the prefix, in order of precedence."""

    @property
    def pod(self) -> tuple[str, str] | None:
        """Return namespace and name of the other node's pod with the prefix, if its object is known."""
        kind, _, name = self.resource.partition("/")
        namespace, _, name = name.partition("/")
        if kind in _PODS:
            return namespace, name
        return (namespace, name) if namespace and kind.startswith(OF_CLUSTER) else None

    @property
    def network(self) -> IPNetwork:
        """Return the prefix as a network."""
        return ip_network(self.prefix)

    @property
    def value(self) -> IpcacheValue:
        """Return the value for cilium_ipcache."""
        return IpcacheValue(self.identity, self.tunnel_endpoint, self.encrypt_key, int(self.skip_tunnel))

    @property
    def claims(self) -> "list[IpcacheEntry]":
        """Return all claims of the prefix, in order of precedence."""
        if not self.shadowed:
            return [self]
        return [msgspec.structs.replace(self, shadowed=()), *self.shadowed]

    def is_of(self, source: Source) -> bool:
        """Return whether any claim of the prefix has this source."""
        return self.source is source or any(one.source is source for one in self.shadowed)


IpcacheTarget = MapTarget[Prefix, IpcacheEntry, IpcacheValue]


def prefix_of(address: IPAddress) -> Prefix:
    """Return the prefix of a single address."""
    return f"{address}/{address.max_prefixlen}"


@lru_cache(maxsize=8192)
def tunnel_endpoint_of(node: str) -> IPv4Address:
    """Return the tunnel endpoint for a node's address; 0.0.0.0 unless it is IPv4."""
    try:
        ip = ip_address(node)
    except ValueError:
        return IPv4Address(0)
    return ip if isinstance(ip, IPv4Address) else IPv4Address(0)


def claimed(row: IpcacheEntry | None, claim: IpcacheEntry) -> IpcacheEntry:
    """Return the prefix's row after ``claim``, which replaces an earlier claim of its resource.

    The source with the highest precedence wins; among claims of one source that of reserved:host, otherwise
    the latest. If several nodes claim a CIDR, the first by name wins, as for routes.
    """
    if row is None or (not row.shadowed and row.resource == claim.resource):
        return claim
    return _row([claim, *(each for each in row.claims if each.resource != claim.resource)])


def keyed(claim: IpcacheEntry, key: int) -> IpcacheEntry:
    """Return the claim with the key number for packets to pods, unless it has one.

    Claims of nodes and of prefixes outside the cluster get none. Prefixes with only a node's pod CIDR count
    as pods.
    """
    identity = claim.identity
    if claim.encrypt_key or identity in _NODES or identity in REMOTE_NODES:
        return claim
    if (identity in _OUTSIDE or identity in LOCAL) and not int(claim.tunnel_endpoint):
        return claim
    return msgspec.structs.replace(claim, encrypt_key=key)


def withdrawn(row: IpcacheEntry, resource: str) -> IpcacheEntry | None:
    """Return the prefix's row without the claim of ``resource``, or None without other claims."""
    others = [each for each in row.claims if each.resource != resource]
    return _row(others) if others else None


def _row(claims: list[IpcacheEntry]) -> IpcacheEntry:
    first, *others = sorted(claims, key=_rank)
    return msgspec.structs.replace(first, shadowed=tuple(others)) if others else first


def _rank(claim: IpcacheEntry) -> tuple[int, bool, str]:
    by_name = claim.resource if claim.source is Source.UNSPEC else ""
    return _STRENGTH[claim.source], claim.identity != HOST, by_name


# The map cilium_ipcache.


def ipcache_target(maps: Callable[[], Map]) -> IpcacheTarget:
    """Return the map as the target of a reconciler."""
    return MapTarget(
        lambda: (maps(),), Codec(ipcache_key, ipcache_prefix), record(IpcacheValue), lambda row: row.value
    )
