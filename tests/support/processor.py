"""One processor for a test: events come in their order, as each processor has a buffer of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_processor() -> Iterator[None]:
    """This thread stays on one of its processors meanwhile, however busy the machine is."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
