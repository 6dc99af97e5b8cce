"""Numbers of identities, by keys of the kvstore.

For:    Identities. Needs: KVStore, SharedIdentities. Gives: KVStoreAllocator.
Source: Cilium 1.17, pkg/allocator: under the lock of the labels, a key of any node that uses them tells their
        number; else a number that no key has is taken. The operator deletes master keys that nobody uses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final

import anyio

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

Labels = tuple[str, ...]
RETRY: Final = Backoff(first=0.2, maximum=5.0)
ATTEMPTS: Final = 16
"""Numbers that are tried for labels, before the next round."""


class KVStoreAllocator:
    """An IdentityAllocator over keys: labels that have a number keep it, others get a new one.

    Before the keys are known an endpoint from before a restart keeps its number, and others wait.
    """

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
        self._store = store
        self._shared = shared
        self._node = node
        self._grace = grace
        self._health = health
        self._log = log
        self._made: dict[Labels, int] = {}
        """Numbers that were made or found here, and which the watch has yet to bring."""
        self._written: dict[str, str] = {}
        """Keys that say that this node uses what was taken here."""
        self._kept: set[int] = set()
        """Numbers from before a restart, taken over before the keys were known."""
        self._held: set[int] = set()
        self._fresh: dict[int, float] = {}
        """When numbers were taken here."""
        self._waiting: dict[Labels, str] = {}

    def allocate_now(self, labels: Labels, former: int = 0) -> int | None:
        """The number of these labels, as keys say; before they are known the former number."""
        if not self._shared.table.initialized:
            if former not in CLUSTER or former in self._kept:
                return None
            self._kept.add(former)
            return former
        return self._known(labels, former)

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

    def release(self, number: int) -> None:
        """The key of this node goes; with the last one the operator deletes the number."""
        self._fresh.pop(number, None)
        self._kept.discard(number)

    def grace(self, number: int) -> float:
        """What is left of the grace period of a number taken here."""
        made = self._fresh.get(number)
        left = 0.0 if made is None else made + self._grace - time.monotonic()
        if left <= 0:
            self._fresh.pop(number, None)
        return max(0.0, left)

    def hold(self, number: int) -> None:
        """It is not taken for anybody new."""
        self._held.add(number)

    def unhold(self, number: int) -> None:
        """It may be taken again."""
        self._held.discard(number)

    def seen(self, labels: Labels) -> None:
        """The watch has brought a number for these labels."""
        self._made.pop(labels, None)

    def is_on_its_way(self, number: int) -> bool:
        """Whether the number was taken here, and the watch has yet to bring it."""
        return number in self._made.values()

    def written(self) -> dict[str, str]:
        """Keys of this node that were written here; one that nobody came to use is to be deleted."""
        written, self._written = self._written, {}
        return written

    async def restore(self, number: int, labels: Labels) -> None:
        """Have the number in use stand for its labels again. Raises StoreError."""
        key = f"{IDS}{number}"
        outcome = await self._store.client.txn(put(key, encode(labels).encode()), when=[absent(key)])
        if outcome.succeeded:  # else somebody was faster: the watch brings what it stands for
            self._log.warning("identity in use had no key, it has one again", identity=number, labels=labels)

    def _known(self, labels: Labels, former: int) -> int | None:
        found = self._shared.numbers(labels)
        if former in found:
            return former
        return found[0] if found else self._made.get(labels)

    async def _make(self, labels: Labels, former: int) -> bool:
        """Have a number stand for the labels, or find it; whether one does now. Raises StoreError."""
        self._store.lock_leases += 1
        try:
            async with lock(self._store.client, f"{LOCKS}{encode(labels)}") as held:
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
        """Whether a number that nobody has stands for the labels now."""
        if len(self._shared.table) >= len(CLUSTER):
            raise StoreError(f"no free identity between {CLUSTER.start} and {CLUSTER.stop - 1}")
        lease = await self._store.leases.lease_for(key := value_key(labels, self._node()))
        for number in self._free(former):
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

    def _free(self, former: int) -> Iterator[int]:
        """Numbers to try: the former one, then some at random, that other nodes may not try as well."""
        there = self._shared.table
        if former in CLUSTER and str(former) not in there:
            yield former
        tried = 0
        while tried < ATTEMPTS:
            number = random.choice(CLUSTER)  # noqa: S311  # spreads nodes over the numbers
            if str(number) not in there and number not in self._held:
                tried += 1
                yield number

    def _wait(self, labels: Labels, error: str) -> None:
        if error:
            self._waiting[labels] = error
        else:
            self._waiting.pop(labels, None)
        if self._waiting:
            why = next(iter(self._waiting.values()))
            self._health.degraded(f"{len(self._waiting)} sets of labels wait for an identity: {why}")
        else:
            self._health.ok("all labels have identities")
