"""Requests to end, for commands that make something and remove it again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_TO_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def orderly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like ctrl-C does, so that what was started is cleared away."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore requests to end while the block clears away."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_END}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
