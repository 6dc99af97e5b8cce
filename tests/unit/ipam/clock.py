"""A clock that stands still until a test moves it."""

import anyio

from cells.node.ipam.allocator import Clock


class FakeClock(Clock):
    """Time is set by the test."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sleepers: list[tuple[float, anyio.Event]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        event = anyio.Event()
        self.sleepers.append((self.time + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        """Let time pass; who has slept long enough wakes up."""
        self.time += seconds
        for deadline, event in self.sleepers:
            if deadline <= self.time:
                event.set()
