"""Chooses the failures that tests inject: a part of all, or with CRASH_POINTS=0, as in a soak, all."""

from __future__ import annotations

import os
from collections.abc import Callable

from lifecycle.testing import Failure
from tests.support.pairwise import commit

EVERY = os.environ.get("CRASH_POINTS") == "0"

Choice = Callable[[Failure], bool]


ROUNDS = 5
"""Number of runs, each of another commit, in which all hooks are chosen once.

Odd, so that each run has both phases.
"""


def seeds(number: int) -> range:
    """Return a third of the seeds for orders of siblings, chosen by the commit's hash."""
    each = number // ROUNDS
    first = each * (int(commit()[:12] or "0", 16) % ROUNDS)
    return range(number) if EVERY else range(first, first + each)


def each_hook() -> Choice:
    """Return a fifth, chosen by the commit's hash, of every second hook at start or stop, every third
    interrupted too.
    """
    seen: dict[tuple[str, str], int] = {}
    turn_of_run = int(commit()[:12] or "0", 16) % ROUNDS

    def chosen(failure: Failure) -> bool:
        turn = seen.setdefault((failure.module, failure.hook), len(seen))
        if failure.phase == "interrupt":
            return turn % 3 == 0 and turn // 3 % ROUNDS == turn_of_run and failure.suspension == 1
        if turn % 2 or turn // 2 % ROUNDS != turn_of_run:
            return False
        return (failure.phase, failure.sequential) == (("start", "stop")[turn // 2 % 2], turn % 8 > 3)

    return everything if EVERY else chosen


def each_module() -> Choice:
    """Return one hook of every module, at start and at stop by turns; every fourth interrupted too."""
    seen: dict[str, tuple[int, str]] = {}

    def chosen(failure: Failure) -> bool:
        turn, hook = seen.setdefault(failure.module, (len(seen), failure.hook))
        if failure.hook != hook or failure.sequential:
            return False
        if failure.phase == "interrupt":
            return turn % 4 == 0 and failure.suspension == 1
        return failure.phase == ("start", "stop")[turn % 2]

    return everything if EVERY else chosen


def everything(_: Failure) -> bool:
    """Return all possible failures."""
    return True
