"""Waits for a condition with a deadline."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from lifecycle.tables.table import Table

__all__ = ["eventually"]

T = TypeVar("T")

_FIRST, _LONGEST = 0.0005, 0.02
"""Seconds between looks: growing, so that what is nearly there costs nothing."""


async def eventually(
    condition: Callable[[], T], within: float = 30.0, *, on: Table[Any, Any] | None = None
) -> T:
    """Wait until the condition is true.

    Returns its result; raises AssertionError after the timeout, in seconds.

    The condition may raise until it holds; the last error is reported. With `on`, it is checked only when
    that table changes; otherwise repeatedly.
    """
    deadline = time.monotonic() + within
    changes = None if on is None else on.changes()
    pause = _FIRST
    while True:
        error: Exception | None = None
        try:
            if result := condition():
                return result
        except Exception as raised:  # noqa: BLE001  # it may raise until it holds
            error = raised
        left = deadline - time.monotonic()
        if left <= 0:
            name = getattr(condition, "__name__", repr(condition))
            raise AssertionError(f"{name} did not hold within {within:g} s") from error
        if changes is None:
            await anyio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST)
        else:
            with anyio.move_on_after(left):
                await anext(changes)
