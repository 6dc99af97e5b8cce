"""Which addresses are on this node, and the owner of each: the node itself, or an endpoint.

Reconciler: other cells claim addresses, for the node or for an endpoint. The claim that counts is the
            address's row in the map cilium_lxc, and is its only writer; if both have one, the node's is used.
Why:        an address may be the node's and a pod's at once. Neither needs to know of the other: where the
            node gives it up, the pod's counts again.
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
from lifecycle import Hook, Jobs, Lifecycle, Logger, Table, Tables, invoke, minutes, module, provide

__all__ = ["LocalAddress", "LocalAddresses", "LxcTarget", "cell"]


# The rows of cilium_lxc: written where they differ, compared as a whole now and then.

HOST: Final = LxcValue(flags=LXC_HOST)
"""What an address of the node itself has in cilium_lxc."""


class LocalAddress(msgspec.Struct, frozen=True):
    """The owner of an address of this node; a row of the table ``local-addresses``."""

    ip: IPAddress
    host: bool
    """Whether the node itself has it; then no endpoint gets its packets."""
    endpoint: int = 0
    """The number of the endpoint that has it, or would have it if the node did not; 0: none."""
    row: LxcValue | None = None
    """What that endpoint has in cilium_lxc."""

    @property
    def value(self) -> LxcValue:
        """What the address has in cilium_lxc."""
        return HOST if self.host or self.row is None else self.row


LxcTarget = MapTarget[IPAddress, LocalAddress, LxcValue]


def lxc_target(maps: Callable[[], Map]) -> LxcTarget:
    """The map cilium_lxc as the target of a reconciler."""
    keys = Codec[IPAddress](lambda ip: LxcKey(ip).pack(), lambda key: LxcKey.unpack(key).ip)
    return MapTarget(lambda: (maps(),), keys, record(LxcValue), lambda row: row.value)


# Claims of addresses: by the node and by endpoints, in the map at once.
#
# A claim is in the map when the call returns: that of a pod's address must be, before its link comes up. The
# sweep is for what others changed, what the kernel refused, and what an earlier agent left.


class LocalAddresses:
    """The owner of every address of this node.

    A source that has claims from the start announces itself by ``table.initializer()`` in its constructor.
    Until all of them are done, no row of the map goes for want of a claim.
    """

    def __init__(
        self,
        table: Table[IPAddress, LocalAddress],
        rows: MapTable[IPAddress, LocalAddress, LxcValue],
        log: Logger,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        """``refused`` is called when the kernel refused a row: a sweep is due."""
        self.table = table
        """The claims that count, by address."""
        self._rows = rows
        self._log = log
        self._refused = refused

    @property
    def leftovers(self) -> Mapping[IPAddress, LxcValue]:
        """Rows of the map that are not claimed yet; raises NotStartedError before the map was read."""
        return self._rows.leftovers

    def put_endpoint(self, ips: Iterable[IPAddress], value: LxcValue) -> None:
        """The endpoint of this value has the addresses. Raises OSError: then the claims are as they were."""
        rows: dict[IPAddress, LocalAddress | None] = {}
        for ip in ips:
            known = self.table.get(ip)
            rows[ip] = LocalAddress(ip, known is not None and known.host, value.endpoint_id, value)
        self._write(rows, undo=True)

    def drop_endpoint(self, ip: IPAddress, endpoint_id: int) -> None:
        """The endpoint has the address no more; another endpoint that has it by now keeps it.

        Raises OSError when the kernel refuses: the claim is removed, the row follows with the next sweep.
        """
        known = self.table.get(ip)
        if known is None:
            left = self.leftovers.get(ip)
            if left is not None and left.endpoint_id == endpoint_id:
                self._write({ip: None})
        elif known.row is not None and known.endpoint == endpoint_id:
            self._remove(LocalAddress(ip, known.host))

    def keep(self, ips: Iterable[IPAddress]) -> None:
        """The endpoints that have these addresses in the map keep them, as an earlier agent wrote it.

        Rows of the node, and addresses without a row, are left out. The map is not written.
        """
        found = {ip: left for ip in ips if (left := self.leftovers.get(ip)) is not None and not left.is_host}
        self._rows.adopt({ip: LocalAddress(ip, False, left.endpoint_id, left) for ip, left in found.items()})

    def put_host(self, ip: IPAddress) -> None:
        """The node itself has the address. Raises OSError: then the claim is as it was."""
        known = self.table.get(ip)
        if (loses := self._endpoint_of(ip)) is not None:
            text = "an address of this node belonged to an endpoint, which loses it"
            self._log.warning(text, ip=str(ip), endpoint=loses)
        row = LocalAddress(ip, True) if known is None else structs.replace(known, host=True)
        self._write({ip: row}, undo=True)

    def drop_host(self, ip: IPAddress) -> None:
        """The node has the address no more; an endpoint that claims it has it now.

        Raises OSError when the kernel refuses: the claim is removed, the row follows with the next sweep.
        """
        known = self.table.get(ip)
        if known is not None and known.host:
            self._remove(structs.replace(known, host=False))

    def _endpoint_of(self, ip: IPAddress) -> int | None:
        """The endpoint that gets the address's packets now."""
        known = self.table.get(ip)
        if known is not None:
            return None if known.host or known.row is None else known.endpoint
        left = self.leftovers.get(ip)
        return None if left is None or left.is_host else left.endpoint_id

    def _remove(self, row: LocalAddress) -> None:
        """Leave what is left of the claims: ``row``, or nothing."""
        claimed = row.host or row.row is not None
        self._write({row.ip: row if claimed else None})

    def _write(self, rows: Mapping[IPAddress, LocalAddress | None], *, undo: bool = False) -> None:
        try:
            self._rows.write(rows, undo=undo)
        except OSError:
            self._refused()
            raise


# How the cell of local addresses is put together.

SWEEP: Final = minutes(1)


def local_address_table() -> Table[IPAddress, LocalAddress]:
    """The ``local-addresses`` table, by address."""
    return Table("local-addresses", key=lambda row: row.ip)


def lxc_map(maps: Maps) -> LxcTarget:
    """The map cilium_lxc."""
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
    """The owner of every address, once its hook has read what an earlier agent left.

    The map is swept when all sources are known, every minute, and when the kernel refused a row.
    """
    rows = MapTable(table, kernel, log, every=SWEEP)
    tables.add(rows.reconciler.statuses)
    lifecycle.append(Hook("read the local addresses", rows.read))
    sweep = jobs.timer("sweep", rows.reconciler.sweep, SWEEP)
    sweep.trigger()
    return LocalAddresses(table, rows, log, sweep.trigger)


cell = module(
    "local-addresses",
    "The owner of every address of the node",
    provide(local_address_table, lxc_map, local_addresses),
    invoke(LocalAddresses),
)
