"""The base of both allocators of global identities, and their settings.

It tracks, without access to the cluster: numbers that were allocated but not yet delivered by the watch,
numbers that restored endpoints had, numbers that must not be allocated, and label sets that wait.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated, Final

from msgspec import Meta

from cells.cluster.identity.numbers import CLUSTER, ClusterNumbers
from lifecycle import Duration, Health, Settings, seconds

__all__ = ["AllocationMode", "AllocationSettings"]


# How nodes agree on identities.


class AllocationMode(Enum):
    """The store in which nodes agree on identities."""

    KVSTORE = "kvstore"
    """In the kvstore; without one, as crd."""
    CRD = "crd"
    """In CiliumIdentities; without an API server this node allocates alone."""
    DOUBLEWRITE_READKVSTORE = "doublewrite-readkvstore"
    """In the kvstore; CiliumIdentities are written as well."""
    DOUBLEWRITE_READCRD = "doublewrite-readcrd"
    """In CiliumIdentities; keys of the kvstore are written as well."""

    @property
    def reads_keys(self) -> bool:
        """Whether nodes agree through the kvstore; otherwise through CiliumIdentities."""
        return self in {AllocationMode.KVSTORE, AllocationMode.DOUBLEWRITE_READKVSTORE}

    @property
    def writes_both(self) -> bool:
        """Whether identities are written to both stores, for a migration."""
        return self in {AllocationMode.DOUBLEWRITE_READKVSTORE, AllocationMode.DOUBLEWRITE_READCRD}


class AllocationSettings(Settings, frozen=True):
    """How nodes agree on identities."""

    identity_allocation_mode: AllocationMode = AllocationMode.KVSTORE
    """Where nodes agree on identities: crd, in CiliumIdentity objects; kvstore, in keys of the kvstore, or as
    crd when none is set. doublewrite-readkvstore and doublewrite-readcrd write both, and read one."""

    identity_change_grace_period: Annotated[Duration, Meta(ge=0)] = seconds(5)
    """How long a running pod keeps its old identity, so that other nodes can learn a new one."""

    first_identity: int = 256
    """First number that a node without API server and kvstore gives to pods' labels, 256 to 65535. The next
    ones count up, and go on at 256 after 65535."""

    def faults(self) -> Iterator[str]:
        if self.first_identity not in CLUSTER:
            yield f"first-identity={self.first_identity}: expected {CLUSTER.start} to {CLUSTER.stop - 1}"


Labels = tuple[str, ...]

PENDING_TIMEOUT: Final = 60.0
"""Seconds after which a number that the watch has not delivered counts as lost."""


class GlobalAllocator(ABC):
    """Base of IdentityAllocators over a store that all nodes share.

    Until the store has been listed, restored endpoints keep their numbers, and other label sets wait.
    """

    def __init__(self, span: ClusterNumbers, grace: float, health: Health) -> None:
        """``grace``: seconds that other nodes need to learn a new number (identity-change-grace-period)."""
        self._span = span
        self._grace = grace
        self._health = health
        self._pending: dict[Labels, int] = {}
        """Numbers allocated here that the watch has not delivered yet."""
        self._pending_since: dict[int, float] = {}
        """Times of these allocations, by the monotonic clock."""
        self._restored: set[int] = set()
        """Numbers of restored endpoints that were adopted before the store was listed."""
        self._held: set[int] = set()
        self._allocated_at: dict[int, float] = {}
        """Times of allocations by number, for the grace period."""
        self._waiting: dict[Labels, str] = {}
        self._other_store: GlobalAllocator | None = None

    @abstractmethod
    def _synced(self) -> bool:
        """Whether the store has been listed."""

    @abstractmethod
    def numbers(self, labels: Labels) -> Sequence[int]:
        """Return the numbers with these labels, the preferred one first."""

    @abstractmethod
    def labels_of(self, number: int) -> Labels | None:
        """Return the labels of the number in the store, or None."""

    @abstractmethod
    async def ensure(self, number: int, labels: Labels) -> None:
        """Write the identity of a number in use here, unless it exists. Raises HiveError."""

    def avoid_conflicts_with(self, other: GlobalAllocator) -> None:
        """Prefer numbers with the same labels in the second store, and avoid those with others."""
        self._other_store = other

    def allocate_now(self, labels: Labels, previous: int = 0) -> int | None:
        """Return the number of these labels, or None.

        Before the store has been listed it returns ``previous``, once per number.
        """
        if not self._synced():
            if previous not in self._span.own or previous in self._restored:
                return None
            self._restored.add(previous)
            return previous
        return self._lookup(labels, previous)

    def release(self, number: int) -> None:
        """Forget a number that this node no longer uses; the operator deletes unused identities."""
        self._allocated_at.pop(number, None)
        self._restored.discard(number)

    def grace(self, number: int) -> float:
        """Return the remaining grace period of a number allocated here, in seconds."""
        made = self._allocated_at.get(number)
        left = 0.0 if made is None else made + self._grace - time.monotonic()
        if left <= 0:
            self._allocated_at.pop(number, None)
        return max(0.0, left)

    def hold(self, number: int) -> None:
        """Do not allocate the number to new labels."""
        self._held.add(number)

    def release_hold(self, number: int) -> None:
        """Undo hold()."""
        self._held.discard(number)

    def confirm(self, labels: Labels) -> None:
        """Record that the watch has delivered a number for these labels."""
        self._pending_since.pop(self._pending.pop(labels, 0), None)

    def is_pending(self, number: int) -> bool:
        """Whether the number was allocated here, and the watch has not delivered it yet."""
        return time.monotonic() - self._pending_since.get(number, -math.inf) < PENDING_TIMEOUT

    def _add_pending(self, labels: Labels, number: int) -> None:
        self._pending[labels] = number
        self._pending_since[number] = time.monotonic()

    def _lookup(self, labels: Labels, previous: int) -> int | None:
        found = self.numbers(labels)
        if previous in found:
            return previous
        return found[0] if found else self._pending.get(labels)

    def _may_use(self, labels: Labels, number: int) -> bool:
        """Whether the number has no other labels in the second store."""
        return self._other_store is None or self._other_store.labels_of(number) in (None, labels)

    def _preferred(self, labels: Labels, previous: int) -> Iterator[int]:
        """Yield numbers that may have these labels already: before a restart, or in the second store."""
        yield previous
        if self._other_store is not None:
            yield from self._other_store.numbers(labels)

    def _set_waiting(self, labels: Labels, error: str) -> None:
        if error:
            self._waiting[labels] = error
        else:
            self._waiting.pop(labels, None)
        if self._waiting:
            why = next(iter(self._waiting.values()))
            self._health.degraded(f"{len(self._waiting)} sets of labels wait for an identity: {why}")
        else:
            self._health.ok("all labels have identities")
