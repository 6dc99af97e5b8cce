"""How identities are stored in the kvstore.

Source: keys below identities/v1/id in, rows of ``shared-identities`` out.
Source: Cilium 1.17, the kvstore's allocator: labels as ``source:key=value;``, sorted by key.
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
from cells.cluster.allocation.agreed import AgreedNumbers, AllocationMode, Labels
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
    """A row: a number, and the labels that all nodes know it for."""

    name: str
    """The key: the number as text."""
    number: int
    labels: tuple[str, ...]


class SharedIdentities:
    """The table ``shared-identities``; empty, and complete, where nodes agree otherwise."""

    def __init__(self, *, tables: Tables) -> None:
        self.table: Table[str, SharedIdentity] = Table(
            "shared-identities", key=lambda row: row.name, indexes={BY_LABELS: lambda row: [row.labels]}
        )
        self._tables = tables

    def follow(self, store: KVStore, jobs: Jobs) -> None:
        """Fill it, for ever."""
        self._tables.add(self.table)
        jobs.observe("follow identities", PrefixWatch(store, IDS, self.table, read, scope="identities/v1"))

    def numbers(self, labels: tuple[str, ...]) -> list[int]:
        """The numbers that stand for these labels, the lowest first."""
        return sorted(row.number for row in self.table.by(BY_LABELS).get(labels))


def read(key: str, value: bytes) -> SharedIdentity | None:
    """The identity of a key; None for one that is not a number of a cluster's."""
    number = int(key) if key.isascii() and key.isdigit() else 0
    text = value.decode(errors="replace")
    if number not in EVERY_CLUSTER or str(number) != key or not text:
        return None
    return SharedIdentity(key, number, texts(parse(part) for part in text.split(";") if part))


def encode(labels: tuple[str, ...]) -> str:
    """The labels as they are in keys and values."""
    parsed = sorted((parse(text) for text in labels), key=lambda label: label.key)
    return "".join(f"{label.source}:{label.key}={label.value};" for label in parsed)


def value_key(labels: tuple[str, ...], node: str) -> str:
    """The key by which the node, with its address, uses the identity of the labels."""
    return f"{VALUES}{encode(labels)}/{node}"


# Numbers of identities, by keys of the kvstore.
#
# Source: Cilium 1.17, pkg/allocator: under the lock of the labels, a key of any node that uses them gives
#         their number; else a number that no key has is taken. The operator deletes unused master keys.

RETRY: Final = Backoff(first=0.2, maximum=5.0)
ATTEMPTS: Final = 16
"""Numbers that are tried for labels, before the next round."""


class KVStoreAllocator(AgreedNumbers):
    """An IdentityAllocator over keys: labels that have a number keep it, others get a new one."""

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
        """``node`` gives the address that this node is known by."""
        super().__init__(span, grace, health)
        self._store = store
        self._shared = shared
        self._node = node
        self._log = log
        self._written: dict[str, str] = {}
        """Keys that say that this node uses what was taken here."""

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """The number of these labels, once the store has it; tried until it does."""
        failures = 0
        try:
            if not self._shared.table.initialized:
                self._wait(labels, "the kvstore's identities are not known yet")
                await self._shared.table.wait_initialized()
            while (known := self._known(labels, previous)) is None:
                try:
                    with anyio.fail_after(self._store.settings.kvstore_connectivity_timeout):
                        if await self._make(labels, previous):
                            continue
                    error = "every identity number that was tried is in use"
                except (StoreError, TimeoutError) as failed:
                    error = str(failed) or "no lock within kvstore-connectivity-timeout"
                failures += 1
                if not self._waiting.get(labels):
                    self._log.warning("identity not allocated", labels=labels, error=error)
                self._wait(labels, error)
                await anyio.sleep(RETRY.pause(failures))
            return known
        finally:
            self._wait(labels, "")

    def written(self) -> dict[str, str]:
        """Keys of this node that were written here; one that remains unused is deleted."""
        written, self._written = self._written, {}
        return written

    async def restore(self, number: int, labels: Labels) -> None:
        """Write the key of a number in use again. Raises StoreError."""
        if await self._created(number, labels):  # else another node was faster: the watch brings its labels
            self._log.warning(
                "identity in use had no kvstore key, created it again", identity=number, labels=labels
            )

    async def keep(self, number: int, labels: Labels) -> None:
        """Create the master key if there is none. Raises StoreError."""
        if str(number) not in self._shared.table:
            await self._created(number, labels)

    async def _created(self, number: int, labels: Labels) -> bool:
        """Whether there was none, and is one now. Raises StoreError."""
        key = f"{IDS}{number}"
        outcome = await self._store.client.txn(put(key, encode(labels).encode()), when=[absent(key)])
        return outcome.succeeded

    def labels_of(self, number: int) -> Labels | None:
        """Those of its master key."""
        there = self._shared.table.get(str(number))
        return None if there is None else there.labels

    def _all_known(self) -> bool:
        return self._shared.table.initialized

    def numbers(self, labels: Labels) -> Sequence[int]:
        """The numbers of master keys with these labels, the lowest first."""
        return [number for number in self._shared.numbers(labels) if number in self._span.own]

    async def _make(self, labels: Labels, previous: int) -> bool:
        """Find or claim a number for the labels; whether they have one now. Raises StoreError."""
        self._store.lock_leases += 1
        try:
            async with lock(self._store.client, f"{LOCKS}{encode(labels)}.lock") as held:
                return await self._found(labels, held) or await self._taken(labels, previous, held)
        finally:
            self._store.lock_leases -= 1

    async def _found(self, labels: Labels, held: Lock) -> bool:
        """Whether some node uses the labels, by a number that is now used here, too."""
        used = await self._store.client.first(f"{VALUES}{encode(labels)}/")
        text = used.value.decode(errors="replace") if used is not None else ""
        number = int(text) if text.isascii() and text.isdigit() else 0
        if number not in self._span.own:
            return False
        master, value = f"{IDS}{number}", encode(labels).encode()
        there = await self._store.client.lookup(master)
        if there is not None and there.value != value:
            return False  # it has become another identity's: their node will find out
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        done = await self._store.client.txn(
            put(key, str(number).encode(), lease), put(master, value), when=[held.held]
        )
        if done.succeeded:
            self._took(labels, number, key)
        return done.succeeded

    async def _taken(self, labels: Labels, previous: int, held: Lock) -> bool:
        """Whether a free number was taken for the labels."""
        given = self._span.given
        if len(self._shared.table) >= len(given):
            raise StoreError(f"no free identity between {given.start} and {given.stop - 1}")
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        for number in self._free(labels, previous):
            master = f"{IDS}{number}"
            done = await self._store.client.txn(
                put(master, encode(labels).encode()),
                put(key, str(number).encode(), lease),
                when=[absent(master), held.held],
            )
            if done.succeeded:
                self._took(labels, number, key)
                self._fresh[number] = time.monotonic()
                return True
        return False

    def _took(self, labels: Labels, number: int, key: str) -> None:
        if str(number) not in self._shared.table:  # the watch may be faster than the answer
            self._has_made(labels, number)
        self._written[key] = str(number)

    def _free(self, labels: Labels, previous: int) -> Iterator[int]:
        """Numbers to try: the previous one, then some from a random one on, so that nodes try others."""
        there = self._shared.table
        for number in self._preferred(labels, previous):
            if number in self._span.own and str(number) not in there and self._may_take(labels, number):
                yield number
        given = self._span.given
        first = random.randrange(len(given))  # noqa: S311  # guards no secret
        free = (
            number
            for number in chain(given[first:], given[:first])
            if str(number) not in there and number not in self._held and self._may_take(labels, number)
        )
        yield from islice(free, ATTEMPTS)


# Identities of the kvstore to rows of the table ``identities``; and what is in use here keeps its keys.
#
# Controller: ``shared-identities`` in, ``identities`` out; identities in use here in, keys of the store out.


class KVStoreIdentityWatch:
    """Follows keys, once all are known."""

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
        self._known: set[str] = set()
        """The keys that were taken in."""
        shared.follow(store, jobs)
        jobs.observe("follow", self._rounds, self._follow)
        jobs.observe("keep", identities.used.changes, self._keep_used)
        self._compare = jobs.timer("compare", self._restore_all, store.settings.kvstore_periodic_sync)
        jobs.observe("compare when the store returns", store.returns, self._store_returned)
        keys: Derived[str, OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
        keep_keys(store, keys, "identities/v1", jobs=jobs, tables=tables, left=allocator.written)

    async def _rounds(self) -> AsyncIterator[list[Change[str, SharedIdentity]] | None]:
        """None at the beginning: everything is to be looked at."""
        await self._shared.wait_initialized()
        changes = self._shared.changes(self._shared.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[str, SharedIdentity]] | None) -> None:
        time_slice = TimeSlice()
        if changes is None:
            there = {row.name: row for row in self._shared.all()}
            for name in {*self._known, *there}:
                self._take(name, there.get(name))
                await time_slice.pause()
            self._first.done()
        else:
            for change in changes:
                self._take(change.key, change.row)
                await time_slice.pause()
        await self._keep()

    async def _keep_used(self, _: object) -> None:
        if self._shared.initialized:
            await self._keep()

    async def _store_returned(self, _: None) -> None:
        self._compare.trigger()

    async def _restore_all(self) -> None:
        """As _keep(), whatever was read last: the store may be another one. Raises StoreError."""
        await self._shared.wait_initialized()
        for number, labels in self._identities.in_use().items():
            if self._identities.stands_for(number, labels):
                await self._allocator.restore(number, labels)

    def _take(self, name: str, row: SharedIdentity | None) -> None:
        if row is None:
            self._known.discard(name)
            self._identities.unlearn(int(name))
        else:
            self._known.add(name)
            self._allocator.seen(row.labels)
            self._identities.learn(row.number, row.labels)

    async def _keep(self) -> None:
        """Numbers in use here stand for their labels in the store. Raises StoreError."""
        for number, labels in self._identities.in_use().items():
            if str(number) in self._shared or self._allocator.is_on_its_way(number):
                continue
            if self._shared.by("labels").get(labels):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._allocator.restore(number, labels)


def used_keys(used: Iterable[Identity], addresses: Iterable[NodeAddress]) -> dict[str, OwnKey]:
    """Keys that say that this node uses these identities."""
    own = sorted((row.ip for row in addresses), key=lambda ip: ip.version)
    if not own:
        return {}
    wanted = [OwnKey(value_key(row.labels, str(own[0])), str(row.id)) for row in used if not row.superseded]
    return {row.key: row for row in wanted}
