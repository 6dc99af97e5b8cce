"""A clock that only a test advances."""

import anyio

from cells.node.ipam.allocator import Clock


class FakeClock(Clock):
    """A clock set by the test."""

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
        """Advance the time; tasks with expired sleeps wake up."""
        self.time += seconds
        for deadline, event in self.sleepers:
            if deadline <= self.time:
                event.set()
