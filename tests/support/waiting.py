"""Waiting for a condition with a deadline, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SOONEST, LATEST = 0.005, 0.1
"""Seconds between two looks: many start a process, and what they wait for needs the processor, too."""
_PATIENCE = 8
"""What has not come for so many times as long comes a little later, too."""
_ROUNDS = 200


def eventually(condition: Callable[[], object], within: float = 60.0, every: float | None = None) -> None:
    """Return once ``condition()`` is true.

    It looks ``every`` so many seconds; without that often at first, and then less.

    Raises AssertionError after ``within`` seconds, with the condition's last fault. It looks once more
    when they are over: who was not let run meanwhile has seen nothing.
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
    """Seconds until the next look, after so many of waiting."""
    return min(LATEST, max(SOONEST, waited / _PATIENCE))


async def settled() -> None:
    """Return once tasks have done what they could: they have had so many rounds of the event loop.

    Unlike anyio's wait_all_tasks_blocked(), also where the loop has yet to call what wakes them.
    """
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
