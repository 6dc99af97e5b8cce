"""The map cilium_ipcache in memory, and an ipcache over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ipaddress import ip_network

import structlog

from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import IdentityFollower, Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Prefix, ipcache_target, prefix_of
from cells.maps.records.cluster import IpcacheValue, ipcache_key, ipcache_prefix
from cells.maps.target import Codec, MapTable, record
from lifecycle import Table
from tests.support.fake_map import SPECS, FakeMap


class FakeIpcacheMap(FakeMap[Prefix, IpcacheValue]):
    """The fake map by prefixes and identities."""

    def __init__(self) -> None:
        super().__init__(SPECS["ipcache"], Codec(ipcache_key, ipcache_prefix), record(IpcacheValue))

    @property
    def target(self) -> IpcacheTarget:
        """Return the agent's target for the map."""
        return ipcache_target(lambda: self)

    def put(self, rows: Mapping[str, int]) -> None:
        """Write entries as another program."""
        for prefix, identity in rows.items():
            self.rows[str(ip_network(prefix))] = IpcacheValue(identity)

    @property
    def identities(self) -> dict[str, int]:
        """Return its entries."""
        return {prefix: value.identity for prefix, value in self.rows.items()}

    def of(self, address: IPAddress) -> int | None:
        """Return the identity in the address's own entry."""
        row = self.rows.get(prefix_of(address))
        return None if row is None else row.identity


class IpcacheOver(Ipcache):
    """An ipcache over such a map, not yet pruned."""

    def __init__(
        self,
        kernel: FakeIpcacheMap,
        identities: Identities | None = None,
        followers: Sequence[IdentityFollower] = (),
    ) -> None:
        table: Table[str, IpcacheEntry] = Table("ipcache", key=lambda entry: entry.prefix)
        self.held = MapTable(table, kernel.target, structlog.get_logger(), every=math.inf)
        self._kernel = kernel
        super().__init__(table, self.held, identities=identities, followers=followers)
        self.read()

    async def sweep(self) -> None:
        """Compare the whole map."""
        await self.held.reconciler.sweep()

    def read(self) -> None:
        """Read the entries of an earlier agent."""
        self.held.left(dict(self._kernel.rows))
