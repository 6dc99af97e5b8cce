"""The map cilium_ipcache as a dict, and an ipcache over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network

import structlog

from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import IdentityFollower, Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheRows, IpcacheSweep, Prefix, prefix_of
from cells.maps.records.cluster import IpcacheValue
from lifecycle import Table


@dataclass
class FakeIpcacheMap:
    """IpcacheMap over a dict. ``broken`` makes every write fail."""

    rows: dict[Prefix, IpcacheValue] = field(default_factory=dict)
    broken: bool = False
    writes: list[tuple[str, str]] = field(default_factory=list)
    voided: int = 0
    """How often remembered verdicts were made void."""

    def dump(self) -> Mapping[Prefix, IpcacheValue]:
        return dict(self.rows)

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        inner = ip_network(prefix)
        covering = [
            each
            for text in self.rows
            if (each := ip_network(text)).version == inner.version and inner.subnet_of(each)  # type: ignore[arg-type]
        ]
        longest = max(covering, key=lambda each: each.prefixlen, default=None)
        return None if longest is None else self.rows[str(longest)]

    def update(self, prefix: Prefix, value: IpcacheValue) -> None:
        self._written("update", prefix)
        self.rows[prefix] = value

    def delete(self, prefix: Prefix) -> None:
        self._written("delete", prefix)
        self.rows.pop(prefix, None)

    def void_verdicts(self) -> None:
        self.voided += 1

    def _written(self, what: str, prefix: Prefix) -> None:
        self.writes.append((what, prefix))
        if self.broken:
            raise OSError(12, "update map cilium_ipcache: Cannot allocate memory")

    def put(self, rows: Mapping[str, int]) -> None:
        """Rows that somebody else has written."""
        self.rows |= {str(ip_network(prefix)): IpcacheValue(identity) for prefix, identity in rows.items()}

    @property
    def identities(self) -> dict[str, int]:
        """What it holds."""
        return {prefix: value.identity for prefix, value in self.rows.items()}

    def of(self, address: IPAddress) -> int | None:
        """The identity in the address's own row."""
        row = self.rows.get(prefix_of(address))
        return None if row is None else row.identity


class IpcacheOver(Ipcache):
    """An ipcache over such a map that is not swept."""

    def __init__(
        self,
        kernel: FakeIpcacheMap,
        identities: Identities | None = None,
        followers: Sequence[IdentityFollower] = (),
    ) -> None:
        table: Table[IpcacheEntry] = Table("ipcache", key=lambda entry: entry.prefix)
        self._held, self._kernel = IpcacheRows(kernel), kernel
        super().__init__(table, self._held, identities=identities, followers=followers)
        self.read()

    async def sweep(self) -> None:
        """Compare the whole map."""
        await IpcacheSweep(self.table, self._held, structlog.get_logger()).run()

    def read(self) -> None:
        """Take what the map holds for what a former agent left."""
        self._held.left(FakeIpcacheMap.dump(self._kernel))
