"""Leases: what this node tells stays in the store as long as its agent, or for a while after it.

For:    OwnKeys and Lock. Needs: EtcdClient. Gives: Leases.
Source: Cilium 1.17, the lease manager: a lease has so many keys at most, and is kept every third of its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import anyio

from cells.cluster.kvstore.etcd import EtcdClient
from cells.cluster.kvstore.model import LeaseLostError, StoreError

MOST_KEYS: Final = 1000
"""Of one lease: when it ends etcd deletes them all at once."""
RETRY: Final = 2.0
"""Seconds between attempts to keep a lease, while the store does not answer."""


class Leases:
    """As many leases as the keys need, kept alive; writers are notified when theirs is lost."""

    def __init__(self, client: EtcdClient, ttl: float) -> None:
        self._client = client
        self._ttl = ttl
        self._keys: dict[int, set[str]] = {}
        self._kept: dict[int, float] = {}
        self._lost: list[Callable[[], object]] = []
        self._granting = anyio.Lock()
        self._asked = anyio.Event()

    def __contains__(self, lease: int) -> bool:
        return lease in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def on_lost(self, notified: Callable[[], object]) -> None:
        """Call this when a lease was lost: keys are to be compared with what the store holds."""
        self._lost.append(notified)

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
            self._kept[lease] = time.monotonic()
            return lease

    def release(self, key: str) -> None:
        """The key is deleted: it takes no room of a lease any more."""
        for keys in self._keys.values():
            keys.discard(key)

    def lost(self, lease: int) -> None:
        """The lease has ended, and with it its keys."""
        self._kept.pop(lease, None)
        if self._keys.pop(lease, None) is not None:
            for notified in self._lost:
                notified()

    def look(self) -> None:
        """The store was away: see now which leases it still knows."""
        self._kept = dict.fromkeys(self._kept, -math.inf)
        self._asked.set()

    async def run(self) -> None:
        """Keep them all, for ever."""
        while True:
            pause = await self._keep_all()
            with anyio.move_on_after(pause):
                await self._asked.wait()
            self._asked = anyio.Event()

    async def _keep_all(self) -> float:
        """Keep those that are due; seconds until the next one is."""
        pause = self._ttl / 3
        for lease, kept in list(self._kept.items()):
            due = max(0.0, kept + self._ttl / 3 - time.monotonic())
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
        except StoreError:  # the looks at the store tell; it may come back within the lease's time
            return False
        self._kept[lease] = began
        return True
