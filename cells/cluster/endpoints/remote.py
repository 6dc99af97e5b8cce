"""CiliumEndpoints of other nodes to claims in the ipcache.

Source: Table[CiliumEndpoint] or Table[CiliumEndpointSlice] in; Table[RemoteEndpoint] and claims out.
Needs:  Resources, ReadTable[ClusterNode], Identities, EndpointPolicies, Ipcache.   Gives: RemoteEndpoints.
Source: Cilium 1.17, CiliumEndpoint watcher. An address that two nodes claim is the latest one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from ipaddress import IPv4Address, ip_address
from itertools import islice
from typing import Any, Final, TypeVar

import anyio.lowlevel
import msgspec

from cells.cluster.endpoints.settings import ClusterEndpointSettings
from cells.cluster.identity import Identities
from cells.cluster.ipcache import Ipcache, IpcacheEntry, Source, prefix_of
from cells.cluster.nodes import ClusterNode
from cells.ipam import IPAddress
from cells.kubernetes import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CiliumEndpoint,
    CiliumEndpointSlice,
    Resources,
)
from cells.policy.maps import EndpointPolicies
from lifecycle import Change, Jobs, ReadTable, Table

Item = TypeVar("Item")
STRETCH: Final = 100
"""Endpoints taken in before others get their turn on the event loop: a few milliseconds."""


class Port(msgspec.Struct, frozen=True, gc=False):
    """A port of a pod, by name."""

    name: str
    port: int
    protocol: str


class RemoteEndpoint(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A row of the table ``remote-endpoints``: a pod of another node."""

    namespace: str
    name: str
    identity: int
    node: str
    """The address of its node."""
    addresses: tuple[IPAddress, ...]
    encrypt_key: int = 0
    ports: tuple[Port, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def resource(self) -> str:
        """Whose the claims are."""
        return f"cep/{self.namespace}/{self.name}"

    def claims(self) -> Iterator[IpcacheEntry]:
        """Each of its addresses, by way of its node."""
        for ip in self.addresses:
            yield IpcacheEntry(
                prefix=prefix_of(ip),
                identity=self.identity,
                source=Source.CUSTOM_RESOURCE,
                resource=self.resource,
                tunnel_endpoint=_tunnel_endpoint(self.node),
                encrypt_key=self.encrypt_key,
            )


def remote_endpoints() -> Table[RemoteEndpoint]:
    """The ``remote-endpoints`` table, by namespace and name."""
    return Table("remote-endpoints", key=lambda one: one.key)


def of_endpoint(row: CiliumEndpoint) -> RemoteEndpoint | None:
    """What a CiliumEndpoint tells; None while it has no identity or no address."""
    status = row.status
    if status.identity is None or status.networking is None:
        return None
    return _remote(
        row.namespace,
        row.name,
        identity=status.identity.id,
        networking=status.networking,
        key=status.encryption.key,
        ports=status.named_ports,
    )


def of_slice(row: CiliumEndpointSlice) -> Iterator[RemoteEndpoint]:
    """What a CiliumEndpointSlice tells."""
    for one in row.endpoints:
        if one.networking is not None:
            found = _remote(
                row.of_namespace,
                one.name,
                identity=one.id,
                networking=one.networking,
                key=one.encryption.key,
                ports=one.named_ports,
            )
            if found is not None:
                yield found


class RemoteEndpoints:
    """Follows objects once all of them, and this node, are known; no leftover of the map goes before."""

    def __init__(
        self,
        settings: ClusterEndpointSettings,
        resources: Resources,
        nodes: ReadTable[ClusterNode],
        table: Table[RemoteEndpoint],
        *,
        identities: Identities,
        policies: EndpointPolicies,
        ipcache: Ipcache,
        jobs: Jobs,
    ) -> None:
        self.table = table
        self._nodes = nodes
        self._identities = identities
        self._policies = policies
        self._ipcache = ipcache
        self._claimed = ipcache.table.initializer("cluster-endpoints")
        self._first = table.initializer("cluster-endpoints")
        self._told: dict[object, tuple[tuple[str, str], ...]] = {}
        """By object: the endpoints it tells of."""
        self._tellers: Counter[tuple[str, str]] = Counter()
        """By endpoint: how many objects tell of it; two, while it moves from slice to slice."""
        kind = CILIUM_ENDPOINT_SLICES if settings.enable_cilium_endpoint_slice else CILIUM_ENDPOINTS
        self._objects: Table[Any] = resources.table(kind)
        jobs.observe(kind.plural, self._rounds, self._follow)

    async def _rounds(self) -> AsyncIterator[Sequence[Change[Any]] | None]:
        """None at the beginning: everything is to be looked at."""
        await self._objects.wait_initialized()
        await self._nodes.wait_initialized()
        changes = self._objects.changes(self._objects.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: Sequence[Change[Any]] | None) -> None:
        if changes is None:
            await self._all()
            self._claimed.done()
            self._first.done()
            return
        for stretch in stretches(changes):
            self._take({change.key: self._endpoints_of(change.row) for change in stretch})
            await anyio.lowlevel.checkpoint()

    async def _all(self) -> None:
        gone = [key for key in self._told if self._objects.get(key) is None]
        self._take(dict.fromkeys(gone, ()))
        for stretch in stretches(self._objects.items()):
            self._take({key: self._endpoints_of(self._objects.get(key)) for key, *_ in stretch})
            await anyio.lowlevel.checkpoint()

    def _endpoints_of(self, row: Any) -> tuple[RemoteEndpoint, ...]:
        if row is None:
            return ()
        if isinstance(row, CiliumEndpointSlice):
            found = list(of_slice(row))
        else:
            one = of_endpoint(row)
            found = [] if one is None else [one]
        return tuple(one for one in found if not self._is_here(one.node))

    def _take(self, told: dict[Any, tuple[RemoteEndpoint, ...]]) -> None:
        """These objects tell of these endpoints now. Raises OSError where the ipcache cannot follow."""
        now = {one.key: one for found in told.values() for one in found}
        before = Counter(name for key in told for name in self._told.get(key, ()))
        gone = [
            row
            for name, times in before.items()
            if name not in now and self._tellers[name] == times and (row := self.table.get(name)) is not None
        ]
        self._claim([one for name, one in now.items() if self.table.get(name) != one])
        for row in gone:
            self._ipcache.withdraw(row.resource, map(prefix_of, row.addresses))
        with self.table.txn() as rows:
            for row in gone:
                rows.delete(row.key)
            for one in now.values():
                rows.put(one)
        for key, found in told.items():
            names = tuple(one.key for one in found)
            self._tellers.subtract(self._told.pop(key, ()))
            self._tellers.update(names)
            if names:
                self._told[key] = names
        for row in gone:
            del self._tellers[row.key]

    def _claim(self, endpoints: Collection[RemoteEndpoint]) -> None:
        """Policies know an identity before the ipcache gives it to packets."""
        for number in {one.identity for one in endpoints}:
            if (known := self._identities.get(number)) is not None:
                self._policies.introduce(number, known.labels)
        for one in endpoints:
            if (before := self.table.get(one.key)) is not None:
                left = set(before.addresses) - set(one.addresses)
                self._ipcache.withdraw(one.resource, map(prefix_of, left))
        self._ipcache.upsert(*(claim for one in endpoints for claim in one.claims()))

    def _is_here(self, node: str) -> bool:
        ip = _address(node)
        return ip is not None and any(found.local for found in self._nodes.by("address").get(ip))


def stretches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """The items, so many at a time as may be taken in at once."""
    rest = iter(items)
    while stretch := list(islice(rest, STRETCH)):
        yield stretch


def _remote(
    namespace: str, name: str, *, identity: int, networking: Any, key: int, ports: Iterable[Any] | None
) -> RemoteEndpoint | None:
    texts = [text for pair in networking.addressing or () for text in (pair.ipv6, pair.ipv4) if text]
    addresses = tuple(ip for text in texts if (ip := _address(text)) is not None)
    if not 0 < identity < 1 << 32 or not 0 <= key < 1 << 8 or not addresses:
        return None  # nonsense, or of a pod that is not ready yet
    return RemoteEndpoint(
        namespace=namespace,
        name=name,
        identity=identity,
        node=networking.node,
        addresses=addresses,
        encrypt_key=key,
        ports=tuple(Port(one.name, one.port, one.protocol) for one in ports or ()),
    )


def _address(text: str) -> IPAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _tunnel_endpoint(node: str) -> IPv4Address:
    ip = _address(node)
    return ip if isinstance(ip, IPv4Address) else IPv4Address(0)
