"""Python's clocks, and its times of day, follow a virtual clock: in a process that exists for a simulation.

Pauses that are spread have their mean: which task draws first depends on addresses, and would not replay. To
be installed before anything that binds the clocks is imported, as a default of a parameter does.
"""

from __future__ import annotations

import datetime
import random
import time
from typing import Any

from lifecycle.testing import VirtualClock

BEGIN = 1000.0
"""Value of a monotonic clock before a virtual one is installed: each run begins alike."""
TODAY = 1_700_000_000.0 - BEGIN
"""Seconds of the epoch at 0 of the monotonic clock."""


class _Times:
    """The installed clock, if any."""

    def __init__(self) -> None:
        self.clock: VirtualClock | None = None

    def monotonic(self) -> float:
        return BEGIN if self.clock is None else self.clock.now

    def time(self) -> float:
        return TODAY + self.monotonic()


_times = _Times()


class _Today(datetime.datetime):
    """The current virtual time of day."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return datetime.datetime.fromtimestamp(_times.time(), tz)


def install() -> None:
    """Replace the machine's clocks for all code that has not bound them already."""
    replaced: dict[str, Any] = {"monotonic": _times.monotonic, "time": _times.time}
    for name, function in replaced.items():
        setattr(time, name, function)
    vars(datetime)["datetime"] = _Today
    vars(random)["random"] = lambda: 0.5


def follow(clock: VirtualClock) -> None:
    """Make this clock the source of time."""
    _times.clock = clock
