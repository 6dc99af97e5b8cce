"""What a node notes of the numbers that it has agreed upon with others, by whatever they agree."""

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
    """Where the numbers of identities are agreed upon."""

    KVSTORE = "kvstore"
    """By keys of the kvstore; where there is none, as crd."""
    CRD = "crd"
    """By CiliumIdentity objects, where there is an API server; else this node gives them."""
    DOUBLEWRITE_READKVSTORE = "doublewrite-readkvstore"
    """By keys of the kvstore; objects are written as well."""
    DOUBLEWRITE_READCRD = "doublewrite-readcrd"
    """By objects; keys are written as well."""

    @property
    def reads_keys(self) -> bool:
        """Whether the kvstore is where numbers are agreed upon; else objects are."""
        return self in {AllocationMode.KVSTORE, AllocationMode.DOUBLEWRITE_READKVSTORE}

    @property
    def writes_both(self) -> bool:
        """Whether identities are written to both stores, so that a cluster can move from one to the other."""
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

ON_ITS_WAY: Final = 60.0
"""Seconds after which a number that was taken here, and which the watch has not brought, counts as lost."""


class AgreedNumbers(ABC):
    """The part of an IdentityAllocator that works without the cluster.

    Before the numbers of others are known an endpoint from before a restart keeps its own, and others wait.
    """

    def __init__(self, span: ClusterNumbers, grace: float, health: Health) -> None:
        """``grace`` is how many seconds a number is left alone that was taken here."""
        self._span = span
        self._grace = grace
        self._health = health
        self._made: dict[Labels, int] = {}
        """Numbers that were taken here, and which the watch has yet to bring."""
        self._made_at: dict[int, float] = {}
        """When, in seconds of the monotonic clock."""
        self._adopted: set[int] = set()
        """Numbers from before a restart, taken over before those of others were known."""
        self._held: set[int] = set()
        self._fresh: dict[int, float] = {}
        """When numbers were taken here."""
        self._waiting: dict[Labels, str] = {}
        self._beside: AgreedNumbers | None = None

    @abstractmethod
    def _all_known(self) -> bool:
        """Whether the numbers of others are known."""

    @abstractmethod
    def numbers(self, labels: Labels) -> Sequence[int]:
        """The numbers that stand for these labels, the one that counts first."""

    @abstractmethod
    def labels_of(self, number: int) -> Labels | None:
        """The labels that the number stands for; None while it stands for none."""

    @abstractmethod
    async def keep(self, number: int, labels: Labels) -> None:
        """Write the identity of a number in use here, unless it exists. Raises HiveError."""

    def agree_with(self, other: AgreedNumbers) -> None:
        """Take no number that stands for other labels there, and rather those that stand for the same."""
        self._beside = other

    def allocate_now(self, labels: Labels, previous: int = 0) -> int | None:
        """The number of these labels; before those of others are known the previous one."""
        if not self._all_known():
            if previous not in self._span.own or previous in self._adopted:
                return None
            self._adopted.add(previous)
            return previous
        return self._known(labels, previous)

    def release(self, number: int) -> None:
        """This node no longer uses it; the operator deletes unused identities."""
        self._fresh.pop(number, None)
        self._adopted.discard(number)

    def grace(self, number: int) -> float:
        """What is left of the grace period of a number taken here, in seconds."""
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
        self._made_at.pop(self._made.pop(labels, 0), None)

    def is_on_its_way(self, number: int) -> bool:
        """Whether the number was taken here, and the watch has yet to bring it."""
        return time.monotonic() - self._made_at.get(number, -math.inf) < ON_ITS_WAY

    def _has_made(self, labels: Labels, number: int) -> None:
        self._made[labels] = number
        self._made_at[number] = time.monotonic()

    def _known(self, labels: Labels, previous: int) -> int | None:
        found = self.numbers(labels)
        if previous in found:
            return previous
        return found[0] if found else self._made.get(labels)

    def _may_take(self, labels: Labels, number: int) -> bool:
        """Whether the other store, if there is one, does not have the number for other labels."""
        return self._beside is None or self._beside.labels_of(number) in (None, labels)

    def _preferred(self, labels: Labels, previous: int) -> Iterator[int]:
        """Numbers that may stand for the labels already: before a restart, or in the other store."""
        yield previous
        if self._beside is not None:
            yield from self._beside.numbers(labels)

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
