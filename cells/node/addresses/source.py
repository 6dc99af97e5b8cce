"""Keeps Table[NodeAddress] as the Node object, the settings and the kernel have it.

For:    cells that publish the node.   Needs: see the cell.   Gives: NodeAddresses, address_table().
"""

from cells.config import AgentConfig
from cells.ipam import Family, IPAddress
from cells.node.addresses.choice import InternalIP, NodeAddress, Origin, choose
from cells.node.addresses.kernel import DefaultRoute
from cells.node.addresses.settings import AddressSettings
from cells.node.devices import Device
from lifecycle import Hook, Jobs, Lifecycle, Logger, ReadTable, Table


def address_table() -> Table[NodeAddress]:
    """The ``node-addresses`` table, by family; NodeAddresses fills it."""
    return Table("node-addresses", key=lambda row: row.family)


def default_route() -> DefaultRoute:
    """This node's."""
    return DefaultRoute()


class NodeAddresses:
    """The node's own addresses; who takes it starts once they are known."""

    def __init__(
        self,
        agent: AgentConfig,
        settings: AddressSettings,
        table: Table[NodeAddress],
        devices: Table[Device],
        route: DefaultRoute,
        internal: ReadTable[InternalIP] | None = None,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        on = {Family.IPV6: agent.ipv6, Family.IPV4: agent.ipv4}
        self._families = [family for family, enabled in on.items() if enabled]
        self._settings = settings
        self._table = table
        self._devices = devices
        self._route = route
        self._internal = internal
        self._log = log
        self._first = table.initializer("first look at devices and routes")
        lifecycle.append(Hook("find the node's addresses", self._start))
        jobs.observe("watch devices", devices.changes, self._look)
        jobs.observe("watch default routes", route.hints, self._look)
        if internal is not None:
            jobs.observe("watch the Node object", internal.changes, self._look)

    def get(self, family: Family) -> IPAddress | None:
        """The node's own address of the family; None if it has none that others can reach."""
        found = self._table.get(family)
        return None if found is None else found.ip

    def all(self) -> dict[Family, IPAddress]:
        """Those there are: IPv6, then IPv4."""
        return {family: ip for family in self._families if (ip := self.get(family)) is not None}

    async def _start(self) -> None:
        await self._devices.wait_initialized()
        self._refresh()
        self._first.done()
        held = {address.ip for device in self._devices.all() for address in device.addresses}
        for row in self._table.all():
            if row.origin is Origin.SETTING and row.ip not in held:
                self._log.warning(
                    f"{row.family}-node={row.ip} is on none of the node's devices: others may not reach it"
                )

    async def _look(self, _: object) -> None:
        self._refresh()

    def _refresh(self) -> None:
        devices = self._devices.all()
        with self._table.txn() as rows:
            for family in self._families:
                internal = self._internal.get(family) if self._internal is not None else None
                found = choose(
                    family,
                    internal=internal.ip if internal is not None else None,
                    configured=self._settings.address(family),
                    route_source=self._route.source(family),
                    devices=devices,
                )
                before = self._table.get(family)
                if found is not None:
                    rows.put(found)
                elif before is not None:
                    rows.delete(family)
                if found != before:
                    told = f"{found.ip} ({found.origin})" if found is not None else "none"
                    self._log.info("address of the node", family=str(family), ip=told)
