"""The owners of the node's local addresses: the node itself, or endpoints; the only writer of cilium_lxc.

Reconciler: other cells claim addresses for the node or an endpoint; the effective claim is the address's
entry in the map. If both have a claim, the node's is effective.

Why: an address may be claimed by the node and by a pod. When the node drops its claim, the pod's becomes
effective again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import structs

from cells.base.addresses import IPAddress
from cells.maps.map import Map
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import LXC_HOST, LxcKey, LxcValue
from cells.maps.target import Codec, MapTable, MapTarget, record
from lifecycle import Jobs, Lifecycle, Logger, Table, Tables, invoke, minutes, module, provide

__all__ = ["LocalAddress", "LocalAddresses", "LxcTarget", "cell"]


# Rows, and the map cilium_lxc as a target.

HOST: Final = LxcValue(flags=LXC_HOST)
"""The entry of the node's own addresses in cilium_lxc."""


class LocalAddress(msgspec.Struct, frozen=True):
    """A row of the table ``local-addresses``: an address of this node and its owner."""

    ip: IPAddress
    host: bool
    """Whether the node has the address; then no endpoint gets its packets."""
    endpoint: int = 0
    """The id of the endpoint that claims it, effective or not; 0 without one."""
    row: LxcValue | None = None
    """The endpoint's entry in cilium_lxc."""

    @property
    def value(self) -> LxcValue:
        """The effective entry in cilium_lxc."""
        return HOST if self.host or self.row is None else self.row


LxcTarget = MapTarget[IPAddress, LocalAddress, LxcValue]


def lxc_target(maps: Callable[[], Map]) -> LxcTarget:
    """Return the map cilium_lxc as a reconciler's target."""
    keys = Codec[IPAddress](lambda ip: LxcKey(ip).pack(), lambda key: LxcKey.unpack(key).ip)
    return MapTarget(lambda: (maps(),), keys, record(LxcValue), lambda row: row.value)


# Claims of addresses by the node and by endpoints.
#
# A claim is in the map when the call returns, because a pod's address must be before its link comes up. The
# sweep corrects changes by other programs, failed writes, and entries of the previous run.


class LocalAddresses:
    """Claims of the node's local addresses.

    A source of initial claims registers ``table.initializer()`` in its constructor. Until all are done, no
    unclaimed entry is deleted from the map.
    """

    def __init__(
        self,
        table: Table[IPAddress, LocalAddress],
        rows: MapTable[IPAddress, LocalAddress, LxcValue],
        log: Logger,
    ) -> None:
        self.table = table
        """Claims by address."""
        self._rows = rows
        self._log = log

    @property
    def leftovers(self) -> Mapping[IPAddress, LxcValue]:
        """Unclaimed entries of the previous run. Raises NotStartedError before the map was read."""
        return self._rows.leftovers

    def put_endpoint(self, ips: Iterable[IPAddress], value: LxcValue) -> None:
        """Claim addresses for an endpoint, with this entry.

        Raises OSError; then the claims are unchanged.
        """
        rows: dict[IPAddress, LocalAddress | None] = {}
        for ip in ips:
            known = self.table.get(ip)
            rows[ip] = LocalAddress(ip, known is not None and known.host, value.endpoint_id, value)
        self._rows.write(rows, undo=True)

    def drop_endpoint(self, ip: IPAddress, endpoint_id: int) -> None:
        """Drop an endpoint's claim of an address, unless another endpoint has claimed it since.

        Raises OSError; then the claim is removed, and the next sweep deletes the entry.
        """
        known = self.table.get(ip)
        if known is None:
            left = self.leftovers.get(ip)
            if left is not None and left.endpoint_id == endpoint_id:
                self._rows.write({ip: None})
        elif known.row is not None and known.endpoint == endpoint_id:
            self._remove(LocalAddress(ip, known.host))

    def adopt(self, ips: Iterable[IPAddress]) -> None:
        """Claim addresses for the endpoints of their entries in the map, without writing it.

        The node's entries are skipped, as are addresses without an entry.
        """
        found = {ip: left for ip in ips if (left := self.leftovers.get(ip)) is not None and not left.is_host}
        self._rows.adopt({ip: LocalAddress(ip, False, left.endpoint_id, left) for ip, left in found.items()})

    def put_host(self, ip: IPAddress) -> None:
        """Claim the address for the node. Raises OSError; then the claim is unchanged."""
        known = self.table.get(ip)
        if (endpoint_id := self._endpoint_of(ip)) is not None:
            text = "address of this node belongs to an endpoint, which no longer receives its packets"
            self._log.warning(text, ip=str(ip), endpoint=endpoint_id)
        row = LocalAddress(ip, True) if known is None else structs.replace(known, host=True)
        self._rows.write({ip: row}, undo=True)

    def drop_host(self, ip: IPAddress) -> None:
        """Drop the node's claim; an endpoint's claim becomes effective.

        Raises OSError; then the claim is removed, and the next sweep writes the entry.
        """
        known = self.table.get(ip)
        if known is not None and known.host:
            self._remove(structs.replace(known, host=False))

    def _endpoint_of(self, ip: IPAddress) -> int | None:
        """Return the endpoint with the effective claim, or None."""
        known = self.table.get(ip)
        if known is not None:
            return None if known.host or known.row is None else known.endpoint
        left = self.leftovers.get(ip)
        return None if left is None or left.is_host else left.endpoint_id

    def _remove(self, row: LocalAddress) -> None:
        """Write the remaining claim ``row``, or remove the row if there is none."""
        claimed = row.host or row.row is not None
        self._rows.write({row.ip: row if claimed else None})


# Assembly of the cell.

SWEEP: Final = minutes(1)


def local_address_table() -> Table[IPAddress, LocalAddress]:
    """Return the ``local-addresses`` table, by address."""
    return Table("local-addresses", key=lambda row: row.ip)


def lxc_map(maps: Maps) -> LxcTarget:
    """Return the map cilium_lxc as a target."""
    return lxc_target(lambda: maps.lxc)


def local_addresses(
    table: Table[IPAddress, LocalAddress],
    kernel: LxcTarget,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> LocalAddresses:
    """Return LocalAddresses; its hook reads the map.

    The map is swept when all sources are initialized, every minute, and after a failed write.
    """
    rows = MapTable(table, kernel, log, every=SWEEP)
    rows.register("the local addresses", lifecycle=lifecycle, jobs=jobs, tables=tables)
    return LocalAddresses(table, rows, log)


cell = module(
    "local-addresses",
    "The owner of every address of the node",
    provide(local_address_table, lxc_map, local_addresses),
    invoke(LocalAddresses),
)
