"""Global identities in the kvstore: the table ``shared-identities``, the allocator, and the watch.

Source: Cilium 1.17, pkg/allocator and pkg/kvstore/allocator. A master key maps a number to labels; the
        slave keys, one per node and under its lease, map labels to the number. Labels are written as
        ``source:key=value;``, sorted by key.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

import anyio
import msgspec

from cells.base.addresses import Family
from cells.base.labels import parse, texts
from cells.cluster.allocation.global_allocator import AllocationMode, GlobalAllocator, Labels
from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.identity.numbers import EVERY_CLUSTER, ClusterNumbers
from cells.kvstore.model import IDS, LOCKS, VALUES, StoreError, absent, put
from cells.kvstore.own_keys import OwnKey, keep_keys
from cells.kvstore.store import KVStore, Lock, lock
from cells.kvstore.watch import PrefixWatch
from cells.node.addresses import NodeAddress
from lifecycle import Backoff, Change, Derived, Health, Jobs, Logger, Table, Tables
from lifecycle.jobs import TimeSlice

BY_LABELS: Final = "labels"


class SharedIdentity(msgspec.Struct, frozen=True, gc=False):
    """A row of ``shared-identities``: a master key."""

    name: str
    """The key: the number as text."""
    number: int
    labels: tuple[str, ...]


class SharedIdentities:
    """The table ``shared-identities``; empty and initialized unless the kvstore is used."""

    def __init__(self, *, tables: Tables) -> None:
        self.table: Table[str, SharedIdentity] = Table(
            "shared-identities", key=lambda row: row.name, indexes={BY_LABELS: lambda row: [row.labels]}
        )
        self._tables = tables

    def follow(self, store: KVStore, jobs: Jobs) -> None:
        """Start the watch that fills the table."""
        self._tables.add(self.table)
        jobs.observe("follow identities", PrefixWatch(store, IDS, self.table, read, scope="identities/v1"))

    def numbers(self, labels: tuple[str, ...]) -> list[int]:
        """Return the numbers with these labels, the lowest first."""
        return sorted(row.number for row in self.table.by(BY_LABELS).get(labels))


def read(key: str, value: bytes) -> SharedIdentity | None:
    """Parse a master key; None if it is not a number of a cluster or has no labels."""
    number = int(key) if key.isascii() and key.isdigit() else 0
    text = value.decode(errors="replace")
    if number not in EVERY_CLUSTER or str(number) != key or not text:
        return None
    return SharedIdentity(key, number, texts(parse(part) for part in text.split(";") if part))


def encode(labels: tuple[str, ...]) -> str:
    """Return the labels in the format of keys and values."""
    parsed = sorted((parse(text) for text in labels), key=lambda label: label.key)
    return "".join(f"{label.source}:{label.key}={label.value};" for label in parsed)


def value_key(labels: tuple[str, ...], node: str) -> str:
    """Return the slave key of the node with this address for the labels."""
    return f"{VALUES}{encode(labels)}/{node}"


# The allocator.
#
# Source: Cilium 1.17, pkg/allocator: under the lock of the labels, the number in any node's slave key is
#         reused; otherwise a number without a master key is taken. The operator deletes unused master keys.

RETRY: Final = Backoff(first=0.2, maximum=5.0)
ATTEMPTS: Final = 16
"""Maximum number of random numbers that are tried per round."""


class KVStoreAllocator(GlobalAllocator):
    """An IdentityAllocator over the kvstore."""

    def __init__(
        self,
        store: KVStore,
        shared: SharedIdentities,
        node: Callable[[], str],
        span: ClusterNumbers,
        grace: float,
        *,
        health: Health,
        log: Logger,
    ) -> None:
        """``node`` returns this node's address for slave keys."""
        super().__init__(span, grace, health)
        self._store = store
        self._shared = shared
        self._node = node
        self._log = log
        self._written: dict[str, str] = {}
        """Slave keys written here since the last written()."""

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """Return the number of these labels; retry until the kvstore has one."""
        failures = 0
        try:
            if not self._shared.table.initialized:
                self._set_waiting(labels, "the kvstore's identities are not known yet")
                await self._shared.table.wait_initialized()
            while (known := self._lookup(labels, previous)) is None:
                try:
                    with anyio.fail_after(self._store.settings.kvstore_connectivity_timeout):
                        if await self._try_allocate(labels, previous):
                            continue
                    error = "all identity numbers that were tried are in use"
                except (StoreError, TimeoutError) as failed:
                    error = str(failed) or "no lock within kvstore-connectivity-timeout"
                failures += 1
                if not self._waiting.get(labels):
                    self._log.warning("identity not allocated", labels=labels, error=error)
                self._set_waiting(labels, error)
                await anyio.sleep(RETRY.pause(failures))
            return known
        finally:
            self._set_waiting(labels, "")

    def written(self) -> dict[str, str]:
        """Return the slave keys that were written here; the caller deletes those without a user."""
        written, self._written = self._written, {}
        return written

    async def restore(self, number: int, labels: Labels) -> None:
        """Create the missing master key of a number in use. Raises StoreError."""
        if await self._create(number, labels):  # otherwise another node was first
            self._log.warning(
                "identity in use had no kvstore key, created it again", identity=number, labels=labels
            )

    async def ensure(self, number: int, labels: Labels) -> None:
        """Create the master key if it does not exist. Raises StoreError."""
        if str(number) not in self._shared.table:
            await self._create(number, labels)

    async def _create(self, number: int, labels: Labels) -> bool:
        """Create the master key; returns whether it did not exist. Raises StoreError."""
        key = f"{IDS}{number}"
        outcome = await self._store.client.txn(put(key, encode(labels).encode()), when=[absent(key)])
        return outcome.succeeded

    def labels_of(self, number: int) -> Labels | None:
        """Return the labels of the master key, or None."""
        existing = self._shared.table.get(str(number))
        return None if existing is None else existing.labels

    def _synced(self) -> bool:
        return self._shared.table.initialized

    def numbers(self, labels: Labels) -> Sequence[int]:
        """Return the numbers of master keys with these labels, the lowest first."""
        return [number for number in self._shared.numbers(labels) if number in self._span.own]

    async def _try_allocate(self, labels: Labels, previous: int) -> bool:
        """Find or claim a number under the labels' lock. Raises StoreError.

        Returns whether the labels have a number now.
        """
        self._store.lock_leases += 1
        try:
            async with lock(self._store.client, f"{LOCKS}{encode(labels)}.lock") as held:
                return await self._reuse(labels, held) or await self._claim_free(labels, previous, held)
        finally:
            self._store.lock_leases -= 1

    async def _reuse(self, labels: Labels, held: Lock) -> bool:
        """Use the number in another node's slave key for these labels; returns whether there is one."""
        used = await self._store.client.first(f"{VALUES}{encode(labels)}/")
        text = used.value.decode(errors="replace") if used is not None else ""
        number = int(text) if text.isascii() and text.isdigit() else 0
        if number not in self._span.own:
            return False
        master, value = f"{IDS}{number}", encode(labels).encode()
        existing = await self._store.client.lookup(master)
        if existing is not None and existing.value != value:
            return False  # the number has other labels now; the node of the slave key will notice
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        done = await self._store.client.txn(
            put(key, str(number).encode(), lease), put(master, value), when=[held.held]
        )
        if done.succeeded:
            self._record(labels, number, key)
        return done.succeeded

    async def _claim_free(self, labels: Labels, previous: int, held: Lock) -> bool:
        """Create a master key with a free number; returns whether one was free."""
        allocatable = self._span.allocatable
        if len(self._shared.table) >= len(allocatable):
            raise StoreError(f"no free identity between {allocatable.start} and {allocatable.stop - 1}")
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        for number in self._candidates(labels, previous):
            master = f"{IDS}{number}"
            done = await self._store.client.txn(
                put(master, encode(labels).encode()),
                put(key, str(number).encode(), lease),
                when=[absent(master), held.held],
            )
            if done.succeeded:
                self._record(labels, number, key)
                self._allocated_at[number] = time.monotonic()
                return True
        return False

    def _record(self, labels: Labels, number: int, key: str) -> None:
        if str(number) not in self._shared.table:  # the watch may deliver the key before the response arrives
            self._add_pending(labels, number)
        self._written[key] = str(number)

    def _candidates(self, labels: Labels, previous: int) -> Iterator[int]:
        """Yield numbers to try: preferred ones, then free ones from a random one on, to avoid conflicts."""
        existing = self._shared.table
        for number in self._preferred(labels, previous):
            if number in self._span.own and str(number) not in existing and self._may_use(labels, number):
                yield number
        allocatable = self._span.allocatable
        first = random.randrange(len(allocatable))  # noqa: S311  # guards no secret
        free = (
            number
            for number in chain(allocatable[first:], allocatable[:first])
            if str(number) not in existing and number not in self._held and self._may_use(labels, number)
        )
        yield from islice(free, ATTEMPTS)


# ``shared-identities`` to the table ``identities``; and missing keys of identities in use.


class KVStoreIdentityWatch:
    """Writes ``shared-identities`` to the table ``identities``, and restores keys in use."""

    def __init__(
        self,
        store: KVStore,
        shared: SharedIdentities,
        allocator: KVStoreAllocator,
        identities: Identities,
        addresses: Table[Family, NodeAddress],
        mode: AllocationMode,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._shared = shared.table
        self._allocator = allocator
        self._identities = identities
        self._log = log
        if not mode.reads_keys:
            return
        self._first = identities.table.initializer("identities of the kvstore")
        self._applied: set[str] = set()
        """Keys with an identity in the table ``identities``."""
        shared.follow(store, jobs)
        jobs.observe("follow", self._batches, self._follow)
        jobs.observe("keep", identities.used.changes, self._ensure_used)
        self._compare = jobs.timer("compare", self._restore_all, store.settings.kvstore_periodic_sync)
        jobs.observe("compare after a kvstore resync", store.resyncs, self._compare_all)
        keys: Derived[str, OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
        keep_keys(store, keys, "identities/v1", jobs=jobs, tables=tables, previous=allocator.written)

    async def _batches(self) -> AsyncIterator[list[Change[str, SharedIdentity]] | None]:
        """Yield None, for all keys, then changes."""
        await self._shared.wait_initialized()
        changes = self._shared.changes(self._shared.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[str, SharedIdentity]] | None) -> None:
        time_slice = TimeSlice()
        if changes is None:
            existing = {row.name: row for row in self._shared.all()}
            for name in {*self._applied, *existing}:
                self._apply(name, existing.get(name))
                await time_slice.pause()
            self._first.done()
        else:
            for change in changes:
                self._apply(change.key, change.row)
                await time_slice.pause()
        await self._ensure()

    async def _ensure_used(self, _: object) -> None:
        if self._shared.initialized:
            await self._ensure()

    async def _compare_all(self, _: None) -> None:
        self._compare.trigger()

    async def _restore_all(self) -> None:
        """Create missing master keys in a store that may have been replaced. Raises StoreError."""
        await self._shared.wait_initialized()
        for number, labels in self._identities.in_use().items():
            if self._identities.is_current(number, labels):
                await self._allocator.restore(number, labels)

    def _apply(self, name: str, row: SharedIdentity | None) -> None:
        if row is None:
            self._applied.discard(name)
            self._identities.forget(int(name))
        else:
            self._applied.add(name)
            self._allocator.confirm(row.labels)
            self._identities.learn(row.number, row.labels)

    async def _ensure(self) -> None:
        """Create missing master keys of identities in use, or supersede the identities. Raises StoreError."""
        for number, labels in self._identities.in_use().items():
            if str(number) in self._shared or self._allocator.is_pending(number):
                continue
            if self._shared.by("labels").get(labels):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._allocator.restore(number, labels)


def used_keys(used: Iterable[Identity], addresses: Iterable[NodeAddress]) -> dict[str, OwnKey]:
    """Return this node's slave keys for the identities in use."""
    own = sorted((row.ip for row in addresses), key=lambda ip: ip.version)
    if not own:
        return {}
    wanted = [OwnKey(value_key(row.labels, str(own[0])), str(row.id)) for row in used if not row.superseded]
    return {row.key: row for row in wanted}
