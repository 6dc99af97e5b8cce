"""Who gives numbers to label sets: the edge to a cluster, and the numbers of this node alone.

For:    Identities. Needs: nothing. Gives: IdentityAllocator, NodeAllocator, NoIdentityError.
Source: Cilium 1.17, identity allocation (CRD and kvstore modes answer later, from all nodes' numbers).
"""

from collections.abc import Mapping
from typing import Annotated, Protocol

from lifecycle import Named

Labels = tuple[str, ...]
"""``source:key[=value]``, sorted."""


class NoIdentityError(Exception):
    """Raised when labels get no number: all are in use, or the allocator failed."""


class IdentityAllocator(Protocol):
    """Gives numbers to label sets. The same labels have the same number until it is released."""

    def allocate_now(self, labels: Labels, former: int = 0) -> int | None:
        """The number of these labels, when that takes no waiting; None: await allocate().

        ``former`` is the number they had before a restart; they keep it, if it is free. Raises
        NoIdentityError.
        """
        ...

    async def allocate(self, labels: Labels, former: int = 0) -> int:
        """The number of these labels, however long it takes; may be cancelled. Raises NoIdentityError."""
        ...

    def release(self, number: int) -> None:
        """Nobody on this node has the number any more; telling others may happen later."""
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

    def allocate_now(self, labels: Labels, former: int = 0) -> int:
        """The former number if it is one of ours and free, else the next that is."""
        restored = self._restored.pop(labels, 0)
        self._reserved.discard(restored)
        number = restored or former
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
        """Those that nobody has asked for yet."""
        return self._restored

    async def allocate(self, labels: Labels, former: int = 0) -> int:
        """The same."""
        return self.allocate_now(labels, former)

    def release(self, number: int) -> None:
        """It is free."""
        self._taken.discard(number)

    def grace(self, number: int) -> float:
        """Nobody else need know."""
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
