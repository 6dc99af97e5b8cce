"""Which addresses are on this node, and whose each is: the node's own, or an endpoint's.

Reconciler: other cells claim addresses, for the node or for an endpoint. The claim that counts is the
            address's row in the map cilium_lxc, and is its only writer; if both have one, the node's is used.
Why:        an address may be the node's and a pod's at once. Neither needs to know of the other: where the
            node gives it up, the pod's counts again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec
from anyio import to_thread
from msgspec import structs

from cells.base.addresses import IPAddress
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import LXC_HOST, LxcKey, LxcValue
from lifecycle import (
    BatchFailures,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    NotStartedError,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["LocalAddress", "LocalAddresses", "LxcMap", "LxcRows", "cell"]


# The rows of cilium_lxc: written where they differ, compared as a whole now and then.

HOST: Final = LxcValue(flags=LXC_HOST)
"""What an address of the node itself has in cilium_lxc."""


class LocalAddress(msgspec.Struct, frozen=True):
    """Whose an address of this node is; a row of the table ``local-addresses``."""

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


class LxcMap(Protocol):
    """The map itself. All raise OSError."""

    def dump(self) -> Mapping[IPAddress, LxcValue]:
        """Every row there is; called in a thread, at any time."""
        ...

    def lookup(self, ip: IPAddress) -> LxcValue | None:
        """The address's row."""
        ...

    def update(self, ip: IPAddress, value: LxcValue) -> None:
        """Write the row."""
        ...

    def delete(self, ip: IPAddress) -> None:
        """Remove the row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Make the datapath evaluate the next packet of every flow again."""
        ...


class LxcRows:
    """A reconciler's target: what the map holds, beside what is claimed."""

    def __init__(self, table: ReadTable[LocalAddress], kernel: LxcMap, log: Logger) -> None:
        self._table = table
        self._kernel = kernel
        self._log = log
        self._left: dict[IPAddress, LxcValue] | None = None

    async def read(self) -> None:
        """Take note of what a former agent left. Raises OSError."""
        self.left(await to_thread.run_sync(self._kernel.dump))

    def left(self, rows: Mapping[IPAddress, LxcValue]) -> None:
        """These rows are what a former agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> dict[IPAddress, LxcValue]:
        """Rows that are not claimed yet; raises NotStartedError before they are known."""
        if self._left is None:
            raise NotStartedError(
                "LocalAddresses was used before the hook 'read the local addresses' ran: depend on it"
            )
        return self._left

    def set(self, ip: IPAddress, value: LxcValue | None) -> None:
        """Have the address's row so, or have none; what is so already is not written. Raises OSError.

        The address may have changed its owner, so cached verdicts are void.
        """
        left = self.leftovers
        if value is not None and ip not in left and ip not in self._table:
            self._kernel.update(ip, value)  # a new pod's: there is nothing to compare with
            if value.is_host:
                self._kernel.void_verdicts()
            return
        present = self._kernel.lookup(ip)
        if present != value:
            if value is None:
                self._kernel.delete(ip)
            else:
                self._kernel.update(ip, value)
            self._kernel.void_verdicts()
        left.pop(ip, None)

    async def dump(self) -> Mapping[IPAddress, LocalAddress]:
        """Every row, as its claim where it is what is claimed."""
        held = await to_thread.run_sync(self._kernel.dump)
        self._left = {ip: value for ip, value in held.items() if ip not in self._table}
        return {ip: self._row(ip, value) for ip, value in held.items()}

    async def put(self, batch: Mapping[IPAddress, LocalAddress]) -> None:
        """Write rows that are not as claimed. Raises BatchError."""
        self._each({ip: row.value for ip, row in batch.items()})

    async def drop(self, batch: Collection[IPAddress]) -> None:
        """Remove unclaimed rows. Raises BatchError."""
        self._each(dict.fromkeys(batch))
        self._log.info("removed unclaimed rows of cilium_lxc", addresses=", ".join(map(str, batch)))

    def _row(self, ip: IPAddress, value: LxcValue) -> LocalAddress:
        row = self._table.get(ip)
        if row is not None and row.value == value:
            return row
        return LocalAddress(ip, value.is_host, value.endpoint_id, None if value.is_host else value)

    def _each(self, values: Mapping[IPAddress, LxcValue | None]) -> None:
        with BatchFailures(OSError) as failures:
            for ip, value in values.items():
                with failures.of(ip):
                    self.set(ip, value)


# Claims of addresses: by the node and by endpoints, in the map at once.
#
# A claim is in the map when the call returns: that of a pod's address must be, before its link comes up. The
# sweep is for what others changed, what the kernel refused, and what a former agent left.


class LocalAddresses:
    """Whose every address of this node is.

    A source that has claims from the start announces itself by ``table.initializer()`` in its constructor.
    Until all of them are done, no row of the map goes for want of a claim.
    """

    def __init__(
        self,
        table: Table[LocalAddress],
        rows: LxcRows,
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
        rows = []
        for ip in ips:
            known = self.table.get(ip)
            row = LocalAddress(ip, known is not None and known.host, value.endpoint_id, value)
            self._write(ip, row.value)
            rows.append(row)
        with self.table.txn() as table:
            for row in rows:
                table.put(row)

    def drop_endpoint(self, ip: IPAddress, endpoint_id: int) -> None:
        """The endpoint has the address no more; another endpoint that has it by now keeps it.

        Raises OSError when the kernel refuses: the claim is gone, the row follows with the next sweep.
        """
        known = self.table.get(ip)
        if known is None:
            left = self.leftovers.get(ip)
            if left is not None and left.endpoint_id == endpoint_id:
                self._write(ip, None)
        elif known.row is not None and known.endpoint == endpoint_id:
            self._remove(LocalAddress(ip, known.host))

    def keep(self, ips: Iterable[IPAddress]) -> None:
        """The endpoints that have these addresses in the map keep them, as a former agent wrote it.

        Rows of the node, and addresses without a row, are left out. The map is not written.
        """
        with self.table.txn() as table:
            for ip in ips:
                left = self.leftovers.get(ip)
                if left is not None and not left.is_host:
                    table.put(LocalAddress(ip, False, left.endpoint_id, left))
                    self._rows.leftovers.pop(ip)

    def put_host(self, ip: IPAddress) -> None:
        """The node itself has the address. Raises OSError: then the claim is as it was."""
        known = self.table.get(ip)
        if (loses := self._endpoint_of(ip)) is not None:
            text = "an address of this node belonged to an endpoint, which loses it"
            self._log.warning(text, ip=str(ip), endpoint=loses)
        row = LocalAddress(ip, True) if known is None else structs.replace(known, host=True)
        self._write(ip, row.value)
        self.table.put(row)

    def drop_host(self, ip: IPAddress) -> None:
        """The node has the address no more; an endpoint that claims it has it now.

        Raises OSError when the kernel refuses: the claim is gone, the row follows with the next sweep.
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
        try:
            self._write(row.ip, row.value if claimed else None)
        finally:
            with self.table.txn() as table:
                if claimed:
                    table.put(row)
                else:
                    table.delete(row.ip)

    def _write(self, ip: IPAddress, value: LxcValue | None) -> None:
        try:
            self._rows.set(ip, value)
        except OSError:
            self._refused()
            raise


# The map cilium_lxc in the kernel.


class KernelLxc:
    """The real :class:`~cells.node.local_addresses.LxcMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def dump(self) -> Mapping[IPAddress, LxcValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        lxc = self._maps.lxc
        with map_by_id(lxc.id, lxc.spec.name) as table:
            rows = list(table.items())
        return {LxcKey.unpack(key).ip: LxcValue.unpack(value) for key, value in rows}

    def lookup(self, ip: IPAddress) -> LxcValue | None:
        """The address's row."""
        found = self._maps.lxc.lookup(LxcKey(ip).pack())
        return None if found is None else LxcValue.unpack(found)

    def update(self, ip: IPAddress, value: LxcValue) -> None:
        """Write the row."""
        self._maps.lxc.update(LxcKey(ip).pack(), value.pack())

    def delete(self, ip: IPAddress) -> None:
        """Remove the row."""
        self._maps.lxc.delete(LxcKey(ip).pack())

    def void_verdicts(self) -> None:
        """The node's epoch."""
        self._maps.epochs.bump()


# How the cell of local addresses is put together.

SWEEP: Final = minutes(1)


def local_address_table() -> Table[LocalAddress]:
    """The ``local-addresses`` table, by address."""
    return Table("local-addresses", key=lambda row: row.ip)


def lxc_map(maps: Maps) -> LxcMap:
    """The map cilium_lxc."""
    return KernelLxc(maps)


def local_addresses(
    table: Table[LocalAddress],
    kernel: LxcMap,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> LocalAddresses:
    """Whose every address is, once its hook has read what a former agent left.

    The map is swept when all sources are known, every minute, and when the kernel refused a row.
    """
    rows = LxcRows(table, kernel, log)
    reconciler = Reconciler(table, rows, full_every=SWEEP)
    tables.add(reconciler.statuses)
    lifecycle.append(Hook("read the local addresses", rows.read))
    sweep = jobs.timer("sweep", reconciler.sweep, SWEEP)
    sweep.trigger()
    return LocalAddresses(table, rows, log, sweep.trigger)


cell = module(
    "local-addresses",
    "The owner of every address of the node",
    provide(local_address_table, lxc_map, local_addresses),
    invoke(LocalAddresses),
)
