"""CiliumEndpoints of other nodes to claims in the ipcache.

Source: the kinds KNOWN_ENDPOINTS or KNOWN_ENDPOINT_SLICES in; Table[RemoteEndpoint] and claims out.
        Objects and rows are the same values: there is one of each pod.
Needs:  Resources, ReadTable[ClusterNode], Identities, Ipcache.   Gives: RemoteEndpoints.
Source: Cilium 1.17, CiliumEndpoint watcher. An address that two nodes claim is the latest one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, ip_address
from itertools import islice
from typing import Any, Final, TypeVar

import anyio.lowlevel

from cells.cluster.endpoints.settings import ClusterEndpointSettings, EndpointObjects
from cells.cluster.identity import INIT, Identities, Scope, scope_of
from cells.cluster.ipcache import Ipcache, IpcacheEntry, Source
from cells.cluster.nodes import ClusterNode
from cells.ipam import IPAddress
from cells.kubernetes import (
    KNOWN_ENDPOINT_SLICES,
    KNOWN_ENDPOINTS,
    KnownEndpoint,
    KnownEndpointSlice,
    Resources,
)
from lifecycle import Change, Jobs, Logger, ReadTable, Table

Item = TypeVar("Item")
STRETCH: Final = 50
"""Endpoints taken in before others get their turn on the event loop: a few milliseconds."""


RemoteEndpoint = KnownEndpoint
"""A row of the table ``remote-endpoints``: a pod of another node."""


def remote_endpoints() -> Table[RemoteEndpoint]:
    """The ``remote-endpoints`` table, by namespace and name."""
    return Table("remote-endpoints", key=lambda one: one.key)


def resource_of(endpoint: RemoteEndpoint) -> str:
    """Whose the claims are."""
    return f"cep/{endpoint.namespace}/{endpoint.name}"


def claims_of(endpoint: RemoteEndpoint) -> Iterator[IpcacheEntry]:
    """Each of its addresses, by way of its node."""
    resource = resource_of(endpoint)
    for prefix in endpoint.prefixes:
        yield IpcacheEntry(
            prefix=prefix,
            identity=endpoint.identity,
            source=Source.CUSTOM_RESOURCE,
            resource=resource,
            tunnel_endpoint=_tunnel_endpoint(endpoint.node),
            encrypt_key=endpoint.encrypt_key,
        )


class RemoteEndpoints:
    """Follows objects once all of them, and this node, are known; no leftover of the map goes before."""

    def __init__(
        self,
        settings: ClusterEndpointSettings,
        objects: EndpointObjects,
        resources: Resources,
        nodes: ReadTable[ClusterNode],
        table: Table[RemoteEndpoint],
        *,
        identities: Identities,
        ipcache: Ipcache,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.table = table
        self._log = log
        self._nodes = nodes
        self._identities = identities
        self._ipcache = ipcache
        self._claimed = ipcache.table.initializer("cluster-endpoints")
        self._first = table.initializer("cluster-endpoints")
        self._slices = settings.enable_cilium_endpoint_slice
        self._told: dict[object, tuple[tuple[str, str], ...]] = {}
        """By slice: the endpoints in it."""
        self._tellers: Counter[tuple[str, str]] = Counter()
        """By endpoint: how many slices contain it; two while it moves from one to another."""
        self._here: dict[str, bool] = {}
        """Whether an address is one of this node's, as of a revision of the table of nodes."""
        self._here_at = -1
        if not objects.served:
            self._claimed.done()
            self._first.done()
            return
        kind = KNOWN_ENDPOINT_SLICES if settings.enable_cilium_endpoint_slice else KNOWN_ENDPOINTS
        self._objects: Table[Any] = resources.table(kind)
        jobs.observe(kind.plural, self._rounds, self._follow)

    async def _rounds(self) -> AsyncIterator[Sequence[Change[Any]] | None]:
        """None at the beginning: everything is to be looked at.

        Identities come first: by a number whose labels are unknown no rule would deny.
        """
        await self._identities.table.wait_initialized()
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
        known = self._told if self._slices else self.table.keys()
        gone = [key for key in known if key not in self._objects]
        for lost in stretches(gone):
            self._take(dict.fromkeys(lost, ()))
            await anyio.lowlevel.checkpoint()
        for keys in stretches(list(self._objects.keys())):
            self._take({key: self._endpoints_of(self._objects.get(key)) for key in keys})
            await anyio.lowlevel.checkpoint()

    def _endpoints_of(self, row: KnownEndpoint | KnownEndpointSlice | None) -> tuple[RemoteEndpoint, ...]:
        if row is None:
            return ()
        found = row.endpoints if isinstance(row, KnownEndpointSlice) else (row,)
        reached = (one for one in found if one.is_reached and not self._is_here(one.node))
        return tuple(one for one in reached if self._may_be_of_a_pod(one))

    def _may_be_of_a_pod(self, endpoint: RemoteEndpoint) -> bool:
        """Whether its identity is one that a pod can have.

        Who writes a CiliumEndpoint must not make an address the host's, the API server's or another node's.
        """
        number = endpoint.identity
        if number == INIT or scope_of(number) in (Scope.CLUSTER, Scope.WELL_KNOWN):
            return True
        self._log.warning(
            "refusing a CiliumEndpoint with an identity that no pod has",
            endpoint="/".join(endpoint.key),
            identity=number,
        )
        return False

    def _take(self, told: dict[Any, tuple[RemoteEndpoint, ...]]) -> None:
        """Set the endpoints that these objects contain. Raises OSError if the ipcache cannot be updated."""
        now = {one.key: one for found in told.values() for one in found}
        names = {name for key in told for name in self._told.get(key, ())} if self._slices else told.keys()
        gone = [row for name in names if name not in now and (row := self._last(name, told)) is not None]
        self._claim([one for name, one in now.items() if self.table.get(name) != one])
        for row in gone:
            self._ipcache.withdraw(resource_of(row), row.prefixes)
        with self.table.txn() as rows:
            for row in gone:
                rows.delete(row.key)
            for one in now.values():
                rows.put(one)
        if self._slices:
            self._note(told)

    def _last(self, name: Any, told: Mapping[Any, object]) -> RemoteEndpoint | None:
        """The row of an endpoint that these objects no longer contain, unless others do."""
        if self._slices:
            before = sum(name in self._told.get(key, ()) for key in told)
            if self._tellers[name] > before:
                return None
        return self.table.get(name)

    def _note(self, told: Mapping[Any, tuple[RemoteEndpoint, ...]]) -> None:
        for key, found in told.items():
            names = tuple(one.key for one in found)
            for name in self._told.pop(key, ()):
                self._tellers[name] -= 1
                if not self._tellers[name]:
                    del self._tellers[name]
            self._tellers.update(names)
            if names:
                self._told[key] = names

    def _claim(self, endpoints: Collection[RemoteEndpoint]) -> None:
        for one in endpoints:
            before = self.table.get(one.key)
            if before is not None and (left := set(before.prefixes).difference(one.prefixes)):
                self._ipcache.withdraw(resource_of(one), left)
        self._ipcache.upsert(*(claim for one in endpoints for claim in claims_of(one)))

    def _is_here(self, node: str) -> bool:
        if self._here_at != self._nodes.revision:
            self._here.clear()
            self._here_at = self._nodes.revision
        found = self._here.get(node)
        if found is None:
            ip = _address(node)
            own = ip is not None and any(one.local for one in self._nodes.by("address").get(ip))
            found = self._here[node] = own
        return found


def stretches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """The items, so many at a time as may be taken in at once."""
    rest = iter(items)
    while stretch := list(islice(rest, STRETCH)):
        yield stretch


def _address(text: str) -> IPAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


@lru_cache(maxsize=8192)
def _tunnel_endpoint(node: str) -> IPv4Address:
    ip = _address(node)
    return ip if isinstance(ip, IPv4Address) else IPv4Address(0)
