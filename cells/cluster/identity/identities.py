"""The identities that this node uses: one number for each set of labels, counted by reference.

For:    endpoints, endpoint restore, policies. Needs: Table[Identity], IdentityAllocator. Gives: Identities.
Source: Cilium 1.17, the cache of security identities.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import anyio
import msgspec

from cells.cluster.identity.allocator import IdentityAllocator, Labels, NodeAllocator
from cells.cluster.identity.labels import labels_sha256
from cells.cluster.identity.numbers import (
    LOCAL,
    REMOTE_NODES,
    RESERVED_IDENTITIES,
    Scope,
    scope_for,
    scope_of,
)
from lifecycle import Table

BY_LABELS: Final = "labels"


class Identity(msgspec.Struct, frozen=True):
    """A row of the ``identities`` table: a number and the sorted labels it stands for."""

    id: int
    labels: tuple[str, ...]

    @property
    def labels_sha256(self) -> str:
        """``labelsSHA256`` of the API."""
        return labels_sha256(self.labels)


def identity_table() -> Table[Identity]:
    """The ``identities`` table, by number; with the reserved identities, which are always there."""
    table = Table[Identity](
        "identities",
        key=lambda identity: identity.id,
        indexes={BY_LABELS: lambda identity: [identity.labels]},
    )
    with table.txn() as rows:
        for number, labels in RESERVED_IDENTITIES.items():
            rows.put(Identity(number, labels))
    return table


class Identities:
    """Gives label sets their numbers.

    Each user of one holds a reference, and gives it back with release(); with the last one the identity goes.
    Labels that several ask for at once are asked for once.
    """

    def __init__(self, table: Table[Identity], cluster: IdentityAllocator) -> None:
        self.table = table
        self._allocators: Mapping[Scope, IdentityAllocator] = {
            Scope.CLUSTER: cluster,
            Scope.LOCAL: NodeAllocator(LOCAL),
            Scope.REMOTE_NODE: NodeAllocator(REMOTE_NODES),
        }
        self._references: Counter[int] = Counter()
        self._asked: dict[Labels, anyio.Event] = {}

    def acquire_now(self, labels: Labels, former: int = 0) -> Identity | None:
        """One more reference to the identity of ``labels``, if that takes no waiting; else None.

        Raises NoIdentityError.
        """
        found = self.by_labels(labels)
        if found is None:
            number = self._allocators[scope_for(labels)].allocate_now(labels, former)
            if number is None:
                return None
            found = self._add(number, labels)
        self._references[found.id] += 1
        return found

    async def acquire(self, labels: Labels, former: int = 0) -> Identity:
        """One more reference to the identity of ``labels``; raises NoIdentityError.

        ``former`` is the number the labels had before a restart. They keep it, unless they have another one
        already, or the number stands for other labels, or is none that pods may have.
        """
        while (found := self.acquire_now(labels, former)) is None:
            if (others := self._asked.get(labels)) is not None:
                await others.wait()
                continue
            over = self._asked[labels] = anyio.Event()
            try:
                self._add(await self._allocators[scope_for(labels)].allocate(labels, former), labels)
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
            if number not in RESERVED_IDENTITIES:
                with self.table.txn() as rows:
                    rows.delete(number)
                self._allocators[scope_of(number)].release(number)

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
        """The identity of exactly these sorted labels, None when there is none."""
        return self.table.by(BY_LABELS).one(labels)

    def all(self) -> list[Identity]:
        """Every identity, reserved ones too, by number."""
        return sorted(self.table.all(), key=lambda identity: identity.id)

    def _add(self, number: int, labels: Labels) -> Identity:
        added = Identity(number, labels)
        with self.table.txn() as rows:
            rows.put(added)
        return added
