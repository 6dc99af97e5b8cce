"""The map cilium_ipcache as a dict, and an ipcache over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

import structlog

from cells.cluster.ipcache import Ipcache, IpcacheEntry, IpcacheRows
from cells.ipam import IPAddress, IPNetwork
from cells.maps import IpcacheValue
from lifecycle import Table


@dataclass
class FakeIpcacheMap:
    """IpcacheMap over a dict. ``broken`` makes every write fail."""

    rows: dict[IPNetwork, IpcacheValue] = field(default_factory=dict)
    broken: bool = False
    writes: list[tuple[str, str]] = field(default_factory=list)
    voided: int = 0
    """How often remembered verdicts were made void."""

    def dump(self) -> Mapping[IPNetwork, IpcacheValue]:
        return dict(self.rows)

    def lookup(self, prefix: IPNetwork) -> IpcacheValue | None:
        covering = [
            each
            for each in self.rows
            if each.version == prefix.version and prefix.subnet_of(each)  # type: ignore[arg-type]
        ]
        longest = max(covering, key=lambda each: each.prefixlen, default=None)
        return None if longest is None else self.rows[longest]

    def update(self, prefix: IPNetwork, value: IpcacheValue) -> None:
        self._written("update", prefix)
        self.rows[prefix] = value

    def delete(self, prefix: IPNetwork) -> None:
        self._written("delete", prefix)
        self.rows.pop(prefix, None)

    def void_verdicts(self) -> None:
        self.voided += 1

    def _written(self, what: str, prefix: IPNetwork) -> None:
        self.writes.append((what, str(prefix)))
        if self.broken:
            raise OSError(12, "update map cilium_ipcache: Cannot allocate memory")

    def put(self, rows: Mapping[str, int]) -> None:
        """Rows that somebody else has written."""
        self.rows |= {ip_network(prefix): IpcacheValue(identity) for prefix, identity in rows.items()}

    @property
    def identities(self) -> dict[str, int]:
        """What it holds."""
        return {str(prefix): value.identity for prefix, value in self.rows.items()}

    def of(self, address: IPAddress) -> int | None:
        """The identity in the address's own row."""
        row = self.rows.get(ip_network(address))
        return None if row is None else row.identity


class IpcacheOver(Ipcache):
    """An ipcache over such a map that is not swept."""

    def __init__(self, kernel: FakeIpcacheMap) -> None:
        table: Table[IpcacheEntry] = Table("ipcache", key=lambda entry: entry.prefix)
        self._held, self._kernel = IpcacheRows(table, kernel, structlog.get_logger()), kernel
        super().__init__(table, self._held)
        self.read()

    def read(self) -> None:
        """Take what the map holds for what a former agent left."""
        self._held.left(self._kernel.dump())
