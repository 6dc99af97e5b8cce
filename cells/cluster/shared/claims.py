"""Addresses of other nodes' pods, as claims in the ipcache.

Controller: ``shared-addresses`` in, claims out.
Needs:  SharedTables, ReadTable[ClusterNode], Identities, Ipcache.   Gives: SharedClaims.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from ipaddress import ip_address
from itertools import islice
from typing import Final, TypeVar

import anyio.lowlevel

from cells.cluster.identity import Identities
from cells.cluster.ipcache import Ipcache, Prefix
from cells.cluster.kvstore import KVStore
from cells.cluster.nodes import ClusterNode
from cells.cluster.shared.addresses import SharedAddress, resource_of
from cells.cluster.shared.tables import SharedTables
from lifecycle import Change, Jobs, ReadTable

Item = TypeVar("Item")
STRETCH: Final = 100
"""Addresses taken in before others get their turn on the event loop: a few milliseconds."""


class SharedClaims:
    """Follows the table once this node is known; no leftover of the map goes before all of it is."""

    def __init__(
        self,
        store: KVStore,
        shared: SharedTables,
        nodes: ReadTable[ClusterNode],
        *,
        identities: Identities,
        ipcache: Ipcache,
        jobs: Jobs,
    ) -> None:
        self._addresses = shared.addresses
        self._nodes = nodes
        self._identities = identities
        self._ipcache = ipcache
        self._claimed: dict[str, Prefix] = {}
        if store.enabled:
            self._first = ipcache.table.initializer("kvstore")
            jobs.observe("claim", self._rounds, self._follow)

    async def _rounds(self) -> AsyncIterator[Sequence[Change[SharedAddress]] | None]:
        """None at the beginning: everything is to be looked at.

        Identities come first: by a number whose labels are unknown no rule would deny.
        """
        await self._identities.table.wait_initialized()
        await self._addresses.wait_initialized()
        changes = self._addresses.changes(self._addresses.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: Sequence[Change[SharedAddress]] | None) -> None:
        """Raises OSError where the ipcache cannot follow: then all is looked at again."""
        keys = [str(change.key) for change in changes] if changes is not None else self._all()
        for stretch in _stretches(keys):
            self._take(stretch)
            await anyio.lowlevel.checkpoint()
        if changes is None:
            self._first.done()

    def _all(self) -> list[str]:
        return list({*self._claimed, *(row.address for row in self._addresses.all())})

    def _take(self, keys: Iterable[str]) -> None:
        claimed: list[SharedAddress] = []
        for key in keys:
            row = self._addresses.get(key)
            if row is not None and not self._is_here(row.node):
                claimed.append(row)
            elif (prefix := self._claimed.pop(key, None)) is not None:
                self._ipcache.withdraw(resource_of(key), [prefix])
        self._ipcache.upsert(*(row.claim for row in claimed))
        self._claimed.update((row.address, row.prefix) for row in claimed)

    def _is_here(self, node: str) -> bool:
        try:
            ip = ip_address(node)
        except ValueError:
            return False
        return any(found.local for found in self._nodes.by("address").get(ip))


def _stretches(items: Iterable[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while stretch := list(islice(rest, STRETCH)):
        yield stretch
