"""A hook that those under test stand on, and what it did."""

import pytest

from lifecycle import Hook, Lifecycle

log: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    log.clear()


class Base:
    """What the hooks under test stand on: it must be stopped whatever happens above."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("base", self.start, self.stop))

    async def start(self) -> None:
        log.append("base +")

    async def stop(self) -> None:
        log.append("base -")
