"""Identities in use on this node: a number for each set of labels, with reference counts.

Source: Cilium 1.17, the cache of security identities.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Final, Protocol

import anyio
import msgspec

from cells.base.labels import DEFAULT_FILTER, LabelFilter, labels_sha256, parse, texts
from cells.cluster.identity.numbers import (
    EVERY_CLUSTER,
    FIXED,
    HOST,
    LOCAL,
    REMOTE_NODES,
    RESERVED_IDENTITIES,
    Scope,
    scope_for,
    scope_of,
)
from lifecycle import Named, Table

__all__ = [
    "ClusterAllocator",
    "Identities",
    "Identity",
    "IdentityAllocator",
    "NoIdentityError",
    "NodeAllocator",
    "identity_table",
]


# Who gives numbers to label sets: the edge to a cluster, and the numbers of this node alone.
#
# Source: Cilium 1.17, identity allocation (CRD and kvstore modes answer later, from all nodes' numbers).

Labels = tuple[str, ...]
"""``source:key[=value]``, sorted."""


class NoIdentityError(Exception):
    """Raised when labels get no number: all are in use, or the allocator failed."""


class IdentityAllocator(Protocol):
    """Allocates numbers to label sets. The same labels keep their number until it is released."""

    def allocate_now(self, labels: Labels, previous: int = 0) -> int | None:
        """Return the number of these labels if it is available without waiting, or None.

        After None, await allocate(). ``previous`` is the number before a restart, which is allocated again if
        it is free. Raises NoIdentityError.
        """
        ...

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """Allocate the number of these labels; may wait, and be cancelled. Raises NoIdentityError."""
        ...

    def release(self, number: int) -> None:
        """Release a number that this node no longer uses; other nodes may be notified later."""
        ...

    def grace(self, number: int) -> float:
        """Return the seconds after which every node has the labels of a new number."""
        ...

    def hold(self, number: int) -> None:
        """Do not allocate the number: this node may still refer to it with its old labels."""
        ...

    def release_hold(self, number: int) -> None:
        """Undo hold()."""
        ...


ClusterAllocator = Annotated[IdentityAllocator, Named("cluster")]
"""The cluster-wide allocator, if a cell provides one; otherwise this node allocates."""


class NodeAllocator:
    """Allocates numbers that are valid on this node only, without waiting.

    It allocates round-robin, so that a released number is not reused at once: conntrack entries and events
    may still contain it.
    """

    def __init__(self, numbers: range, first: int | None = None) -> None:
        """``first``: the first number to allocate, instead of the lowest."""
        self._numbers = numbers
        self._taken: set[int] = set()
        self._held: set[int] = set()
        self._next = numbers.start if first is None else first
        self._restored: dict[Labels, int] = {}
        """Restored numbers that are not in use yet: only their labels can get them."""
        self._reserved: set[int] = set()
        """The numbers in _restored."""

    def allocate_now(self, labels: Labels, previous: int = 0) -> int:
        """Return the previous number if it is in range and free, otherwise the next free one."""
        restored = self._restored.pop(labels, 0)
        self._reserved.discard(restored)
        number = restored or previous
        if number not in self._numbers or number in self._taken or number in self._reserved:
            number = self._free_number()
        elif number >= self._next:
            self._next = number + 1
        self._held.discard(number)
        self._taken.add(number)
        return number

    def restore(self, numbers: Mapping[Labels, int]) -> None:
        """Reserve numbers for the labels that had them before the restart."""
        self._restored = {labels: number for labels, number in numbers.items() if number in self._numbers}
        self._reserved = set(self._restored.values())
        self._next = max(self._next, max(self._reserved, default=0) + 1)

    def restored(self) -> Mapping[Labels, int]:
        """Return restored numbers without a user."""
        return self._restored

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """Allocate as allocate_now() does."""
        return self.allocate_now(labels, previous)

    def release(self, number: int) -> None:
        """Free the number."""
        self._taken.discard(number)

    def grace(self, number: int) -> float:
        """Return 0: only this node uses the number."""
        del number
        return 0.0

    def hold(self, number: int) -> None:
        """Reserve the number for its previous labels."""
        if number not in self._taken:
            self._held.add(number)

    def release_hold(self, number: int) -> None:
        """Free the number."""
        self._held.discard(number)

    def _free_number(self) -> int:
        first, last = self._numbers.start, self._numbers.stop - 1
        for _ in range(len(self._taken) + len(self._held) + len(self._reserved) + 1):
            if self._next > last:
                self._next = first
            number, self._next = self._next, self._next + 1
            if number not in self._taken and number not in self._held and number not in self._reserved:
                return number
        raise NoIdentityError(f"no free identity between {first} and {last}")


BY_LABELS: Final = "labels"


class Identity(msgspec.Struct, frozen=True):
    """A row of the ``identities`` table: a number and its sorted labels."""

    id: int
    labels: tuple[str, ...]
    superseded: bool = False
    """Whether the cluster has another number for these labels, so that no endpoint may start with this one.
    """

    @property
    def labels_sha256(self) -> str:
        """Return ``labelsSHA256`` of the API."""
        return labels_sha256(self.labels)


def identity_table(well_known: Iterable[tuple[int, Labels]] = ()) -> Table[int, Identity]:
    """Return a table ``identities``, by number, with reserved and well-known identities."""
    table = Table[int, Identity](
        "identities",
        key=lambda identity: identity.id,
        indexes={BY_LABELS: lambda identity: [identity.labels]},
    )
    with table.txn() as rows:
        for number, labels in (*RESERVED_IDENTITIES.items(), *well_known):
            rows.put(Identity(number, labels))
    return table


class Identities:
    """Allocates and counts identities of label sets.

    Each user of an identity holds a reference until release(); the last one frees the identity. Parallel
    requests for the same labels are allocated once.
    """

    def __init__(
        self, table: Table[int, Identity], cluster: IdentityAllocator, keep: LabelFilter | None = None
    ) -> None:
        self.table = table
        self.filter = keep or DEFAULT_FILTER
        """Decides which labels are relevant for identities."""
        self._own = {Scope.LOCAL: NodeAllocator(LOCAL), Scope.REMOTE_NODE: NodeAllocator(REMOTE_NODES)}
        self._allocators: Mapping[Scope, IdentityAllocator] = {Scope.CLUSTER: cluster, **self._own}
        self.used: Table[int, Identity] = Table("identities-in-use", key=lambda identity: identity.id)
        """Identities of pods on this node."""
        self._references: Counter[int] = Counter()
        self._cluster: set[int] = set()
        """Identities of the cluster, whether or not this node uses them."""
        self._asked: dict[Labels, anyio.Event] = {}
        self._of_host: dict[str, frozenset[str]] = {}
        """Labels of the host identity, by source."""

    def acquire_now(self, labels: Labels, previous: int = 0) -> Identity | None:
        """Add a reference to the identity of ``labels`` if possible without waiting; otherwise return None.

        Raises NoIdentityError.
        """
        found = self.by_labels(labels)
        if found is None:
            number = self._allocators[scope_for(labels)].allocate_now(labels, previous)
            if number is None:
                return None
            found = self._add(number, labels)
        self._references[found.id] += 1
        self._note_use(found.id)
        return found

    async def acquire(self, labels: Labels, previous: int = 0) -> Identity:
        """Add a reference to the identity of ``labels``. Raises NoIdentityError.

        ``previous`` is the number before a restart. The labels keep it, unless they have another one already,
        the number has other labels, or it is out of the range for pods.
        """
        while (found := self.acquire_now(labels, previous)) is None:
            if (others := self._asked.get(labels)) is not None:
                await others.wait()
                continue
            over = self._asked[labels] = anyio.Event()
            try:
                self._add(await self._allocators[scope_for(labels)].allocate(labels, previous), labels)
            finally:
                del self._asked[labels]
                over.set()
        return found

    def release(self, number: int) -> None:
        """Drop a reference; the last one frees the number. Unknown numbers are ignored."""
        if not self._references[number]:
            del self._references[number]
            return
        self._references[number] -= 1
        if not self._references[number]:
            del self._references[number]
            self._note_use(number)
            if scope_of(number) not in FIXED:
                allocator = self._allocators[scope_of(number)]
                allocator.release(number)
                if number in self._cluster:
                    allocator.hold(number)
                else:
                    self._drop(number)

    def label_host(self, of: str, labels: Iterable[str]) -> None:
        """Add labels of the node or of an API server to the host identity."""
        self._of_host[of] = frozenset(labels)
        known = Identity(HOST, texts(map(parse, {*RESERVED_IDENTITIES[HOST]}.union(*self._of_host.values()))))
        if self.table.get(HOST) != known:
            self._put(known)

    # This node's own, over a restart

    def restore_local(self, numbers: Mapping[Labels, int]) -> None:
        """Reserve numbers that this node allocated for their labels."""
        for allocator in self._own.values():
            allocator.restore(numbers)

    def forget_restored(self) -> None:
        """Free the unclaimed numbers of restore_local(), after all users have been restored."""
        self.restore_local({})

    def local(self) -> list[Identity]:
        """Return this node's own identities, and restored ones without users, by number."""
        restored = chain.from_iterable(each.restored().items() for each in self._own.values())
        found = {number: Identity(number, labels) for labels, number in restored}
        found |= {one.id: one for one in self.table.all() if scope_of(one.id) in self._own}
        return sorted(found.values(), key=lambda one: one.id)

    # What the cluster knows

    def learn(self, number: int, labels: Labels) -> None:
        """Set the labels of a number of the cluster. Users of it with other labels must allocate again.

        Numbers outside of cluster ranges are ignored.
        """
        if number not in EVERY_CLUSTER:
            return
        self._cluster.add(number)
        self._allocators[Scope.CLUSTER].hold(number)
        if self.table.get(number) != (known := Identity(number, labels)):
            self._put(known)

    def forget(self, number: int) -> None:
        """Remove a cluster identity; users on this node keep it."""
        if number in self._cluster:
            self._cluster.discard(number)
            self._allocators[Scope.CLUSTER].release_hold(number)
            if not self._references[number]:
                del self._references[number]
                self._drop(number)

    def supersede(self, number: int) -> None:
        """Mark an identity as replaced by another number: its users must allocate again."""
        if (known := self.table.get(number)) is not None and not known.superseded:
            self._put(msgspec.structs.replace(known, superseded=True))

    def is_current(self, number: int, labels: Labels) -> bool:
        """Return whether the number still has these labels."""
        known = self.table.get(number)
        return known is not None and known.labels == labels and not known.superseded

    def in_use(self) -> dict[int, Labels]:
        """Return the identities of pods on this node, by number."""
        return {row.id: row.labels for row in self.used.all()}

    def grace(self, number: int) -> float:
        """Return the seconds after which every node has the labels of a new number."""
        found = self._allocators.get(scope_of(number))
        return 0.0 if found is None else found.grace(number)

    def hold(self, number: int) -> None:
        """Reserve ``number`` for its labels: this node may still refer to it."""
        if (allocator := self._allocators.get(scope_of(number))) is not None:
            allocator.hold(number)

    def release_hold(self, number: int) -> None:
        """Undo :meth:`hold`."""
        if (allocator := self._allocators.get(scope_of(number))) is not None:
            allocator.release_hold(number)

    def references(self, number: int) -> int:
        """Return the number of references to the identity."""
        return self._references[number]

    def get(self, number: int) -> Identity | None:
        """Return the identity with this number, or None."""
        return self.table.get(number)

    def by_labels(self, labels: Labels) -> Identity | None:
        """Return the identity with exactly these sorted labels, or None; the lowest of several."""
        found = [known for known in self.table.by(BY_LABELS).get(labels) if not known.superseded]
        return min(found, key=lambda known: known.id, default=None)

    def all(self) -> list[Identity]:
        """Return all identities, including reserved ones, by number."""
        return sorted(self.table.all(), key=lambda identity: identity.id)

    def _add(self, number: int, labels: Labels) -> Identity:
        added = Identity(number, labels)
        self._put(added)
        return added

    def _put(self, row: Identity) -> None:
        with self.table.txn() as rows:
            rows.put(row)
        self._note_use(row.id)

    def _note_use(self, number: int) -> None:
        """Update the table of identities in use for a number and its labels."""
        if number in EVERY_CLUSTER:
            known = self.table.get(number) if self._references[number] else None
            if self.used.get(number) is known:
                return
            if known is None:
                self.used.delete(number)
            else:
                self.used.put(known)

    def _drop(self, number: int) -> None:
        with self.table.txn() as rows:
            rows.delete(number)
