"""A node of the cluster, in a form common to all sources.

Source: Cilium 1.17, pkg/node/types.Node.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping
from socket import AF_INET, AF_INET6, inet_pton
from typing import Final, TypeVar, cast

import anyio
import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import WIREGUARD_KEY
from cells.cluster.ipcache.rows import Source
from cells.kubernetes.objects.cilium_endpoint import SlimEndpoint, SlimEndpointSlice
from cells.kubernetes.objects.kind import Key
from lifecycle import ReadTable
from lifecycle.tables import Changes

__all__ = [
    "CILIUM_INTERNAL_IP",
    "EXTERNAL_IP",
    "INTERNAL_IP",
    "WIREGUARD_ROTATION",
    "AddressHolders",
    "ChangedNodeAddresses",
    "ClusterNode",
    "EndpointNodeIndex",
    "NodeIP",
    "endpoint_location_of",
    "is_at",
    "number_of",
    "wait_own",
]


INTERNAL_IP: Final = "InternalIP"
EXTERNAL_IP: Final = "ExternalIP"
CILIUM_INTERNAL_IP: Final = "CiliumInternalIP"
"""The address type of the router, cilium_host."""
WIREGUARD_ROTATION: Final = "network.cilium.io/hive-wg-rotation"
"""The annotation that announces a node's key rotation; Cilium has no such annotation."""


class NodeIP(msgspec.Struct, frozen=True):
    """An address of a node with its type: InternalIP, ExternalIP, CiliumInternalIP."""

    type: str
    ip: IPAddress


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, this one or another."""

    cluster: str
    name: str
    source: Source
    """Its source: ``local``, ``custom-resource`` (its CiliumNode), ``k8s`` (its Node), ``kvstore``."""
    addresses: tuple[NodeIP, ...] = ()
    ipv4_alloc_cidrs: tuple[IPNetwork, ...] = ()
    """Its pod CIDRs; the first is the primary one."""
    ipv6_alloc_cidrs: tuple[IPNetwork, ...] = ()
    health: tuple[IPAddress, ...] = ()
    """Addresses of its health endpoint, at most one of a family."""
    ingress: tuple[IPAddress, ...] = ()
    """Addresses of its ingress listener, at most one of a family."""
    encryption_key: int = 0
    """0: packets to its own addresses are not encrypted; 255: by WireGuard; otherwise by this key of IPsec.
    """
    wireguard_key: str = ""
    """Its public WireGuard key in base64; empty if it has none."""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    boot_id: str = ""
    node_identity: int = 0
    created: str = ""
    """Creation time of its object in RFC 3339; empty if unknown."""
    refused: tuple[str, ...] = ()
    """Refused addresses and CIDRs, with reasons."""
    unannounced: tuple[IPNetwork, ...] = ()
    """For this node: pod CIDRs that BGP must not announce."""

    @property
    def full_name(self) -> str:
        """``cluster/name``, the key of its row."""
        return f"{self.cluster}/{self.name}"

    @property
    def endpoint_key(self) -> int:
        """Return the key for packets to its pods: a node may exclude its own addresses from WireGuard."""
        return WIREGUARD_KEY if self.wireguard_key else self.encryption_key

    @property
    def wireguard_rotation(self) -> str:
        """Return ROTATION_READY, or the next public WireGuard key; empty without rotation."""
        return self.annotations.get(WIREGUARD_ROTATION, "") if self.wireguard_key else ""

    @property
    def local(self) -> bool:
        """Whether it is this node."""
        return self.source is Source.LOCAL

    def node_ip(self, family: Family) -> IPAddress | None:
        """Return the address that other nodes use; never the router's.

        The first InternalIP, otherwise the last ExternalIP, otherwise the first of another type.
        """
        others: list[IPAddress] = []
        external: IPAddress | None = None
        for each in self.addresses:
            if Family.of(each.ip) is not family or each.type == CILIUM_INTERNAL_IP:
                continue
            if each.type == INTERNAL_IP:
                return each.ip
            if each.type == EXTERNAL_IP:
                external = each.ip
            else:
                others.append(each.ip)
        return external or next(iter(others), None)

    def router_ip(self, family: Family) -> IPAddress | None:
        """Return the address of its cilium_host."""
        return next(
            (
                each.ip
                for each in self.addresses
                if each.type == CILIUM_INTERNAL_IP and Family.of(each.ip) is family
            ),
            None,
        )

    def alloc_cidrs(self, family: Family) -> tuple[IPNetwork, ...]:
        """Return its pod CIDRs of a family, the primary one first."""
        return self.ipv4_alloc_cidrs if family is Family.IPV4 else self.ipv6_alloc_cidrs

    def all_cidrs(self) -> Iterator[IPNetwork]:
        """Return its pod CIDRs of both families: IPv4, then IPv6."""
        yield from self.ipv4_alloc_cidrs
        yield from self.ipv6_alloc_cidrs


async def wait_own(nodes: ReadTable[str, ClusterNode]) -> None:
    """Wait until this node's row exists or the table of nodes is initialized.

    Nodes of remote clusters may be late.
    """
    async with anyio.create_task_group() as group:

        async def all_known() -> None:
            await nodes.wait_initialized()
            group.cancel_scope.cancel()

        group.start_soon(all_known)
        async for changes in nodes.changes():
            if any(change.row is not None and change.row.local for change in changes):
                break
        group.cancel_scope.cancel()


# Where nodes are, for addresses of their pods.


class AddressHolders:
    """Looks up the node with an address, or with a pod CIDR that contains it.

    Addresses are passed as numbers, see number_of(): nearly all lookups are of pod addresses.
    """

    def __init__(self, nodes: ReadTable[str, ClusterNode]) -> None:
        self._nodes = nodes
        self._changes: Changes[str, ClusterNode] | None = None
        self._revision = -1
        self._at: dict[tuple[int, int], list[ClusterNode]] = {}
        """Nodes by address: two may have the same one."""
        self._ranges: dict[tuple[int, int], dict[int, ClusterNode]] = {}
        """(family, shifted out bits) -> network -> node."""

    def at(self, number: tuple[int, int]) -> ClusterNode | None:
        """Return the node with exactly this address."""
        self._follow()
        found = self._at.get(number)
        return found[0] if found else None

    def of_range(self, number: tuple[int, int]) -> ClusterNode | None:
        """Return the node with the pod CIDR that contains the prefix; pod CIDRs do not overlap."""
        self._follow()
        family, bits = number
        for (version, shift), networks in self._ranges.items():
            if version == family and (found := networks.get(bits >> shift)) is not None:
                return found
        return None

    def _follow(self) -> None:
        if self._revision == self._nodes.revision:
            return
        self._revision = self._nodes.revision
        if self._changes is None:
            self._changes = self._nodes.changes()
        changes = self._changes.take()
        for change in changes:
            for number in _numbers(change.old):
                left = [one for one in self._at[number] if one.full_name != change.key]
                if left:
                    self._at[number] = left
                else:
                    del self._at[number]
            for cidr in change.old.all_cidrs() if change.old is not None else ():
                shift = cidr.max_prefixlen - cidr.prefixlen
                self._ranges[cidr.version, shift].pop(int(cidr.network_address) >> shift, None)
        for change in changes:
            for cidr in change.row.all_cidrs() if change.row is not None else ():
                shift = cidr.max_prefixlen - cidr.prefixlen
                of_length = self._ranges.setdefault((cidr.version, shift), {})
                of_length[int(cidr.network_address) >> shift] = cast("ClusterNode", change.row)
            for number in _numbers(change.row):
                self._at.setdefault(number, []).append(cast("ClusterNode", change.row))


def _numbers(node: ClusterNode | None) -> set[tuple[int, int]]:
    return set() if node is None else {(each.ip.version, int(each.ip)) for each in node.addresses}


class ChangedNodeAddresses:
    """Addresses and pod CIDRs of changed nodes, before and after the change."""

    def __init__(self, nodes: Iterable[ClusterNode]) -> None:
        self._addresses: set[tuple[int, int]] = set()
        self._ranges: dict[tuple[int, int], set[int]] = {}
        """(IP version, shifted out bits) -> networks."""
        for node in nodes:
            self._addresses |= _numbers(node)
            for cidr in node.all_cidrs():
                shift = cidr.max_prefixlen - cidr.prefixlen
                numbers = self._ranges.setdefault((cidr.version, shift), set())
                numbers.add(int(cidr.network_address) >> shift)

    def have_node(self, address: str) -> bool:
        """Return whether one of the nodes has this address."""
        return number_of(address) in self._addresses

    def hold(self, address: str) -> bool:
        """Return whether one of the nodes has this address or a pod CIDR that contains it."""
        if (found := number_of(address)) is None:
            return False  # only addresses are in ranges
        version, number = found
        return found in self._addresses or any(
            of == version and number >> shift in numbers for (of, shift), numbers in self._ranges.items()
        )


def number_of(address: str) -> tuple[int, int] | None:
    """Return IP version and number of an address; None if the text is not an address.

    It takes a tenth of the time of ip_address().
    """
    version, family = (6, AF_INET6) if ":" in address else (4, AF_INET)
    try:
        return version, int.from_bytes(inet_pton(family, address))
    except (OSError, ValueError):
        return None


def endpoint_location_of(node: ClusterNode | None) -> tuple[object, ...]:
    """Return the fields that determine which endpoints are on a node."""
    if node is None:
        return ()
    return node.addresses, node.ipv4_alloc_cidrs, node.ipv6_alloc_cidrs


# Endpoints by where they are.

Place = TypeVar("Place", bound=Hashable)
NEAR: Final = {4: 8, 6: 16}
"""By IP version, the number of low bits ignored by the index: fewer than the host bits of pod CIDRs."""


class EndpointNodeIndex:
    """An index of objects by the node and the addresses of their endpoints.

    It may return objects that no longer match, but never misses one. Keys are in sorted lists: a cluster has
    each of its pods here twice, and sets take five times the memory.
    """

    def __init__(self) -> None:
        self._on: dict[tuple[int, int], list[Key]] = {}
        """By the number of a node's address, see number_of()."""
        self._near: dict[tuple[int, int], list[Key]] = {}
        """By IP version and the high bits of an address (without NEAR)."""
        self._order: list[tuple[int, int]] = []
        """The keys of _near, sorted."""

    def add(self, row: SlimEndpoint | SlimEndpointSlice) -> None:
        """Add an object."""
        for endpoint in row.endpoints:
            if (at := number_of(endpoint.node)) is not None:
                _insert(self._on, at, row.key)
            for near in _index_keys(endpoint):
                if _insert(self._near, near, row.key):
                    insort(self._order, near)

    def replace(
        self,
        old: SlimEndpoint | SlimEndpointSlice | None,
        row: SlimEndpoint | SlimEndpointSlice | None,
    ) -> None:
        """Replace an object by its new version; most changes, of its identity, cost nothing."""
        if old is not None and row is not None and _located(old) == _located(row):
            return
        if old is not None:
            self.remove(old)
        if row is not None:
            self.add(row)

    def remove(self, row: SlimEndpoint | SlimEndpointSlice) -> None:
        """Remove an object, in its last version."""
        for endpoint in row.endpoints:
            if (at := number_of(endpoint.node)) is not None:
                _remove(self._on, at, row.key)
            for near in _index_keys(endpoint):
                if _remove(self._near, near, row.key):
                    del self._order[bisect_left(self._order, near)]

    def around(self, node: ClusterNode) -> Iterator[Key]:
        """Return objects with an endpoint on this node or near its addresses; some may be repeated."""
        for each in node.addresses:
            yield from self._on.get((each.ip.version, int(each.ip)), ())
            yield from self._near.get((each.ip.version, int(each.ip) >> NEAR[each.ip.version]), ())
        for cidr in node.all_cidrs():
            version, bits = cidr.version, NEAR[cidr.version]
            last = version, int(cidr.broadcast_address) >> bits
            at = bisect_left(self._order, (version, int(cidr.network_address) >> bits))
            while at < len(self._order) and self._order[at] <= last:
                yield from self._near[self._order[at]]
                at += 1


def is_at(places: ChangedNodeAddresses, endpoint: SlimEndpoint) -> bool:
    """Return whether the set contains the node's name or one of its addresses."""
    addresses = (prefix.partition("/")[0] for prefix in endpoint.prefixes)
    return places.have_node(endpoint.node) or any(map(places.hold, addresses))


def _index_keys(endpoint: SlimEndpoint) -> Iterator[tuple[int, int]]:
    """Return the index keys of an address."""
    for prefix in endpoint.prefixes:
        if (found := number_of(prefix.partition("/")[0])) is not None:
            yield found[0], found[1] >> NEAR[found[0]]


def _located(row: SlimEndpoint | SlimEndpointSlice) -> list[tuple[str, str]]:
    """The fields of an object that EndpointNodeIndex reads."""
    return [(one.node, one.addresses) for one in row.endpoints]


def _insert(index: dict[Place, list[Key]], place: Place, key: Key) -> bool:
    """Insert a key into an index; return whether it is the first at its place."""
    keys = index.get(place)
    if keys is None:
        index[place] = [key]
        return True
    at = bisect_left(keys, key)
    if at == len(keys) or keys[at] != key:
        keys.insert(at, key)
    return False


def _remove(index: dict[Place, list[Key]], place: Place, key: Key) -> bool:
    """Remove a key from an index; return whether it was the last at its place."""
    keys = index.get(place)
    at = bisect_left(keys, key) if keys else 0
    if not keys or at == len(keys) or keys[at] != key:
        return False
    del keys[at]
    if keys:
        return False
    del index[place]
    return True
