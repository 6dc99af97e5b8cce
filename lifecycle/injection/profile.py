"""How long every constructor and hook took."""

import time
from collections.abc import Collection
from typing import Literal

import msgspec

__all__ = ["Profile", "Step", "Timing"]

Step = Literal["construct", "invoke", "start", "stop"]


class Timing(msgspec.Struct, frozen=True):
    """One span. Times are in seconds; `began` counts from the making of the Hive."""

    kind: Step
    name: str
    module: str
    began: float
    took: float
    owner: str = ""
    """Of a hook: the name of the constructor or invoked function that registered it."""


class Profile(msgspec.Struct):
    """The timings of one hive, in the order they ended."""

    timings: list[Timing] = msgspec.field(default_factory=list)
    failed: list[Timing] = msgspec.field(default_factory=list)
    """Starts of hooks that came to nothing; in `timings` is only what did."""
    sums: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds by name that the caller of the hive adds, for the timeline to show."""
    origin: float = msgspec.field(default_factory=time.perf_counter)

    def record(self, kind: Step, name: str, module: str, began: float, owner: str = "") -> float:
        """Record a span that began at perf_counter() time `began` and ends now; the seconds it took."""
        took = time.perf_counter() - began
        self.timings.append(Timing(kind, name, module, began - self.origin, took, owner))
        return took

    def record_failure(self, kind: Step, name: str, module: str, began: float, owner: str = "") -> None:
        """As record(), of what has failed."""
        took = time.perf_counter() - began
        self.failed.append(Timing(kind, name, module, began - self.origin, took, owner))

    def forget(self, owners: Collection[tuple[str, str]]) -> None:
        """Drop the timings of constructors, given by module and name, and of their hooks: they run again."""
        self.timings[:] = [one for one in self.timings if (one.module, one.owner or one.name) not in owners]
