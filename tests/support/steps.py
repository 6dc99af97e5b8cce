"""Counts the lines of Python that a block executes: its complexity, whatever else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Steps:
    """Lines executed so far, each round of a loop included."""

    def __init__(self) -> None:
        self.lines = 0

    def trace(self, _: FrameType, event: str, __: object) -> Any:
        """Count a line; see sys.settrace()."""
        self.lines += event == "line"
        return self.trace


@contextmanager
def counted_steps() -> Iterator[Steps]:
    """Count the lines of all functions that this thread enters during the block, coroutines' too."""
    steps, before = Steps(), sys.gettrace()
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
