"""How the cell of local addresses is put together.

Needs: Maps.   Gives: cell.
"""

from typing import Final

from cells.maps import Maps
from cells.node.local_addresses.addresses import LocalAddresses
from cells.node.local_addresses.kernel import KernelLxc
from cells.node.local_addresses.rows import LocalAddress, LxcMap, LxcRows
from lifecycle import (
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Reconciler,
    Table,
    Tables,
    invoke,
    minutes,
    module,
    provide,
)

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
    "Whose every address of the node is",
    provide(local_address_table, lxc_map, local_addresses),
    invoke(LocalAddresses),
)
