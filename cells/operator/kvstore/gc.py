"""Writes the heartbeat, and deletes numbers that no node uses.

Needs: KVStore, GCSettings, IdentityPasses.   Gives: KVStoreGC.
Source: Cilium 1.17, RunGC of the kvstore's allocator: a number that has been without a node in two passes,
        and was not written between them, goes, under the lock of its labels.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import anyio

from cells.cluster.kvstore import (
    HEARTBEAT,
    HEARTBEAT_INTERVAL,
    IDS,
    LOCKS,
    VALUES,
    Compare,
    KeyValue,
    KVStore,
    delete,
    lock,
    put,
)
from cells.operator.gc import GCSettings, IdentityPasses
from lifecycle import Jobs, Logger

KVSTORE: Final = "kvstore"
PATIENCE: Final = 60.0
"""Seconds to wait for the lock of somebody who allocates just now."""


class KVStoreGC:
    """Looks every identity-gc-interval; does nothing without a store."""

    def __init__(
        self, store: KVStore, settings: GCSettings, passes: IdentityPasses, *, jobs: Jobs, log: Logger
    ) -> None:
        self._store = store
        self._settings = settings
        self._log = log
        self._unused: dict[str, int] = {}
        """Numbers that no node used in the last pass, and when they had been written."""
        self._passes = passes
        if not store.enabled:
            return
        passes.expect(KVSTORE)
        jobs.timer("heartbeat", self.beat, HEARTBEAT_INTERVAL).trigger()
        if settings.identity_gc_interval:
            jobs.timer("identities", self.collect, settings.identity_gc_interval)

    async def beat(self) -> None:
        """Write the time. Raises StoreError."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self._store.client.txn(put(HEARTBEAT, now.encode()))

    async def collect(self) -> None:
        """One pass. Raises StoreError."""
        with self._passes.counted(KVSTORE):
            await self._collect()

    async def _collect(self) -> None:
        client = self._store.client
        numbers, _ = await client.list_prefix(IDS)
        used, _ = await client.list_prefix(VALUES)
        in_use = {kv.key.removeprefix(VALUES).rpartition("/")[0] for kv in used}
        before, self._unused = self._unused, {}
        deleted = 0
        for kv in numbers:
            if kv.value.decode(errors="replace") in in_use:
                continue
            if before.get(kv.key) != kv.mod_revision:
                self._unused[kv.key] = kv.mod_revision
            elif await self._delete(kv):
                deleted += 1
                if deleted % self._settings.identity_gc_rate_limit == 0:
                    await anyio.sleep(self._settings.identity_gc_rate_interval)
        self._passes.found(KVSTORE, alive=len(numbers) - deleted - len(self._unused), deleted=deleted)
        if deleted:
            self._log.info("identities that no node uses deleted", count=deleted)

    async def _delete(self, master: KeyValue) -> bool:
        """Delete the number, unless somebody uses it by now. Raises StoreError."""
        client, labels = self._store.client, master.value.decode(errors="replace")
        with anyio.move_on_after(PATIENCE):
            async with lock(client, f"{LOCKS}{labels}.lock") as held:
                if await client.first(f"{VALUES}{labels}/") is not None:
                    return False
                unchanged = Compare(master.key, "mod", master.mod_revision)
                return (await client.txn(delete(master.key), when=[held.held, unchanged])).succeeded
        return False
