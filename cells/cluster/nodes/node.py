"""A node of the cluster, as every agent knows it.

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
from cells.kubernetes.objects.cilium_endpoint import KnownEndpoint, KnownEndpointSlice
from cells.kubernetes.objects.kind import Key
from lifecycle import ReadTable
from lifecycle.tables import Changes

__all__ = [
    "CILIUM_INTERNAL_IP",
    "EXTERNAL_IP",
    "INTERNAL_IP",
    "WIREGUARD_ROTATION",
    "AddressHolders",
    "ChangedPlaces",
    "ClusterNode",
    "EndpointPlaces",
    "NodeIP",
    "is_at",
    "number_of",
    "place_of",
    "wait_own",
]


INTERNAL_IP: Final = "InternalIP"
EXTERNAL_IP: Final = "ExternalIP"
CILIUM_INTERNAL_IP: Final = "CiliumInternalIP"
"""The router's address, cilium_host."""
WIREGUARD_ROTATION: Final = "network.cilium.io/hive-wg-rotation"
"""The annotation with what a node announces of rotations of its key; Cilium knows no such thing."""


class NodeIP(msgspec.Struct, frozen=True):
    """One address of a node, and what it is: InternalIP, ExternalIP, CiliumInternalIP."""

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
    """Ranges of its pods; the first is the primary one, the others are secondary."""
    ipv6_alloc_cidrs: tuple[IPNetwork, ...] = ()
    health: tuple[IPAddress, ...] = ()
    """Addresses of its health endpoint, at most one of a family."""
    ingress: tuple[IPAddress, ...] = ()
    """Addresses of its ingress listener, at most one of a family."""
    encryption_key: int = 0
    """0: nothing to its own addresses is encrypted; 255: by WireGuard; else a key of IPsec's."""
    wireguard_key: str = ""
    """The public key of its WireGuard, in base64; empty if it has none."""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    provider_id: str = ""
    boot_id: str = ""
    node_identity: int = 0
    created: str = ""
    """When its object was made, in RFC 3339; empty where unknown."""
    refused: tuple[str, ...] = ()
    """What it claims and does not get, and why."""
    unannounced: tuple[IPNetwork, ...] = ()
    """Of this node: ranges that routers must not send here."""

    @property
    def full_name(self) -> str:
        """``cluster/name``, the key of its row."""
        return f"{self.cluster}/{self.name}"

    @property
    def endpoint_key(self) -> int:
        """What is sent to its pods is encrypted with: a node may keep its own addresses out of WireGuard."""
        return WIREGUARD_KEY if self.wireguard_key else self.encryption_key

    @property
    def wireguard_rotation(self) -> str:
        """ROTATION_READY, or the next public key of its WireGuard; empty: it knows no rotations."""
        return self.annotations.get(WIREGUARD_ROTATION, "") if self.wireguard_key else ""

    @property
    def local(self) -> bool:
        """Whether it is the agent's own node."""
        return self.source is Source.LOCAL

    def node_ip(self, family: Family) -> IPAddress | None:
        """The address others reach it by: the first InternalIP, else the last ExternalIP, else the first of
        another type; never the router's."""
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
        """The address of its cilium_host."""
        return next(
            (
                each.ip
                for each in self.addresses
                if each.type == CILIUM_INTERNAL_IP and Family.of(each.ip) is family
            ),
            None,
        )

    def alloc_cidrs(self, family: Family) -> tuple[IPNetwork, ...]:
        """The ranges of its pods, the primary one first."""
        return self.ipv4_alloc_cidrs if family is Family.IPV4 else self.ipv6_alloc_cidrs

    def all_cidrs(self) -> Iterator[IPNetwork]:
        """The ranges of its pods of both families: IPv4, then IPv6."""
        yield from self.ipv4_alloc_cidrs
        yield from self.ipv6_alloc_cidrs


async def wait_own(nodes: ReadTable[str, ClusterNode]) -> None:
    """Wait until this node's row is there, or all nodes are known: those of remote clusters may be late."""
    async with anyio.create_task_group() as either:

        async def all_known() -> None:
            await nodes.wait_initialized()
            either.cancel_scope.cancel()

        either.start_soon(all_known)
        async for changes in nodes.changes():
            if any(change.row is not None and change.row.local for change in changes):
                break
        either.cancel_scope.cancel()


# Where nodes are, for addresses of their pods.


class AddressHolders:
    """Which node has an address, or the range that an address is in, by the table of nodes.

    Addresses are asked for by their numbers, see number_of(): most of many thousands are of pods.
    """

    def __init__(self, nodes: ReadTable[str, ClusterNode]) -> None:
        self._nodes = nodes
        self._changes: Changes[str, ClusterNode] | None = None
        self._revision = -1
        self._at: dict[tuple[int, int], list[ClusterNode]] = {}
        """Address -> nodes: two may claim it."""
        self._ranges: dict[tuple[int, int], dict[int, ClusterNode]] = {}
        """(family, bits that are shifted out) -> network -> node."""

    def at(self, number: tuple[int, int]) -> ClusterNode | None:
        """The node that has the address itself."""
        self._follow()
        found = self._at.get(number)
        return found[0] if found else None

    def of_range(self, number: tuple[int, int]) -> ClusterNode | None:
        """The node of the pods of this prefix; ranges of nodes do not overlap."""
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


class ChangedPlaces:
    """Addresses and ranges of nodes that have changed, as they are now and were before."""

    def __init__(self, nodes: Iterable[ClusterNode]) -> None:
        self._addresses: set[tuple[int, int]] = set()
        self._ranges: dict[tuple[int, int], set[int]] = {}
        """(IP version, bits that are shifted out) -> networks."""
        for node in nodes:
            self._addresses |= _numbers(node)
            for cidr in node.all_cidrs():
                shift = cidr.max_prefixlen - cidr.prefixlen
                numbers = self._ranges.setdefault((cidr.version, shift), set())
                numbers.add(int(cidr.network_address) >> shift)

    def have_node(self, address: str) -> bool:
        """Whether one of the nodes has this address."""
        return number_of(address) in self._addresses

    def hold(self, address: str) -> bool:
        """Whether one of the nodes has this address, or a range that it is in."""
        if (found := number_of(address)) is None:
            return False  # only addresses are in ranges
        version, number = found
        return found in self._addresses or any(
            of == version and number >> shift in numbers for (of, shift), numbers in self._ranges.items()
        )


def number_of(address: str) -> tuple[int, int] | None:
    """IP version and number of an address; None for other text. It takes a tenth of ip_address()."""
    version, family = (6, AF_INET6) if ":" in address else (4, AF_INET)
    try:
        return version, int.from_bytes(inet_pton(family, address))
    except (OSError, ValueError):
        return None


def place_of(node: ClusterNode | None) -> tuple[object, ...]:
    """What decides whether endpoints are of a node."""
    if node is None:
        return ()
    return node.addresses, node.ipv4_alloc_cidrs, node.ipv6_alloc_cidrs


# Endpoints by where they are.

Place = TypeVar("Place", bound=Hashable)
NEAR: Final = {4: 8, 6: 16}
"""By IP version the bits by which addresses near each other may differ: fewer than ranges of nodes have."""


class EndpointPlaces:
    """Which objects have endpoints on a node, or with an address near one.

    What an object no longer has may be among it for a while; all that it has is.

    Keys are in sorted lists: a cluster has each of its pods here twice, and in a set it takes five times the
    memory.
    """

    def __init__(self) -> None:
        self._on: dict[tuple[int, int], list[Key]] = {}
        """By the number of a node's address, see number_of()."""
        self._near: dict[tuple[int, int], list[Key]] = {}
        """By the IP version, and the bits of an address before its last ones (NEAR)."""
        self._order: list[tuple[int, int]] = []
        """What _near has, sorted."""

    def add(self, row: KnownEndpoint | KnownEndpointSlice) -> None:
        """An object as it is now."""
        for endpoint in row.endpoints:
            if (at := number_of(endpoint.node)) is not None:
                _insert(self._on, at, row.key)
            for near in _surroundings(endpoint):
                if _insert(self._near, near, row.key):
                    insort(self._order, near)

    def replace(
        self,
        old: KnownEndpoint | KnownEndpointSlice | None,
        row: KnownEndpoint | KnownEndpointSlice | None,
    ) -> None:
        """An object as it was before and is now: what most changes change, its identity, costs nothing."""
        if old is not None and row is not None and _located(old) == _located(row):
            return
        if old is not None:
            self.remove(old)
        if row is not None:
            self.add(row)

    def remove(self, row: KnownEndpoint | KnownEndpointSlice) -> None:
        """An object as it was before."""
        for endpoint in row.endpoints:
            if (at := number_of(endpoint.node)) is not None:
                _remove(self._on, at, row.key)
            for near in _surroundings(endpoint):
                if _remove(self._near, near, row.key):
                    del self._order[bisect_left(self._order, near)]

    def around(self, node: ClusterNode) -> Iterator[Key]:
        """Objects with an endpoint that this node may concern; some come more than once."""
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


def is_at(places: ChangedPlaces, endpoint: KnownEndpoint) -> bool:
    """Whether its node, or an address of it, is among them."""
    addresses = (prefix.partition("/")[0] for prefix in endpoint.prefixes)
    return places.have_node(endpoint.node) or any(map(places.hold, addresses))


def _surroundings(endpoint: KnownEndpoint) -> Iterator[tuple[int, int]]:
    """For EndpointPlaces."""
    for prefix in endpoint.prefixes:
        if (found := number_of(prefix.partition("/")[0])) is not None:
            yield found[0], found[1] >> NEAR[found[0]]


def _located(row: KnownEndpoint | KnownEndpointSlice) -> list[tuple[str, str]]:
    """All that EndpointPlaces reads of an object."""
    return [(one.node, one.addresses) for one in row.endpoints]


def _insert(index: dict[Place, list[Key]], place: Place, key: Key) -> bool:
    """Put a key into an index; whether it is the first at its place."""
    keys = index.get(place)
    if keys is None:
        index[place] = [key]
        return True
    at = bisect_left(keys, key)
    if at == len(keys) or keys[at] != key:
        keys.insert(at, key)
    return False


def _remove(index: dict[Place, list[Key]], place: Place, key: Key) -> bool:
    """Take a key out of an index; whether it was the last at its place."""
    keys = index.get(place)
    at = bisect_left(keys, key) if keys else 0
    if not keys or at == len(keys) or keys[at] != key:
        return False
    del keys[at]
    if keys:
        return False
    del index[place]
    return True
