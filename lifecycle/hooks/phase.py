"""The phase of a hive, for reports outside the hive."""

from collections.abc import Callable
from typing import Literal

import msgspec

__all__ = ["Phase", "Progress", "Stage"]

Stage = Literal["built", "starting", "running", "stopping", "stopped"]


class Progress(msgspec.Struct, frozen=True):
    """The progress of a start or a stop."""

    hooks: int
    """Number of hooks of the start, or of hooks that have not stopped."""
    started: int
    busy: tuple[str, ...]
    """Names of the hooks that are starting or stopping."""
    within: float
    """Seconds until the timeout of the slowest of them."""


class Phase:
    """The phase of a hive. Followers are called on the loop, at every phase and every step of a hook."""

    def __init__(self) -> None:
        self.stage: Stage = "built"
        self.look: Callable[[], Progress] = lambda: Progress(0, 0, (), 0.0)
        """Returns the current progress. It visits every hook, so do not call it at every step of thousands.
        """
        self._followers: dict[int, Callable[[], object]] = {}
        self._count = 0

    def follow(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call a function at every change. Returns a function that ends it. It must not block or raise."""
        self._count = number = self._count + 1
        self._followers[number] = call
        return lambda: self._followers.pop(number, None) and None

    def enter(self, stage: Stage) -> None:
        """Enter a phase; only the hive calls this."""
        if stage != self.stage:
            self.stage = stage
            self.report_step()

    def report_step(self) -> None:
        """Report a step of a hook; only the hive calls this."""
        for call in list(self._followers.values()) if self._followers else ():
            call()
