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
"""What a monotonic clock shows until there is a virtual one: each run begins alike."""
TODAY = 1_700_000_000.0 - BEGIN
"""Seconds of the epoch at 0 of the monotonic clock."""


class _Times:
    """The clock in force, if any."""

    def __init__(self) -> None:
        self.clock: VirtualClock | None = None

    def monotonic(self) -> float:
        return BEGIN if self.clock is None else self.clock.now

    def time(self) -> float:
        return TODAY + self.monotonic()


_times = _Times()


class _Today(datetime.datetime):
    """Times of day that are asked for now."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return datetime.datetime.fromtimestamp(_times.time(), tz)


def install() -> None:
    """From here on nothing reads the machine's clocks but what has bound them already."""
    replaced: dict[str, Any] = {"monotonic": _times.monotonic, "time": _times.time}
    for name, function in replaced.items():
        setattr(time, name, function)
    vars(datetime)["datetime"] = _Today
    vars(random)["random"] = lambda: 0.5


def follow(clock: VirtualClock) -> None:
    """This clock counts."""
    _times.clock = clock
