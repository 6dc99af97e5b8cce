"""Waiting for a condition with a deadline, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], within: float = 60.0, every: float = 0.01) -> None:
    """Return once ``condition()`` is true.

    Raises AssertionError after ``within`` seconds, with the condition's last fault. It looks once more
    when they are over: who was not let run meanwhile has seen nothing.
    """
    deadline = time.monotonic() + within
    fault: Exception | None = None
    over = False
    while not over:
        over = time.monotonic() >= deadline
        try:
            if condition():
                return
            fault = None
        except Exception as error:  # noqa: BLE001  # it may raise until it holds; the last error is reported
            fault = error
        time.sleep(every)
    name = getattr(condition, "__name__", repr(condition))
    raise AssertionError(f"{name} did not hold within {within} s") from fault
