"""The map cilium_lxc in memory, and local addresses over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from ipaddress import ip_address

import structlog

from cells.base.addresses import IPAddress
from cells.maps.records.endpoints import LXC_HOST, LxcKey, LxcValue
from cells.maps.target import Codec, MapTable, record
from cells.node.local_addresses import LocalAddresses, LxcTarget, local_address_table, lxc_target
from tests.support.fake_map import SPECS, FakeMap

HOST = LxcValue(flags=LXC_HOST)


class FakeLxcMap(FakeMap[IPAddress, LxcValue]):
    """The fake map by addresses."""

    def __init__(self) -> None:
        keys = Codec[IPAddress](lambda ip: LxcKey(ip).pack(), lambda key: LxcKey.unpack(key).ip)
        super().__init__(SPECS["lxc"], keys, record(LxcValue))

    @property
    def target(self) -> LxcTarget:
        """Return the agent's target for the map."""
        return lxc_target(lambda: self)

    def put(self, rows: Mapping[str, bool]) -> None:
        """Write entries as another program: each of the node, or of endpoint 7."""
        value = {True: HOST, False: LxcValue(ifindex=9, endpoint_id=7, identity=300)}
        for ip, host in rows.items():
            self.rows[ip_address(ip)] = value[host]

    @property
    def hosts(self) -> dict[str, bool]:
        """Return its entries: whether each address is the node's."""
        return {str(ip): row.is_host for ip, row in self.rows.items()}


class LocalAddressesOver(LocalAddresses):
    """Local addresses over such a map; pruned when a test requests it."""

    def __init__(self, kernel: FakeLxcMap) -> None:
        table = local_address_table()
        log = structlog.get_logger()
        self.held = MapTable(table, kernel.target, log, every=math.inf)
        self._kernel = kernel
        super().__init__(table, self.held, log)
        self.read()

    def read(self) -> None:
        """Read the entries of an earlier agent."""
        self.held.left(dict(self._kernel.rows))

    @property
    def drift(self) -> int:
        """Return the number of entries that another program changed."""
        return self.held.reconciler.statistics.drift

    async def sweep(self) -> None:
        """Compare the whole map."""
        await self.held.reconciler.sweep()
