"""Long computations as generators that yield now and then, so that an event loop may run in between.

They yield None between steps of about a millisecond, and other things as results.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator, Iterable
from typing import Final, TypeVar

from anyio.lowlevel import checkpoint

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that has its result at the end."""

SLICE: Final = 0.01
"""Seconds of computation between two turns of the loop."""
STEP: Final = 64
"""Rules, filters or selectors that make a step."""


def finish(steps: Steps[T]) -> T:
    """The result of a computation, without a pause; raises what it raises."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_slices(steps: Iterable[T | None]) -> AsyncIterator[T]:
    """The results of a computation, each at once, with a turn of the event loop after each SLICE."""
    turn = time.monotonic() + SLICE
    for result in steps:
        if result is not None:
            yield result
        if time.monotonic() >= turn:
            await checkpoint()
            turn = time.monotonic() + SLICE
