"""The map cilium_lxc as a dict, and local addresses over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

import structlog

from cells.base.addresses import IPAddress
from cells.maps.records.endpoints import LXC_HOST, LxcValue
from cells.node.local_addresses import LocalAddress, LocalAddresses, LxcRows, local_address_table
from lifecycle import Reconciler

HOST = LxcValue(flags=LXC_HOST)


@dataclass
class FakeLxcMap:
    """LxcMap over a dict. ``broken`` makes every write fail."""

    rows: dict[IPAddress, LxcValue] = field(default_factory=dict)
    broken: bool = False
    writes: list[tuple[str, str]] = field(default_factory=list)
    voided: int = 0
    """How often remembered verdicts were made void."""

    def dump(self) -> Mapping[IPAddress, LxcValue]:
        return dict(self.rows)

    def lookup(self, ip: IPAddress) -> LxcValue | None:
        return self.rows.get(ip)

    def update(self, ip: IPAddress, value: LxcValue) -> None:
        self._written("update", ip)
        self.rows[ip] = value

    def delete(self, ip: IPAddress) -> None:
        self._written("delete", ip)
        self.rows.pop(ip, None)

    def void_verdicts(self) -> None:
        self.voided += 1

    def _written(self, what: str, ip: IPAddress) -> None:
        self.writes.append((what, str(ip)))
        if self.broken:
            raise OSError(12, "update map cilium_lxc: Cannot allocate memory")

    def put(self, rows: Mapping[str, bool]) -> None:
        """Rows that somebody else has written: whether each is the node's, or of endpoint 7."""
        value = {True: HOST, False: LxcValue(ifindex=9, endpoint_id=7, identity=300)}
        self.rows |= {ip_address(ip): value[host] for ip, host in rows.items()}

    @property
    def hosts(self) -> dict[str, bool]:
        """What it holds: whether each address is the node's."""
        return {str(ip): row.is_host for ip, row in self.rows.items()}


class LocalAddressesOver(LocalAddresses):
    """Local addresses over such a map; swept when a test says so."""

    def __init__(self, kernel: FakeLxcMap) -> None:
        table = local_address_table()
        log = structlog.get_logger()
        self.rows, self._kernel = LxcRows(table, kernel, log), kernel
        self._reconciler: Reconciler[IPAddress, LocalAddress] = Reconciler(
            table, self.rows, full_every=math.inf
        )
        super().__init__(table, self.rows, log)
        self.read()

    def read(self) -> None:
        """Take what the map holds for what a former agent left."""
        self.rows.left(self._kernel.dump())

    @property
    def drift(self) -> int:
        """How many rows somebody else has changed."""
        return self._reconciler.statistics.drift

    async def sweep(self) -> None:
        """Compare the whole map."""
        await self._reconciler.sweep()
