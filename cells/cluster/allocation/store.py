"""Numbers of identities, by keys of the kvstore.

For:    Identities. Needs: KVStore, SharedIdentities. Gives: KVStoreAllocator.
Source: Cilium 1.17, pkg/allocator: under the lock of the labels, a key of any node that uses them tells their
        number; else a number that no key has is taken. The operator deletes unused master keys.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import anyio

from cells.cluster.allocation.agreed import AgreedNumbers, Labels
from cells.cluster.allocation.shared import SharedIdentities, encode, value_key
from cells.cluster.identity import CLUSTER
from cells.cluster.kvstore import (
    IDS,
    LOCKS,
    VALUES,
    KVStore,
    Lock,
    StoreError,
    absent,
    lock,
    put,
)
from lifecycle import Backoff, Health, Logger

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
        grace: float,
        *,
        health: Health,
        log: Logger,
    ) -> None:
        """``node`` gives the address that this node is known by."""
        super().__init__(grace, health)
        self._store = store
        self._shared = shared
        self._node = node
        self._log = log
        self._written: dict[str, str] = {}
        """Keys that say that this node uses what was taken here."""

    async def allocate(self, labels: Labels, former: int = 0) -> int:
        """The number of these labels, once the store has it; tried until it does."""
        failures = 0
        try:
            if not self._shared.table.initialized:
                self._wait(labels, "the kvstore's identities are not known yet")
                await self._shared.table.wait_initialized()
            while (known := self._known(labels, former)) is None:
                try:
                    with anyio.fail_after(self._store.settings.kvstore_connectivity_timeout):
                        if await self._make(labels, former):
                            continue
                    error = "every number tried is another identity's"
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
            self._log.warning("identity in use had no key, it has one again", identity=number, labels=labels)

    async def keep(self, number: int, labels: Labels) -> None:
        """Have a master key. Raises StoreError."""
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
        return self._shared.numbers(labels)

    async def _make(self, labels: Labels, former: int) -> bool:
        """Have a number stand for the labels, or find it; whether one does now. Raises StoreError."""
        self._store.lock_leases += 1
        try:
            async with lock(self._store.client, f"{LOCKS}{encode(labels)}.lock") as held:
                return await self._found(labels, held) or await self._taken(labels, former, held)
        finally:
            self._store.lock_leases -= 1

    async def _found(self, labels: Labels, held: Lock) -> bool:
        """Whether some node uses the labels, by a number that is now used here, too."""
        used = await self._store.client.first(f"{VALUES}{encode(labels)}/")
        text = used.value.decode(errors="replace") if used is not None else ""
        number = int(text) if text.isascii() and text.isdigit() else 0
        if number not in CLUSTER:
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

    async def _taken(self, labels: Labels, former: int, held: Lock) -> bool:
        """Whether a free number was taken for the labels."""
        if len(self._shared.table) >= len(CLUSTER):
            raise StoreError(f"no free identity between {CLUSTER.start} and {CLUSTER.stop - 1}")
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        for number in self._free(labels, former):
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
            self._made[labels] = number
        self._written[key] = str(number)

    def _free(self, labels: Labels, former: int) -> Iterator[int]:
        """Numbers to try: the former one, then some at random, that other nodes may not try as well."""
        there = self._shared.table
        for number in self._preferred(labels, former):
            if number in CLUSTER and str(number) not in there and self._may_take(labels, number):
                yield number
        tried = 0
        while tried < ATTEMPTS:
            number = random.choice(CLUSTER)  # noqa: S311  # spreads nodes over the numbers
            if str(number) in there or number in self._held or not self._may_take(labels, number):
                continue
            tried += 1
            yield number
