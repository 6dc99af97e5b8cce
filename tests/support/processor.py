"""Restricts a test to one processor: events then come in order, since each processor has its own buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Pin this thread to one of its processors during the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
