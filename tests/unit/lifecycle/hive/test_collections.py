"""What a start makes stays: while it lasts, the garbage collector does not look through it."""

import gc

import pytest

from lifecycle import Hive, Hook, Lifecycle, Shutdown, invoke

pytestmark = pytest.mark.anyio

MADE = 20_000


async def test_a_start_is_not_interrupted_by_collections_and_what_follows_is_as_ever() -> None:
    usual = gc.get_threshold()
    counted: list[int] = []
    made: list[list[int]] = []

    def part(lifecycle: Lifecycle, shutdown: Shutdown) -> None:
        async def fill() -> None:
            before = gc.get_stats()[0]["collections"]
            made.extend([] for _ in range(MADE))
            counted.append(gc.get_stats()[0]["collections"] - before)
            shutdown.request()

        lifecycle.append(Hook("fill", fill))

    assert await Hive(invoke(part), name="filled").run() == 0
    assert counted == [0]
    assert gc.get_threshold() == usual
