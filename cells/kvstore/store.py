"""The store as its users see it: a connection, leases, and how it is.

Source: Cilium 1.17, the status check of its etcd client. Unlike there an agent does not end when the store is
        lost: what it knows stays in force.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

import anyio
import msgspec

from cells.kubernetes.resources import ServiceAddresses
from cells.kvstore.etcd import EtcdClient, StoreMetrics
from cells.kvstore.model import (
    HEARTBEAT,
    HEARTBEAT_INTERVAL,
    INIT_LOCK,
    Compare,
    KeyValue,
    LeaseLostError,
    StoreError,
    StoreUnavailableError,
    absent,
    get,
    put,
)
from cells.kvstore.settings import KVStoreSettings
from cells.observe.health import State
from lifecycle import Health, Jobs, Lifecycle, Logger

__all__ = ["Heartbeat", "KVStore", "Lock", "StoreState", "lock"]


# Leases: this node's keys stay in the store as long as its agent, or for a while after it.
#
# Source: Cilium 1.17, the lease manager: a lease has so many keys at most, and is renewed every third of its
#         time.

MOST_KEYS: Final = 1000
"""Of one lease: when it ends etcd deletes them all at once."""
RETRY: Final = 2.0
"""Seconds between attempts to keep a lease, while the store does not answer."""


class Leases:
    """As many leases as the keys need, renewed; who iterates over ``losses()`` learns that one has ended."""

    def __init__(self, client: EtcdClient, ttl: float) -> None:
        self._client = client
        self._ttl = ttl
        self._keys: dict[int, set[str]] = {}
        self._renewed: dict[int, float] = {}
        self._lost = False
        """Whether one has ended since the last item of losses()."""
        self._granting = anyio.Lock()
        self._asked = anyio.Event()

    def __contains__(self, lease: int) -> bool:
        return lease in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    async def lease_for(self, key: str) -> int:
        """The lease to write the key under. Raises StoreError."""
        async with self._granting:
            for lease, keys in self._keys.items():
                if key in keys:
                    return lease
            for lease, keys in self._keys.items():
                if len(keys) < MOST_KEYS:
                    keys.add(key)
                    return lease
            lease = await self._client.grant(self._ttl)
            self._keys[lease] = {key}
            self._renewed[lease] = time.monotonic()
            return lease

    def release(self, key: str) -> None:
        """The key is deleted: it takes no room of a lease any more."""
        for keys in self._keys.values():
            keys.discard(key)

    def lost(self, lease: int) -> None:
        """The lease has ended, and with it its keys."""
        self._renewed.pop(lease, None)
        if self._keys.pop(lease, None) is not None:
            self._lost = True
            self._asked.set()

    def look(self) -> None:
        """The store was away: see now which leases it still knows."""
        self._renewed = dict.fromkeys(self._renewed, -math.inf)
        self._asked.set()

    async def losses(self) -> AsyncIterator[None]:
        """Keep them all, for ever; an item means that some have ended, and their keys with them."""
        while True:
            pause = await self._keep_all()
            if self._lost:
                self._lost = False
                yield
            with anyio.move_on_after(pause):
                await self._asked.wait()
            self._asked = anyio.Event()

    async def _keep_all(self) -> float:
        """Keep those that are due; seconds until the next one is."""
        pause = self._ttl / 3
        for lease, renewed in list(self._renewed.items()):
            due = max(0.0, renewed + self._ttl / 3 - time.monotonic())
            if due <= 0:
                due = self._ttl / 3 if await self._keep(lease) else RETRY
            pause = min(pause, due)
        return pause

    async def _keep(self, lease: int) -> bool:
        began = time.monotonic()
        try:
            await self._client.keep(lease)
        except LeaseLostError:
            self.lost(lease)
            return True
        except StoreError:  # the looks at the store report it; it may come back within the lease's time
            return False
        self._renewed[lease] = began
        return True


# Locks: one client of the store at a time, as etcd's own clients and Cilium's take them.
#
# Source: etcd 3.4, concurrency.Mutex: below a prefix each waiter has a key named by its lease, and waits for
#         the end of the key created before its own. Cilium 1.17: its lease lasts 25 s, and is renewed.

LEASE: Final = 25.0
"""Seconds after which the lock of a dead holder is free."""


class Lock(msgspec.Struct, frozen=True):
    """A lock that is held."""

    key: str
    create_revision: int

    @property
    def held(self) -> Compare:
        """What a transaction compares, so that it does nothing once the lock is lost."""
        return Compare(self.key, "create", self.create_revision)


@asynccontextmanager
async def lock(client: EtcdClient, path: str) -> AsyncIterator[Lock]:
    """Hold the lock of the path. Raises StoreError.

    The lease is renewed while it waits; once it is held, it ends with the lease, whatever happens.
    """
    prefix = f"{path}/"
    lease = await client.grant(LEASE)
    try:
        key = f"{prefix}{lease:x}"
        await client.txn(put(key, b"", lease), when=[absent(key)])
        own = (await client.txn(get(key))).found[0]
        if own is None:
            raise StoreError(f"the lock {key} was lost")
        while (earlier := await client.predecessor(prefix, own.create_revision)) is not None:
            await _wait_deleted(client, earlier)
            await client.keep(lease)
        yield Lock(key, own.create_revision)
    finally:
        with anyio.CancelScope(shield=True), suppress(StoreError):  # else it ends with its lease
            await client.revoke(lease)


async def _wait_deleted(client: EtcdClient, found: KeyValue) -> None:
    """Wait until the key is deleted, at most a third of the time of a lock's lease. Raises StoreError."""
    with anyio.move_on_after(LEASE / 3):
        async with aclosing(client.watch(found.key, found.mod_revision + 1)) as changes:
            async for events in changes:
                if any(event.kv is None and event.key == found.key for event in events):
                    return


INTERVAL: Final = 15.0
"""Seconds between looks at the store."""
LOCK_TIMEOUT: Final = 60.0
"""Seconds that the lock of who connects may take: many may connect at once."""


class Heartbeat:
    """When the key that an operator keeps writing was last seen to change."""

    def __init__(self) -> None:
        self._last = 0
        self._at = time.monotonic()

    def seen(self, revision: int) -> None:
        """Its revision now. Raises StoreError when it has not changed for too long."""
        now = time.monotonic()
        if revision != self._last:
            self._last, self._at = revision, now
        elif now - self._at > 2 * HEARTBEAT_INTERVAL:
            raise StoreError(f"{now - self._at:.0f}s since last heartbeat update has been received")


class StoreState(msgspec.Struct, frozen=True):
    """How the store is: ``Ok``, ``Failure`` or ``Disabled``, and in words."""

    state: State
    message: str = ""


class KVStore:
    """The node's way to the store; without one configured nothing of it runs."""

    def __init__(
        self,
        settings: KVStoreSettings,
        metrics: StoreMetrics,
        services: ServiceAddresses | None = None,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        """``services`` resolves addresses of etcd that are names of Services."""
        self.settings = settings
        self.metrics = metrics
        self.client = EtcdClient(settings.options, metrics, services.resolve if services is not None else str)
        self.leases = Leases(self.client, settings.kvstore_lease_ttl)
        self.lock_leases = 0
        """Locks that are held or waited for."""
        self.generation = 0
        """Goes up when the store is found to be another one than before."""
        self._returns = 0
        """How often it was reached again, or replaced."""
        self._news = anyio.Event()
        """Set when either count goes up."""
        self._expected: set[object] = set()
        self._health = health.child("connection")
        self._log = log
        self._error = "not connected yet"
        """Why it is not reached; empty while it is."""
        self._no_quorum = ""
        """Why its members do not agree, or take no writes, though it is reached; empty while they do."""
        self._described = ""
        self._errors = 0
        """Looks in a row that found either."""
        self._takes_writes = False
        """Whether it is known to, since it was last away."""
        self._heartbeat = Heartbeat()
        if settings.enabled:
            lifecycle.enter("connect to the store", self.client.open)
            self._timer = jobs.timer("monitor the store", self._look, INTERVAL)
            self._timer.trigger()
            jobs.observe("keep leases", self.leases.losses, self._lease_lost)
            if services is not None:
                jobs.observe("follow Services", services.services.changes, self._services_changed)

    @property
    def enabled(self) -> bool:
        """Whether there is one."""
        return self.settings.enabled

    def state(self) -> StoreState:
        """How it is, as ``cilium-dbg status`` shows it."""
        if not self.enabled:
            return StoreState("Disabled")
        error = self._error or self._no_quorum
        if self._errors > self.settings.kvstore_max_consecutive_quorum_errors:
            return StoreState("Failure", f"quorum check failed {self._errors} times in a row: {error}")
        if not self._described:
            return StoreState("Failure", f"not able to connect to any etcd endpoints: {self._error}")
        count = len(self.client.endpoints)
        quorum = f"{error}, consecutive-errors={self._errors}" if error else "true"
        return StoreState(
            "Ok",
            f"etcd: {int(not self._error)}/{count} connected, leases={len(self.leases)}, lock"
            f" leases={self.lock_leases}, has-quorum={quorum}: {self._described}",
        )

    # The keys of its users

    async def returns(self) -> AsyncIterator[None]:
        """An item when the store was reached again, is another one, or a lease was lost.

        What happened before the iteration, or together, is one item.
        """
        seen = 0
        while True:
            while self._returns == seen:
                await self._news.wait()
            seen = self._returns
            yield

    def _returned(self) -> None:
        self._returns += 1
        self._news.set()
        self._news = anyio.Event()

    def reached(self) -> None:
        """It answered."""
        if not self._error:
            return
        self._log.info("connected to etcd", endpoint=self.client.endpoint)
        self._error, self._errors = "", 0
        self._health.ok(f"connected to {self.client.endpoint}")
        self._timer.trigger()
        self.leases.look()
        self._returned()

    def failed(self, error: StoreError) -> None:
        """It did not; everything stays as it was."""
        if not self._error:
            self._log.warning("etcd is unreachable: the last known state stays in force", error=str(error))
            self._timer.trigger()
        self._error = str(error)
        self._health.degraded("etcd is unreachable: the last known state stays in force", error)

    def replaced(self) -> None:
        """It is another one, or an old copy: what it misses is written again, and read again."""
        self._log.warning("etcd has lost keys: writing this node's keys again")
        self.generation += 1
        self._returned()

    async def wait_replaced(self, generation: int) -> None:
        """Wait until it is another one than that of the generation."""
        while self.generation == generation:
            await self._news.wait()

    def expect(self, watch: object) -> None:
        """The watch will read keys; until all have, requests are not held back."""
        self._expected.add(watch)

    def was_read(self, watch: object) -> None:
        """The watch has read all its keys."""
        self._expected.discard(watch)
        if not self._expected:
            self.client.settle()

    async def _lease_lost(self, _: None) -> None:
        self.replaced()

    async def _services_changed(self, _: object) -> None:
        self.client.redial()

    async def _look(self) -> None:
        """See whether it answers and agrees. A user that reaches it earlier triggers the next look."""
        no_quorum = ""
        try:
            described = await self.client.describe()
            beat = await self.client.lookup(HEARTBEAT)  # takes a quorum
            self._described = described
            self.reached()
            if beat is not None:
                self._heartbeat.seen(beat.mod_revision)
            if not self._takes_writes:
                await self._lock_once()
        except StoreUnavailableError as error:
            self._takes_writes = False
            self._errors += 1
            self.metrics.no_quorum("timeout")
            self.failed(error)
            return
        except StoreError as error:
            self._takes_writes = False
            self.metrics.no_quorum("request")
            no_quorum = str(error)
        self._note_quorum(no_quorum)

    def _note_quorum(self, problem: str) -> None:
        """It is reached, and has this problem; empty for none."""
        self._errors = self._errors + 1 if problem else 0
        if problem:
            if not self._no_quorum:
                self._log.warning("etcd is reached, and has no quorum", error=problem)
            self._health.degraded(f"etcd is reached, and has no quorum: {problem}")
        elif self._no_quorum:
            self._health.ok(f"connected to {self.client.endpoint}")
        self._no_quorum = problem

    async def _lock_once(self) -> None:
        """Take the lock of who connects: a store without room still answers questions. Raises StoreError."""
        self.lock_leases += 1
        try:
            with anyio.fail_after(LOCK_TIMEOUT):
                async with lock(self.client, INIT_LOCK):
                    self._takes_writes = True
        except TimeoutError as error:
            raise StoreError(f"lock {INIT_LOCK} not acquired within {LOCK_TIMEOUT:g} s") from error
        finally:
            self.lock_leases -= 1
