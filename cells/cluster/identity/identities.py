"""The identities that this node uses: one number for each set of labels, counted by reference.

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
    """Gives numbers to label sets. The same labels have the same number until it is released."""

    def allocate_now(self, labels: Labels, previous: int = 0) -> int | None:
        """The number of these labels, when that takes no waiting; None: await allocate().

        ``previous`` is the number they had before a restart; they keep it, if it is free. Raises
        NoIdentityError.
        """
        ...

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """The number of these labels, however long it takes; may be cancelled. Raises NoIdentityError."""
        ...

    def release(self, number: int) -> None:
        """No user is left for the number on this node; other nodes may learn that later."""
        ...

    def grace(self, number: int) -> float:
        """Seconds until every node can be taken to know what the number stands for."""
        ...

    def hold(self, number: int) -> None:
        """Do not give the number to anyone: something on this node may still mean what it stood for."""
        ...

    def unhold(self, number: int) -> None:
        """Take hold() back."""
        ...


ClusterAllocator = Annotated[IdentityAllocator, Named("cluster")]
"""Gives numbers that all nodes agree upon, if a cell provides one; else this node gives them."""


class NodeAllocator:
    """Numbers that mean something on this node only; never waits.

    They are given in a circle, so a freed one is not used again at once: conntrack entries and events may
    still carry it.
    """

    def __init__(self, numbers: range, first: int | None = None) -> None:
        """``first``: the number to begin at, instead of the least."""
        self._numbers = numbers
        self._taken: set[int] = set()
        self._held: set[int] = set()
        self._next = numbers.start if first is None else first
        self._restored: dict[Labels, int] = {}
        """Restored numbers that are not in use yet: only their labels get them."""
        self._reserved: set[int] = set()
        """These numbers."""

    def allocate_now(self, labels: Labels, previous: int = 0) -> int:
        """The earlier number if it is one of ours and free, else the next that is."""
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
        """Reserve these numbers for these labels, which had them before."""
        self._restored = {labels: number for labels, number in numbers.items() if number in self._numbers}
        self._reserved = set(self._restored.values())
        self._next = max(self._next, max(self._reserved, default=0) + 1)

    def restored(self) -> Mapping[Labels, int]:
        """Those without a user yet."""
        return self._restored

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """The same."""
        return self.allocate_now(labels, previous)

    def release(self, number: int) -> None:
        """The number is free again."""
        self._taken.discard(number)

    def grace(self, number: int) -> float:
        """Only this node needs to know."""
        del number
        return 0.0

    def hold(self, number: int) -> None:
        """Only who had it before may have it."""
        if number not in self._taken:
            self._held.add(number)

    def unhold(self, number: int) -> None:
        """It is free again."""
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
    """A row of the ``identities`` table: a number and the sorted labels it stands for."""

    id: int
    labels: tuple[str, ...]
    superseded: bool = False
    """Whether the cluster has another number for these labels, so that no endpoint may start with this
    one."""

    @property
    def labels_sha256(self) -> str:
        """``labelsSHA256`` of the API."""
        return labels_sha256(self.labels)


def identity_table(well_known: Iterable[tuple[int, Labels]] = ()) -> Table[int, Identity]:
    """The ``identities`` table, by number; reserved and well-known ones are always there."""
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
    """Gives label sets their numbers.

    Each user of one holds a reference, and gives it back with release(); with the last one the identity goes.
    Labels that several ask for at once are asked for once.
    """

    def __init__(
        self, table: Table[int, Identity], cluster: IdentityAllocator, keep: LabelFilter | None = None
    ) -> None:
        self.table = table
        self.filter = keep or DEFAULT_FILTER
        """Which labels make identities."""
        self._own = {Scope.LOCAL: NodeAllocator(LOCAL), Scope.REMOTE_NODE: NodeAllocator(REMOTE_NODES)}
        self._allocators: Mapping[Scope, IdentityAllocator] = {Scope.CLUSTER: cluster, **self._own}
        self.used: Table[int, Identity] = Table("identities-in-use", key=lambda identity: identity.id)
        """Those of pods on this node."""
        self._references: Counter[int] = Counter()
        self._cluster: set[int] = set()
        """Those that the cluster knows: they are listed whether or not anybody here has them."""
        self._asked: dict[Labels, anyio.Event] = {}
        self._of_host: dict[str, frozenset[str]] = {}
        """The host's labels, by their source."""

    def acquire_now(self, labels: Labels, previous: int = 0) -> Identity | None:
        """One more reference to the identity of ``labels``, if that takes no waiting; else None.

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
        """One more reference to the identity of ``labels``; raises NoIdentityError.

        ``previous`` is the number the labels had before a restart. They keep it, unless they have another one
        already, or the number stands for other labels, or is none that pods may have.
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
        """Give one reference back; with the last one the number is free. Unknown numbers are ignored."""
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
        """Add labels to the host: those of its node, or of an API server."""
        self._of_host[of] = frozenset(labels)
        known = Identity(HOST, texts(map(parse, {*RESERVED_IDENTITIES[HOST]}.union(*self._of_host.values()))))
        if self.table.get(HOST) != known:
            self._put(known)

    # This node's own, over a restart

    def restore_local(self, numbers: Mapping[Labels, int]) -> None:
        """These labels had these numbers of this node's own: they keep them; no others get them."""
        for allocator in self._own.values():
            allocator.restore(numbers)

    def forget_restored(self) -> None:
        """All users from before the restart have asked by now: the rest of restore_local()'s are free."""
        self.restore_local({})

    def local(self) -> list[Identity]:
        """This node's own identities, and restored ones not in use yet, by number."""
        restored = chain.from_iterable(each.restored().items() for each in self._own.values())
        found = {number: Identity(number, labels) for labels, number in restored}
        found |= {one.id: one for one in self.table.all() if scope_of(one.id) in self._own}
        return sorted(found.values(), key=lambda one: one.id)

    # What the cluster knows

    def learn(self, number: int, labels: Labels) -> None:
        """The cluster has these labels for a number. Users of it with other labels are to ask for another.

        Numbers that no cluster gives are ignored.
        """
        if number not in EVERY_CLUSTER:
            return
        self._cluster.add(number)
        self._allocators[Scope.CLUSTER].hold(number)
        if self.table.get(number) != (known := Identity(number, labels)):
            self._put(known)

    def unlearn(self, number: int) -> None:
        """The cluster does not know the number any more; who has it here keeps it."""
        if number in self._cluster:
            self._cluster.discard(number)
            self._allocators[Scope.CLUSTER].unhold(number)
            if not self._references[number]:
                del self._references[number]
                self._drop(number)

    def supersede(self, number: int) -> None:
        """The cluster has another number for its labels: users of this one must allocate again."""
        if (known := self.table.get(number)) is not None and not known.superseded:
            self._put(msgspec.structs.replace(known, superseded=True))

    def stands_for(self, number: int, labels: Labels) -> bool:
        """Whether the number is still that of these labels."""
        known = self.table.get(number)
        return known is not None and known.labels == labels and not known.superseded

    def in_use(self) -> dict[int, Labels]:
        """The identities of pods on this node, by number."""
        return {row.id: row.labels for row in self.used.all()}

    def grace(self, number: int) -> float:
        """Seconds until every node can be taken to know what the number stands for."""
        found = self._allocators.get(scope_of(number))
        return 0.0 if found is None else found.grace(number)

    def hold(self, number: int) -> None:
        """Never give ``number`` to new labels: something unknown on the node may still mean it."""
        if (allocator := self._allocators.get(scope_of(number))) is not None:
            allocator.hold(number)

    def unhold(self, number: int) -> None:
        """Take :meth:`hold` back: nothing means the number any more."""
        if (allocator := self._allocators.get(scope_of(number))) is not None:
            allocator.unhold(number)

    def references(self, number: int) -> int:
        """How many hold the identity."""
        return self._references[number]

    def get(self, number: int) -> Identity | None:
        """The identity of that number, None when nothing has it."""
        return self.table.get(number)

    def by_labels(self, labels: Labels) -> Identity | None:
        """The identity of exactly these sorted labels, None when there is none; of several the lowest."""
        found = [known for known in self.table.by(BY_LABELS).get(labels) if not known.superseded]
        return min(found, key=lambda known: known.id, default=None)

    def all(self) -> list[Identity]:
        """Every identity, reserved ones too, by number."""
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
        """Who has it on this node, and for what labels, may have changed."""
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
