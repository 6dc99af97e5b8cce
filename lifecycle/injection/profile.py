"""Durations of constructors and hooks."""

import time
from collections.abc import Collection
from typing import Literal

import msgspec

__all__ = ["Profile", "Step", "Timing"]

Step = Literal["construct", "invoke", "start", "stop"]


class Timing(msgspec.Struct, frozen=True):
    """One span. Times are in seconds; `began` counts from the creation of the Hive."""

    kind: Step
    name: str
    module: str
    began: float
    took: float
    owner: str = ""
    """For a hook, the name of the constructor or invoked function that registered it."""


class Profile(msgspec.Struct):
    """The timings of one hive, in the order in which they ended."""

    timings: list[Timing] = msgspec.field(default_factory=list)
    failed: list[Timing] = msgspec.field(default_factory=list)
    """Failed starts of hooks; `timings` contains only successful ones."""
    sums: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds by name that the caller of the hive adds, for the timeline."""
    origin: float = msgspec.field(default_factory=time.perf_counter)

    def record(self, kind: Step, name: str, module: str, began: float, owner: str = "") -> float:
        """Record a span from perf_counter() time `began` until now. Returns its seconds."""
        took = time.perf_counter() - began
        self.timings.append(Timing(kind, name, module, began - self.origin, took, owner))
        return took

    def record_failure(self, kind: Step, name: str, module: str, began: float, owner: str = "") -> None:
        """As record(), for a failed span."""
        took = time.perf_counter() - began
        self.failed.append(Timing(kind, name, module, began - self.origin, took, owner))

    def forget(self, owners: Collection[tuple[str, str]]) -> None:
        """Drop the timings of constructors, by module and name, and of their hooks, as they run again."""
        self.timings[:] = [
            timing for timing in self.timings if (timing.module, timing.owner or timing.name) not in owners
        ]
