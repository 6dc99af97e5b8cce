"""Waits for conditions with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SOONEST, LATEST = 0.005, 0.1
"""Seconds between two checks: many start a process, and the awaited program needs the processor, too."""
_PATIENCE = 8
"""The interval is this fraction of the time waited so far."""
_ROUNDS = 200


def eventually(condition: Callable[[], object], within: float = 60.0, every: float | None = None) -> None:
    """Return once ``condition()`` is true.

    It is checked every ``every`` seconds; by default often at first, and then less often.

    Raises AssertionError after ``within`` seconds, with the condition's last error.
    """
    began = time.monotonic()
    fault: Exception | None = None
    over = False
    while not over:
        over = time.monotonic() >= began + within
        try:
            if condition():
                return
            fault = None
        except Exception as error:  # noqa: BLE001  # it may raise until it holds; the last error is reported
            fault = error
        time.sleep(pause(time.monotonic() - began) if every is None else every)
    name = getattr(condition, "__name__", repr(condition))
    raise AssertionError(f"{name} did not hold within {within} s") from fault


def pause(waited: float) -> float:
    """Return the seconds until the next check, after this time of waiting."""
    return min(LATEST, max(SOONEST, waited / _PATIENCE))


async def settled() -> None:
    """Run so many rounds of the event loop that all tasks are blocked.

    Unlike anyio's wait_all_tasks_blocked(), it also waits for callbacks that will wake tasks.
    """
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
