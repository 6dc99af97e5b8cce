"""A hook on which the hooks under test depend, with a log of its starts and stops."""

import pytest

from lifecycle import Hook, Lifecycle

log: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    log.clear()


class Base:
    """A dependency of the hooks under test: it must be stopped whatever happens to them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("base", self.start, self.stop))

    async def start(self) -> None:
        log.append("base +")

    async def stop(self) -> None:
        log.append("base -")
