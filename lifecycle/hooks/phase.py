"""Where a hive is between its start and its end, for those who show it to the outside."""

from collections.abc import Callable
from typing import Literal

import msgspec

__all__ = ["Phase", "Progress", "Stage"]

Stage = Literal["built", "starting", "running", "stopping", "stopped"]


class Progress(msgspec.Struct, frozen=True):
    """How far a start or a stop is."""

    hooks: int
    """Those of the start; those that are not over yet, of a stop."""
    started: int
    busy: tuple[str, ...]
    """Names of the hooks that are starting or stopping."""
    within: float
    """Seconds after which the hive itself gives up on the slowest of them."""


class Phase:
    """The stage of a hive. Those who follow it are called on the loop, at every stage and step of a hook."""

    def __init__(self) -> None:
        self.stage: Stage = "built"
        self.look: Callable[[], Progress] = lambda: Progress(0, 0, (), 0.0)
        """How far it is now; looks at every hook, so not for every step of thousands."""
        self._followers: dict[int, Callable[[], object]] = {}
        self._count = 0

    def follow(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call this at every change from now on; gives what ends that. It must not block or raise."""
        self._count = number = self._count + 1
        self._followers[number] = call
        return lambda: self._followers.pop(number, None) and None

    def reach(self, stage: Stage) -> None:
        """The hive has come to this stage; for the hive alone."""
        if stage != self.stage:
            self.stage = stage
            self.moved()

    def moved(self) -> None:
        """A hook has come to another step; for the hive alone."""
        for call in list(self._followers.values()) if self._followers else ():
            call()
