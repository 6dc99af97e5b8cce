"""How the ipcache cell is put together.

Needs: Maps, Identities, where they are restored, Member[IdentityFollower].   Gives: cell.
"""

from collections.abc import Iterable
from typing import Final

from cells.cluster.identity import Identities
from cells.cluster.ipcache.entry import IpcacheEntry
from cells.cluster.ipcache.ipcache import IdentityFollower, Ipcache
from cells.cluster.ipcache.kernel import KernelIpcache
from cells.cluster.ipcache.rows import IpcacheMap, IpcacheRows
from cells.cluster.ipcache.sweep import IpcacheSweep
from cells.maps import Maps
from cells.observe.metrics import Collector, Family, counter
from lifecycle import (
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Table,
    Tables,
    invoke,
    minutes,
    module,
    provide,
)

SWEEP: Final = minutes(1)


def ipcache_table() -> Table[IpcacheEntry]:
    """The ``ipcache`` table, by prefix."""
    return Table("ipcache", key=lambda entry: entry.prefix)


def ipcache_map(maps: Maps) -> IpcacheMap:
    """The map cilium_ipcache."""
    return KernelIpcache(maps)


def ipcache(
    table: Table[IpcacheEntry],
    kernel: IpcacheMap,
    identities: Identities | None,
    followers: list[Member[IdentityFollower]],
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> Ipcache:
    """Whose every prefix is, once its hook has read what a former agent left.

    The map is swept when all sources are known, every minute, and when the kernel refused a row.
    """
    rows = IpcacheRows(kernel)
    compared = IpcacheSweep(table, rows, log)
    tables.add(compared.refused)
    lifecycle.append(Hook("read the ipcache", rows.read))
    sweep = jobs.timer("sweep", compared.run, SWEEP)
    sweep.trigger()
    return Ipcache(table, rows, sweep.trigger, identities, followers)


def ipcache_metrics(ipcache: Ipcache) -> Member[Collector]:
    """Claims that were refused, as Cilium's metric."""

    async def collect() -> Iterable[Family]:
        text = "Number of errors interacting with the IP to Identity cache"
        return [counter("cilium_ipcache_errors_total", text, ipcache.errors, "type error")]

    return Collector("ipcache", collect)


def release_restored(table: Table[IpcacheEntry], identities: Identities | None, *, jobs: Jobs) -> None:
    """Once all claims are known, numbers of this node's own that are not in use are free."""
    if identities is None:
        return
    known = identities

    async def release() -> None:
        await table.wait_initialized()
        known.forget_restored()

    jobs.one_shot("release-restored-identities", release)


cell = module(
    "ipcache",
    "Whose every prefix is",
    provide(ipcache_table, ipcache_map, ipcache, ipcache_metrics),
    invoke(Ipcache, release_restored),
)
