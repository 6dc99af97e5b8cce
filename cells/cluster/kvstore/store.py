"""The store as its users see it: a connection, leases, and how it is.

For:    PrefixWatch, OwnKeys, identities, status. Needs: KVStoreSettings. Gives: KVStore, StoreState.
Source: Cilium 1.17, the status check of its etcd client. Unlike there an agent does not end when the store is
        gone: what it knows stays in force.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from cells.cluster.kvstore.etcd import EtcdClient
from cells.cluster.kvstore.keys import HEARTBEAT, HEARTBEAT_INTERVAL, INIT_LOCK
from cells.cluster.kvstore.leases import Leases
from cells.cluster.kvstore.locks import lock
from cells.cluster.kvstore.metrics import StoreMetrics
from cells.cluster.kvstore.model import StoreError
from cells.cluster.kvstore.settings import KVStoreSettings
from cells.observe.health import State
from lifecycle import Health, Jobs, Lifecycle, Logger

INTERVAL: Final = 15.0
"""Seconds between looks at the store."""
LOCK_TIMEOUT: Final = 60.0
"""Seconds that the lock of who connects may take: many may connect at once."""


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
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.client = EtcdClient(settings.options, metrics)
        self.leases = Leases(self.client, settings.kvstore_lease_ttl)
        self.lock_leases = 0
        """Locks that are held or waited for."""
        self.generation = 0
        """Goes up when the store is found to be another one than before."""
        self._replaced = anyio.Event()
        self._returned: list[Callable[[], object]] = []
        self._expected: set[object] = set()
        self._health = health.child("connection")
        self._log = log
        self._error = "not connected yet"
        """Why it is not reached; empty while it is."""
        self._described = ""
        self._errors = 0
        self._takes_writes = False
        """Whether it is known to, since it was last away."""
        self._heartbeat = (0, time.monotonic())
        """Its last change, and when that was seen."""
        if settings.enabled:
            lifecycle.enter("connect to the store", self.client.open)
            self._timer = jobs.timer("look at the store", self._look, INTERVAL)
            self._timer.trigger()
            jobs.one_shot("keep leases", self.leases.run)
            self.leases.on_lost(self._lease_lost)

    @property
    def enabled(self) -> bool:
        """Whether there is one."""
        return self.settings.enabled

    def state(self) -> StoreState:
        """How it is, as ``cilium-dbg status`` shows it."""
        if not self.enabled:
            return StoreState("Disabled")
        if self._errors > self.settings.kvstore_max_consecutive_quorum_errors:
            return StoreState("Failure", f"quorum check failed {self._errors} times in a row: {self._error}")
        if not self._described:
            return StoreState("Failure", f"not able to connect to any etcd endpoints: {self._error}")
        count = len(self.client.endpoints)
        quorum = f"{self._error}, consecutive-errors={self._errors}" if self._error else "true"
        return StoreState(
            "Ok",
            f"etcd: {int(not self._error)}/{count} connected, leases={len(self.leases)}, lock"
            f" leases={self.lock_leases}, has-quorum={quorum}: {self._described}",
        )

    # What its users tell

    def on_return(self, notified: Callable[[], object]) -> None:
        """Call this when the store is reached again, or is another one, or a lease was lost."""
        self._returned.append(notified)

    def reached(self) -> None:
        """It answered."""
        if not self._error:
            return
        self._log.info("etcd is reached", endpoint=self.client.endpoint)
        self._error, self._errors = "", 0
        self._health.ok(f"connected to {self.client.endpoint}")
        self._timer.trigger()
        self.leases.look()
        for notified in self._returned:
            notified()

    def failed(self, error: StoreError) -> None:
        """It did not; everything stays as it was."""
        if not self._error:
            self._log.warning("etcd is not reached: what is known stays in force", error=str(error))
            self._timer.trigger()
        self._error = str(error)
        self._health.degraded("etcd is not reached: what is known stays in force", error)

    def replaced(self) -> None:
        """It is another one, or an old copy: what it misses is written again, and read again."""
        self._log.warning("etcd has lost keys: writing this node's keys again")
        self.generation += 1
        self._replaced.set()
        self._replaced = anyio.Event()
        for notified in self._returned:
            notified()

    async def wait_replaced(self, generation: int) -> None:
        """Wait until it is another one than that of the generation."""
        while self.generation == generation:
            await self._replaced.wait()

    def expect(self, watch: object) -> None:
        """The watch will read keys; until all have, requests are not held back."""
        self._expected.add(watch)

    def was_read(self, watch: object) -> None:
        """The watch has read all its keys."""
        self._expected.discard(watch)
        if not self._expected:
            self.client.settle()

    def _lease_lost(self) -> None:
        self.replaced()

    async def _look(self) -> None:
        """See whether it answers and agrees. Whoever reaches it before the next look has it looked at."""
        try:
            described = await self.client.describe()
            beat = await self.client.lookup(HEARTBEAT)  # takes a quorum
            if beat is not None:
                self._beaten(beat.mod_revision)
            self._described = described
            if not self._takes_writes:
                await self._lock_once()
        except StoreError as error:
            self._takes_writes = False
            self._errors += 1
            self.metrics.no_quorum("timeout" if "exceeded" in str(error).lower() else "request")
            self.failed(error)
            return
        self._errors = 0
        self.reached()

    async def _lock_once(self) -> None:
        """Take the lock of who connects: a store without room still answers questions. Raises StoreError."""
        self.lock_leases += 1
        try:
            with anyio.fail_after(LOCK_TIMEOUT):
                async with lock(self.client, INIT_LOCK):
                    self._takes_writes = True
        except TimeoutError as error:
            raise StoreError(f"no turn at the lock {INIT_LOCK} within {LOCK_TIMEOUT:g} s") from error
        finally:
            self.lock_leases -= 1

    def _beaten(self, revision: int) -> None:
        """Raises StoreError when no operator has written its heartbeat for too long."""
        last, seen = self._heartbeat
        now = time.monotonic()
        if revision != last:
            self._heartbeat = (revision, now)
        elif now - seen > 2 * HEARTBEAT_INTERVAL:
            raise StoreError(f"{now - seen:.0f}s since last heartbeat update has been received")
