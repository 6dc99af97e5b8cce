"""An identity allocator that answers when a test lets it."""

from __future__ import annotations

import anyio

from cells.cluster.identity.identities import NodeAllocator, NoIdentityError
from cells.cluster.identity.numbers import CLUSTER


class SlowAllocator:
    """An IdentityAllocator that blocks until ``may_answer`` is set."""

    def __init__(self) -> None:
        self._numbers = NodeAllocator(CLUSTER)
        self.may_answer = anyio.Event()
        self.asked: list[tuple[str, ...]] = []
        self.released: list[int] = []
        self.refuse = False

    def allocate_now(self, labels: tuple[str, ...], previous: int = 0) -> None:
        """Return no identity."""

    async def allocate(self, labels: tuple[str, ...], previous: int = 0) -> int:
        self.asked.append(labels)
        await self.may_answer.wait()
        if self.refuse:
            raise NoIdentityError("the cluster gives none")
        return self._numbers.allocate_now(labels, previous)

    def release(self, number: int) -> None:
        self.released.append(number)
        self._numbers.release(number)

    def grace(self, number: int) -> float:
        return 0.0

    def hold(self, number: int) -> None:
        self._numbers.hold(number)

    def release_hold(self, number: int) -> None:
        self._numbers.release_hold(number)
