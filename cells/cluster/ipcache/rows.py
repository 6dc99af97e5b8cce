"""The rows of cilium_ipcache: written where they differ from what is claimed.

Every change voids the verdicts that the datapath remembers, once for all rows changed together.
"""

import time
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping
from enum import StrEnum
from ipaddress import IPv4Address, ip_network
from typing import Final, Literal, Protocol

import msgspec
from anyio import to_thread

from cells.base.addresses import IPAddress, IPNetwork
from cells.cluster.identity.numbers import HOST
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheValue, ipcache_key, ipcache_prefix
from lifecycle import Logger, NotStartedError, ObjectStatus, ReconcileError, Stretch, Table

__all__ = ["IpcacheEntry", "IpcacheMap", "IpcacheRows", "Prefix", "Source", "prefix_of"]


# Claims about a prefix, and which of several takes precedence.
#
# Source: Cilium 1.17, the sources of ipcache entries and their order.
#
# A prefix is kept as its text: a network of the module ipaddress takes seven times the memory and is looked
# up ten times slower, and a cluster has a row for each of its pods.


class Source(StrEnum):
    """Where a claim comes from, the strongest first."""

    KUBE_APISERVER = "kube-apiserver"
    LOCAL = "local"
    """This agent: addresses of the node, and of its endpoints."""
    KVSTORE = "kvstore"
    CUSTOM_RESOURCE = "custom-resource"
    KUBERNETES = "k8s"
    CLUSTERMESH = "clustermesh"
    DIRECTORY = "directory"
    API = "api"
    GENERATED = "generated"
    """Made for policies that name prefixes."""
    RESTORED = "restored"
    """What a former agent left, of an endpoint that is not back yet."""
    UNSPEC = "unspec"

    def beats(self, other: "Source") -> bool:
        """Whether a claim of this source counts beside one of the other, whichever came first."""
        return _STRENGTH[self] < _STRENGTH[other]


Prefix = str
"""A network as ``str()`` writes one: ``10.0.1.7/32``, ``fd00::/64``."""

_PODS: Final = {"cep", "pod"}
"""Kinds of resources that are pods: CiliumEndpoints, and Pods of manifests."""

_STRENGTH: Final = {source: strength for strength, source in enumerate(Source)}


class IpcacheEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claim; and a row of the table: the claim that counts, with the others in ``shadowed``."""

    prefix: Prefix
    identity: int
    source: Source
    resource: str
    """Whose claim it is: ``<kind>/<namespace>/<name>``, ``ep//12`` for one. It has one claim of a prefix."""
    tunnel_endpoint: IPv4Address = IPv4Address(0)
    """The node to tunnel to; 0.0.0.0: here, or no tunnel."""
    encrypt_key: int = 0
    skip_tunnel: bool = False
    shadowed: "tuple[IpcacheEntry, ...]" = ()
    """Other claims of the prefix, the strongest first."""

    @property
    def pod(self) -> tuple[str, str] | None:
        """Namespace and name of the pod of another node that has the prefix, where its object is known."""
        kind, _, name = self.resource.partition("/")
        namespace, _, name = name.partition("/")
        return (namespace, name) if kind in _PODS else None

    @property
    def network(self) -> IPNetwork:
        """The prefix as a network."""
        return ip_network(self.prefix)

    @property
    def value(self) -> IpcacheValue:
        """What the prefix has in cilium_ipcache."""
        return IpcacheValue(self.identity, self.tunnel_endpoint, self.encrypt_key, int(self.skip_tunnel))

    @property
    def claims(self) -> "list[IpcacheEntry]":
        """All claims of the prefix, the strongest first."""
        if not self.shadowed:
            return [self]
        return [msgspec.structs.replace(self, shadowed=()), *self.shadowed]

    def is_of(self, source: Source) -> bool:
        """Whether any claim of the prefix is of this source."""
        return self.source is source or any(one.source is source for one in self.shadowed)


def prefix_of(address: IPAddress) -> Prefix:
    """The prefix that is this address alone."""
    return f"{address}/{address.max_prefixlen}"


def claimed(row: IpcacheEntry | None, claim: IpcacheEntry) -> IpcacheEntry:
    """The prefix's row once ``claim`` is made, instead of what its resource claimed before.

    The strongest source counts; of claims of one source that of reserved:host, else the latest. Of several
    nodes that say they have a range the first by name counts, as for routes.
    """
    if row is None or (not row.shadowed and row.resource == claim.resource):
        return claim
    return _row([claim, *(each for each in row.claims if each.resource != claim.resource)])


def withdrawn(row: IpcacheEntry, resource: str) -> IpcacheEntry | None:
    """The prefix's row without the claim of ``resource``; None when no other is left."""
    others = [each for each in row.claims if each.resource != resource]
    return _row(others) if others else None


def _row(claims: list[IpcacheEntry]) -> IpcacheEntry:
    first, *others = sorted(claims, key=_rank)
    return msgspec.structs.replace(first, shadowed=tuple(others)) if others else first


def _rank(claim: IpcacheEntry) -> tuple[int, bool, str]:
    by_name = claim.resource if claim.source is Source.UNSPEC else ""
    return _STRENGTH[claim.source], claim.identity != HOST, by_name


class IpcacheMap(Protocol):
    """The map itself, in the words of this cell. All raise OSError."""

    def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Every row there is; called in a thread, at any time."""
        ...

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """What the datapath finds for the prefix: its row, or that of the longest one around it."""
        ...

    def update(self, prefix: Prefix, value: IpcacheValue) -> None:
        """Write the row."""
        ...

    def delete(self, prefix: Prefix) -> None:
        """Remove the row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Make the datapath evaluate the next packet of every flow again."""
        ...


class IpcacheRows:
    """What the map holds, beside what is claimed."""

    def __init__(self, kernel: IpcacheMap) -> None:
        self._kernel = kernel
        self._left: dict[Prefix, IpcacheValue] | None = None

    async def read(self) -> None:
        """Take note of what a former agent left. Raises OSError."""
        self.left(await self.dump())

    def left(self, rows: Mapping[Prefix, IpcacheValue]) -> None:
        """These rows are what a former agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> Mapping[Prefix, IpcacheValue]:
        """Rows that are not claimed yet; raises NotStartedError before they are known."""
        if self._left is None:
            raise NotStartedError("Ipcache was used before the hook 'read the ipcache' ran: depend on it")
        return self._left

    def holds(self, prefix: Prefix, wanted: IpcacheValue, known: IpcacheEntry | None) -> bool:
        """Whether the map has this already: we wrote or read it, and it is found. Raises OSError.

        ``known`` is the row of the table.
        """
        left = self.leftovers
        if known is None and not left:
            return False
        last = left.get(prefix) if known is None else known.value
        return last == wanted and self._kernel.lookup(prefix) == wanted

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """What the datapath finds for the prefix. Raises OSError."""
        return self._kernel.lookup(prefix)

    async def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Every row there is; read in a thread. Raises OSError."""
        return await to_thread.run_sync(self._kernel.dump)

    def write(self, values: Mapping[Prefix, IpcacheValue | None]) -> None:
        """Write rows, or remove those whose value is None. Tries all; raises the first OSError."""
        if failures := self.write_each(values):
            raise next(iter(failures.values()))

    def write_each(self, values: Mapping[Prefix, IpcacheValue | None]) -> dict[Prefix, OSError]:
        """The same; what the kernel refused, and why."""
        failures: dict[Prefix, OSError] = {}
        for prefix, value in values.items():
            try:
                if value is None:
                    self._kernel.delete(prefix)
                else:
                    self._kernel.update(prefix, value)
            except OSError as error:
                failures[prefix] = error
        if values:
            self._kernel.void_verdicts()
        return failures

    def settled(self, prefixes: Iterable[Prefix]) -> None:
        """These are claimed, or removed: no leftovers any more."""
        if self._left:
            for prefix in prefixes:
                self._left.pop(prefix, None)


# The map cilium_ipcache in the kernel.


class KernelIpcache:
    """The real :class:`~cells.cluster.ipcache.rows.IpcacheMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        ipcache = self._maps.ipcache
        with map_by_id(ipcache.id, ipcache.spec.name) as table:
            rows = list(table.items())
        return {ipcache_prefix(key): IpcacheValue.unpack(value) for key, value in rows}

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """The longest prefix that covers it."""
        found = self._maps.ipcache.lookup(ipcache_key(prefix))
        return None if found is None else IpcacheValue.unpack(found)

    def update(self, prefix: Prefix, value: IpcacheValue) -> None:
        """Write the row."""
        self._maps.ipcache.update(ipcache_key(prefix), value.pack())

    def delete(self, prefix: Prefix) -> None:
        """Remove the row."""
        self._maps.ipcache.delete(ipcache_key(prefix))

    def void_verdicts(self) -> None:
        """The node's epoch: a new row, too, may take a flow from an identity it had by a shorter prefix."""
        self._maps.epochs.bump()


# The whole of cilium_ipcache compared with what is claimed, now and then.
#
# Reconciler: Table[IpcacheEntry] in, the map out; the table ``ipcache-status`` tells what the kernel refuses.
#
# Claims are in the map already. This is for what others changed, what the kernel refused, and what a former
# agent left; the last goes only when every source of claims is known. A map has hundreds of thousands of
# rows, so it is read in a thread and compared in stretches. A row may change meanwhile: what is to be written
# is looked up again just before.

BATCH: Final = 128
"""Rows written at once."""


class IpcacheSweep:
    """Makes the map equal to the table."""

    def __init__(self, table: Table[IpcacheEntry], rows: IpcacheRows, log: Logger) -> None:
        self._table = table
        self._rows = rows
        self._log = log
        self.refused: Table[ObjectStatus] = Table("ipcache-status", key=lambda status: status.key)
        """The rows that the kernel refuses, by prefix."""

    async def run(self) -> None:
        """Once. Raises ReconcileError for rows that the kernel refused, OSError when it cannot be read."""
        await self._table.wait_initialized()
        held = await self._rows.dump()
        differ = [prefix async for prefix in self._differing(held)]
        failures: dict[Hashable, Exception] = {}
        removed, stretch = 0, Stretch()
        for begin in range(0, len(differ), BATCH):
            values = {prefix: self._wanted(prefix) for prefix in differ[begin : begin + BATCH]}
            refused = self._rows.write_each(values)
            failures.update(refused)
            self._rows.settled(prefix for prefix in values if prefix not in refused)
            removed += sum(value is None and prefix not in refused for prefix, value in values.items())
            await stretch.pause()
        if removed:
            self._log.info("removed unclaimed rows of cilium_ipcache", rows=removed)
        self._report(failures)
        if failures:
            raise ReconcileError("ipcache", failures)

    async def _differing(self, held: Mapping[Prefix, IpcacheValue]) -> AsyncIterator[Prefix]:
        """Prefixes whose row is another one than is claimed."""
        stretch = Stretch()
        for prefix, value in held.items():
            if self._wanted(prefix) != value:
                yield prefix
            await stretch.pause()
        for key in list(self._table.keys()):
            if key not in held and key in self._table:
                yield str(key)
            await stretch.pause()

    def _wanted(self, prefix: Prefix) -> IpcacheValue | None:
        row = self._table.get(prefix)
        return None if row is None else row.value

    def _report(self, failures: Mapping[Hashable, Exception]) -> None:
        now = time.time()
        with self.refused.txn() as statuses:
            for status in self.refused.all():
                if status.key not in failures:
                    statuses.delete(status.key)
            for prefix, error in failures.items():
                before = self.refused.get(prefix)
                times = before.failures + 1 if before is not None else 1
                action: Literal["put", "drop"] = "put" if prefix in self._table else "drop"
                statuses.put(ObjectStatus(prefix, action, "failed", now, times, f"OSError: {error}"))
