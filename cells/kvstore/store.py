"""The kvstore for its users: connection, leases, locks and status.

Source: Cilium 1.17, the status check of its etcd client. Unlike Cilium's, our agent does not exit when
       etcd is lost: the last known state stays in force.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final

import anyio
import msgspec

from cells.kubernetes.resources import ServiceAddresses
from cells.kvstore.etcd import EtcdClient, StoreMetrics
from cells.kvstore.model import (
    HEARTBEAT,
    HEARTBEAT_INTERVAL,
    INIT_LOCK,
    Compare,
    HeartbeatStaleError,
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
from lifecycle import Health, Jobs, Lifecycle, Logger, ReadTable

__all__ = ["Heartbeat", "KVStore", "Lock", "StoreState", "lock"]


# Leases: a node's keys outlive its agent by the TTL.
#
# Source: Cilium 1.17, the lease manager: a lease has a maximum number of keys, and is renewed after a third
#         of its TTL.

MAX_KEYS: Final = 1000
"""Maximum number of keys of a lease: when it expires etcd deletes them all at once."""
RETRY: Final = 2.0
"""Seconds between attempts to renew a lease, while the store does not answer."""


class Leases:
    """Grants leases for keys, at most MAX_KEYS each, and renews them in losses()."""

    def __init__(self, client: EtcdClient, ttl: float) -> None:
        self._client = client
        self._ttl = ttl
        self._keys: dict[int, set[str]] = {}
        self._renewed_at: dict[int, float] = {}
        self._lost = False
        """Whether a lease has expired since the last item of losses()."""
        self._granting = anyio.Lock()
        self._wake = anyio.Event()

    def __contains__(self, lease: int) -> bool:
        return lease in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    async def lease_for(self, key: str) -> int:
        """Return the lease for the key, and grant one if all are full. Raises StoreError."""
        async with self._granting:
            for lease, keys in self._keys.items():
                if key in keys:
                    return lease
            for lease, keys in self._keys.items():
                if len(keys) < MAX_KEYS:
                    keys.add(key)
                    return lease
            lease = await self._client.grant(self._ttl)
            self._keys[lease] = {key}
            self._renewed_at[lease] = time.monotonic()
            return lease

    def release(self, key: str) -> None:
        """Remove a deleted key from its lease."""
        for keys in self._keys.values():
            keys.discard(key)

    def lost(self, lease: int) -> None:
        """Forget an expired lease; its keys are deleted."""
        self._renewed_at.pop(lease, None)
        if self._keys.pop(lease, None) is not None:
            self._lost = True
            self._wake.set()

    def renew_all(self) -> None:
        """Renew all leases now: after a reconnect, to detect the expired ones."""
        self._renewed_at = dict.fromkeys(self._renewed_at, -math.inf)
        self._wake.set()

    async def losses(self) -> AsyncIterator[None]:
        """Renew all leases forever, and yield after some have expired."""
        while True:
            pause = await self._renew_due()
            if self._lost:
                self._lost = False
                yield
            with anyio.move_on_after(pause):
                await self._wake.wait()
            self._wake = anyio.Event()

    async def _renew_due(self) -> float:
        """Renew the leases that are due, and return the seconds until the next one is."""
        pause = self._ttl / 3
        for lease, renewed in list(self._renewed_at.items()):
            due = max(0.0, renewed + self._ttl / 3 - time.monotonic())
            if due <= 0:
                due = self._ttl / 3 if await self._renew(lease) else RETRY
            pause = min(pause, due)
        return pause

    async def _renew(self, lease: int) -> bool:
        began = time.monotonic()
        try:
            await self._client.keep_alive(lease)
        except LeaseLostError:
            self.lost(lease)
            return True
        except StoreError:  # _check() reports it; the store may answer again before the lease expires
            return False
        self._renewed_at[lease] = began
        return True


# Locks, compatible with etcd's own clients and Cilium's.
#
# Source: etcd 3.4, concurrency.Mutex: below a prefix each waiter has a key named by its lease, and waits for
#         the deletion of the key created before its own. Cilium 1.17: the lease has 25 s.

LOCK_TTL: Final = 25.0
"""TTL of a lock's lease, in seconds: then the lock of a dead holder expires."""


class Lock(msgspec.Struct, frozen=True):
    """A lock that is held."""

    key: str
    create_revision: int

    @property
    def held(self) -> Compare:
        """The condition for transactions: they fail once the lock is lost."""
        return Compare(self.key, "create", self.create_revision)


@asynccontextmanager
async def lock(client: EtcdClient, path: str) -> AsyncIterator[Lock]:
    """Acquire the lock of the path, and release it after the block. Raises StoreError.

    The lease is renewed while waiting only: a holder loses the lock after LOCK_TTL.
    """
    prefix = f"{path}/"
    lease = await client.grant(LOCK_TTL)
    try:
        key = f"{prefix}{lease:x}"
        await client.txn(put(key, b"", lease), when=[absent(key)])
        own = (await client.txn(get(key))).found[0]
        if own is None:
            raise StoreError(f"the lock {key} was lost")
        while (earlier := await client.predecessor(prefix, own.create_revision)) is not None:
            await _wait_deleted(client, earlier)
            await client.keep_alive(lease)
        yield Lock(key, own.create_revision)
    finally:
        with (
            anyio.CancelScope(shield=True),
            suppress(StoreError),
        ):  # otherwise the lock expires with its lease
            await client.revoke(lease)


async def _wait_deleted(client: EtcdClient, found: KeyValue) -> None:
    """Wait until the key is deleted, at most a third of LOCK_TTL. Raises StoreError."""
    with anyio.move_on_after(LOCK_TTL / 3):
        async with aclosing(client.watch(found.key, found.mod_revision + 1)) as changes:
            async for events in changes:
                if any(event.kv is None and event.key == found.key for event in events):
                    return


CHECK_INTERVAL: Final = 15.0
"""Seconds between status checks."""
LOCK_TIMEOUT: Final = 60.0
"""Deadline of INIT_LOCK, in seconds: many nodes may connect at once."""


class Heartbeat:
    """Checks that the operator keeps writing its heartbeat key."""

    def __init__(self) -> None:
        self._revision = 0
        self._changed_at = time.monotonic()

    def observe(self, revision: int) -> None:
        """Record the key's mod revision. Raises HeartbeatStaleError after two intervals without a
        change."""
        now = time.monotonic()
        if revision != self._revision:
            self._revision, self._changed_at = revision, now
        elif now - self._changed_at > 2 * HEARTBEAT_INTERVAL:
            raise HeartbeatStaleError(
                f"{now - self._changed_at:.0f}s since last heartbeat update has been received"
            )


class StoreState(msgspec.Struct, frozen=True):
    """State and message of the kvstore in ``cilium-dbg status``."""

    state: State
    message: str = ""


class KVStore:
    """The node's connection to the kvstore; no job runs without one configured."""

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
        """Number of locks that are held or waited for."""
        self.generation = 0
        """Incremented when the store has lost keys: it was replaced, or restored from a backup."""
        self._resyncs = 0
        """Number of reconnects and replacements."""
        self._changed = anyio.Event()
        """Set when ``generation`` or ``_resyncs`` changes."""
        self._syncing: set[object] = set()
        self._own_keys: list[tuple[ReadTable[str, Any], asyncio.Event]] = []
        """Tables of deletions(), with the events that are set when one of their keys is deleted."""
        self._health = health.child("connection")
        self._log = log
        self._error = "not connected yet"
        """Why the store is unreachable; empty while it is reachable."""
        self._quorum_error = ""
        """Why the reachable store has no quorum or rejects writes; empty if it does not."""
        self._endpoint_status = ""
        self._errors = 0
        """Number of failed checks in a row."""
        self._writable = False
        """Whether a write has succeeded since the last failure."""
        self._heartbeat = Heartbeat()
        if settings.enabled:
            lifecycle.enter("connect to the store", self.client.open)
            self._timer = jobs.timer("monitor the store", self._check, CHECK_INTERVAL)
            self._timer.trigger()
            jobs.observe("keep leases", self.leases.losses, self._lease_lost)
            if services is not None:
                jobs.observe("follow Services", services.services.changes, self._services_changed)

    @property
    def enabled(self) -> bool:
        """Whether a kvstore is configured."""
        return self.settings.enabled

    def state(self) -> StoreState:
        """Return the state as ``cilium-dbg status`` shows it."""
        if not self.enabled:
            return StoreState("Disabled")
        error = self._error or self._quorum_error
        if self._errors > self.settings.kvstore_max_consecutive_quorum_errors:
            return StoreState("Failure", f"quorum check failed {self._errors} times in a row: {error}")
        if not self._endpoint_status:
            return StoreState("Failure", f"not able to connect to any etcd endpoints: {self._error}")
        count = len(self.client.endpoints)
        quorum = f"{error}, consecutive-errors={self._errors}" if error else "true"
        return StoreState(
            "Ok",
            f"etcd: {int(not self._error)}/{count} connected, leases={len(self.leases)}, lock"
            f" leases={self.lock_leases}, has-quorum={quorum}: {self._endpoint_status}",
        )

    # Notifications for watches and writers of keys

    async def resyncs(self) -> AsyncIterator[None]:
        """Yield after a reconnect, a replacement of the store or a lost lease: keys must be compared again.

        Events before the iteration, and simultaneous ones, are one item.
        """
        seen = 0
        while True:
            while self._resyncs == seen:
                await self._changed.wait()
            seen = self._resyncs
            yield

    def _request_resync(self) -> None:
        self._resyncs += 1
        self._changed.set()
        self._changed = anyio.Event()

    def reached(self) -> None:
        """Record that the store has answered."""
        if not self._error:
            return
        self._log.info("connected to etcd", endpoint=self.client.endpoint)
        self._error, self._errors = "", 0
        self._health.ok(f"connected to {self.client.endpoint}")
        self._timer.trigger()
        self.leases.renew_all()
        self._request_resync()

    def failed(self, error: StoreError) -> None:
        """Record that the store did not answer; tables and maps stay unchanged."""
        if not self._error:
            self._log.warning("etcd is unreachable: the last known state stays in force", error=str(error))
            self._timer.trigger()
        self._error = str(error)
        self._health.degraded("etcd is unreachable: the last known state stays in force", error)

    def replaced(self) -> None:
        """Record that the store has lost keys: watches relist, and this node's keys are written again."""
        self._log.warning("etcd has lost keys: writing this node's keys again")
        self.generation += 1
        self._request_resync()

    async def wait_replaced(self, generation: int) -> None:
        """Wait until the generation differs from this one."""
        while self.generation == generation:
            await self._changed.wait()

    def register_watch(self, watch: object) -> None:
        """Keep the bootstrap rate limit until this watch has listed its keys."""
        self._syncing.add(watch)

    def watch_synced(self, watch: object) -> None:
        """Record that the watch has listed its keys; after the last one the rate limit is lowered."""
        self._syncing.discard(watch)
        if not self._syncing:
            self.client.end_bootstrap()

    async def deletions(self, wanted: ReadTable[str, Any]) -> AsyncIterator[None]:
        """Yield after a watch has reported the deletion of keys of this table; several are one item."""
        deleted = asyncio.Event()
        self._own_keys.append((wanted, deleted))
        try:
            while True:
                await deleted.wait()
                deleted.clear()
                yield
        finally:
            self._own_keys.remove((wanted, deleted))

    def keys_deleted(self, keys: Collection[str]) -> None:
        """Record that a watch has reported the deletion of these keys."""
        for wanted, deleted in self._own_keys:
            if any(key in wanted for key in keys):
                deleted.set()

    async def _lease_lost(self, _: None) -> None:
        self.replaced()

    async def _services_changed(self, _: object) -> None:
        self.client.redial()

    async def _check(self) -> None:
        """Check connection, quorum, heartbeat and, after a failure, writes.

        reached() and failed() of users trigger the next check early.
        """
        no_quorum = ""
        try:
            described = await self.client.describe()
            beat = await self.client.lookup(HEARTBEAT)  # a linearizable read: needs a quorum
            self._endpoint_status = described
            self.reached()
            if beat is not None:
                self._heartbeat.observe(beat.mod_revision)
            if not self._writable:
                await self._check_writable()
        except StoreUnavailableError as error:
            self._writable = False
            self._errors += 1
            self.metrics.count_quorum_error("timeout")
            self.failed(error)
            return
        except StoreError as error:
            self._writable = False
            stale = isinstance(error, HeartbeatStaleError)
            self.metrics.count_quorum_error("no event received" if stale else "lock timeout")
            no_quorum = str(error)
        self._set_quorum_error(no_quorum)

    def _set_quorum_error(self, problem: str) -> None:
        """Record the result of a check that got answers; ``problem`` is empty if all is well."""
        self._errors = self._errors + 1 if problem else 0
        if problem:
            if not self._quorum_error:
                self._log.warning("etcd is reachable but has no quorum", error=problem)
            self._health.degraded(f"etcd is reachable but has no quorum: {problem}")
        elif self._quorum_error:
            self._health.ok(f"connected to {self.client.endpoint}")
        self._quorum_error = problem

    async def _check_writable(self) -> None:
        """Take INIT_LOCK: etcd without space answers reads but rejects writes. Raises StoreError."""
        self.lock_leases += 1
        try:
            with anyio.fail_after(LOCK_TIMEOUT):
                async with lock(self.client, INIT_LOCK):
                    self._writable = True
        except TimeoutError as error:
            raise StoreError(f"lock {INIT_LOCK} not acquired within {LOCK_TIMEOUT:g} s") from error
        finally:
            self.lock_leases -= 1
