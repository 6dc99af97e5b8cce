"""The ipcache: identity and tunnel endpoint of every prefix.

Controller and reconciler: other cells claim prefixes, each with the name of a resource and a source of known
precedence. The claim with the highest precedence is the prefix's row in the table ``ipcache`` and its entry
in the map cilium_ipcache, which only this cell writes.

Why: an address may be the node's and a pod's, or be known from several sources. These need not know each
     other: when a claim is withdrawn, the next one takes effect.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

from cells.base.addresses import IPAddress
from cells.base.metrics import Collector, MetricFamily, counter
from cells.cluster.encryption import ClusterEncryption
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache.rows import (
    IpcacheEntry,
    IpcacheTarget,
    Prefix,
    claimed,
    ipcache_target,
    keyed,
    prefix_of,
    withdrawn,
)
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheValue
from cells.maps.target import MapTable
from lifecycle import Jobs, Lifecycle, Logger, Member, Table, Tables, invoke, minutes, module, provide

__all__ = ["IdentityFollower", "Ipcache", "cell"]


# Claims of prefixes: made and withdrawn by resource, in the map at once.
#
# A claim is in the map when upsert() returns: that of a pod's address must be, before its link comes up. The
# sweep is for what others changed, what the kernel refused, and what an earlier agent left.

SEEN: Final = 4096
"""Maximum number of addresses with cached identities."""
WEAKER_CLAIM: Final = "upsert", "cannot_overwrite_by_source"
WEAKER_WITHDRAWN: Final = "delete", "cannot_overwrite_by_source"
NEVER_CLAIMED: Final = "delete", "no_such_prefix"


class IdentityFollower(Protocol):
    """Receives identities before packets with them arrive, for example the policy maps."""

    def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
        """Add an identity if it is new. Every claim calls this; it is cheap for existing ones."""
        ...


class Ipcache:
    """The claims of all prefixes.

    Before a prefix gets an identity, all followers get it: a deny rule would not match a number that policy
    maps lack. A source with initial claims registers with ``table.initializer()`` in its constructor. Until
    all of them are done, no entry of the map is deleted for lack of a claim.
    """

    def __init__(
        self,
        table: Table[str, IpcacheEntry],
        rows: MapTable[Prefix, IpcacheEntry, IpcacheValue],
        identities: Identities | None = None,
        followers: Sequence[IdentityFollower] = (),
        pods_key: int = 0,
    ) -> None:
        """``pods_key``: the encryption key number for packets to pods; 0: each claim has its own."""
        self._identities = identities
        self._followers = followers
        self._pods_key = pods_key
        self.table = table
        """The effective claims, by prefix."""
        self.errors = Counter(dict.fromkeys((WEAKER_CLAIM, WEAKER_WITHDRAWN, NEVER_CLAIMED), 0))
        """Failed changes by operation and reason, as Cilium labels them."""
        self._rows = rows
        self._seen: dict[IPAddress, int] = {}
        """Identities by address, cached until the table changes."""
        self._seen_at = -1

    @property
    def leftovers(self) -> Mapping[Prefix, IpcacheValue]:
        """Return entries of the map without a claim. Raises NotStartedError before the map was read."""
        return self._rows.leftovers

    def identity_at(self, address: IPAddress) -> int:
        """Return the identity of packets to or from an address; 0 if no prefix contains it.

        Raises OSError, NotStartedError.
        """
        if self._seen_at != self.table.revision or len(self._seen) >= SEEN:
            self._seen.clear()
            self._seen_at = self.table.revision
        found = self._seen.get(address)
        if found is None:
            row = self._rows.lookup(prefix_of(address))
            found = self._seen[address] = 0 if row is None else row.identity
        return found

    def upsert(self, *claims: IpcacheEntry) -> None:
        """Make these claims, replacing those of the same resource and prefix.

        Raises OSError if the kernel refuses an entry: then no claim is made, and entries already written are
        deleted by the next comparison.
        """
        self._ensure_identities({claim.identity for claim in claims})
        rows: dict[Prefix, IpcacheEntry] = {}
        if self._pods_key:
            claims = tuple(keyed(claim, self._pods_key) for claim in claims)
        for claim in claims:
            row = claimed(rows.get(claim.prefix) or self.table.get(claim.prefix), claim)
            self.errors[WEAKER_CLAIM] += row.source.has_precedence_over(claim.source)
            rows[claim.prefix] = row
        self._rows.write(rows, undo=True)

    def withdraw(self, resource: str, prefixes: Iterable[Prefix]) -> None:
        """Withdraw the resource's claims of these prefixes.

        If other claims exist, the next one takes effect.

        Raises OSError if the kernel refuses: the claims are removed, the entries follow with the next
        comparison.
        """
        before: dict[Prefix, IpcacheEntry] = {}
        for prefix in prefixes:
            row = self.table.get(prefix)
            if row is not None:
                before[prefix] = row
            if row is None or all(each.resource != resource for each in row.claims):
                self.errors[NEVER_CLAIMED] += 1
            elif row.resource != resource:
                self.errors[WEAKER_WITHDRAWN] += 1
        self._rows.write({prefix: withdrawn(row, resource) for prefix, row in before.items()})

    def discard(self, prefixes: Collection[Prefix]) -> None:
        """Delete leftovers that are obsolete, before all sources are initialized. Raises OSError.

        Claimed prefixes stay.
        """
        left = [prefix for prefix in prefixes if prefix in self.leftovers and prefix not in self.table]
        self._rows.write(dict.fromkeys(left))

    def claim_of(self, prefix: Prefix, resource: str) -> IpcacheEntry | None:
        """Return the resource's claim of the prefix."""
        row = self.table.get(prefix)
        return next((each for each in row.claims if each.resource == resource), None) if row else None

    def _ensure_identities(self, numbers: Iterable[int]) -> None:
        """Pass identities with known labels to the followers; rules cannot select others yet."""
        if self._identities is None or not self._followers:
            return
        for number in numbers:
            if (known := self._identities.get(number)) is not None:
                for follower in self._followers:
                    follower.ensure_identity(number, known.labels)


# How the ipcache cell is put together.

SWEEP: Final = minutes(1)


def ipcache_table() -> Table[str, IpcacheEntry]:
    """Provide the table ``ipcache``, by prefix."""
    return Table("ipcache", key=lambda entry: entry.prefix)


def ipcache_map(maps: Maps) -> IpcacheTarget:
    """Provide the map cilium_ipcache."""
    return ipcache_target(lambda: maps.ipcache)


def ipcache(
    table: Table[str, IpcacheEntry],
    kernel: IpcacheTarget,
    identities: Identities | None,
    followers: list[Member[IdentityFollower]],
    encryption: ClusterEncryption | None,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> Ipcache:
    """Provide the ipcache; its hook reads the entries of an earlier agent.

    The map is compared when all sources are initialized, every minute, and after the kernel refused an entry.
    """
    rows = MapTable(table, kernel, log, every=SWEEP)
    rows.register("the ipcache", lifecycle=lifecycle, jobs=jobs, tables=tables)
    pods_key = encryption.pods if encryption is not None else 0
    return Ipcache(table, rows, identities, followers, pods_key)


def ipcache_metrics(ipcache: Ipcache) -> Member[Collector]:
    """Contribute the number of refused claims, as Cilium's metric."""

    async def collect() -> Iterable[MetricFamily]:
        text = "Number of errors interacting with the IP to Identity cache"
        return [counter("cilium_ipcache_errors_total", text, ipcache.errors, "type error")]

    return Collector("ipcache", collect)


def release_restored(table: Table[str, IpcacheEntry], identities: Identities | None, *, jobs: Jobs) -> None:
    """Free unused restored numbers of this node once all claims are known."""
    if identities is None:
        return
    known = identities

    async def release() -> None:
        await table.wait_initialized()
        known.forget_restored()

    jobs.one_shot("release-restored-identities", release)


cell = module(
    "ipcache",
    "The identity of every prefix",
    provide(ipcache_table, ipcache_map, ipcache, ipcache_metrics),
    invoke(Ipcache, release_restored),
)
