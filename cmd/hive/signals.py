"""Termination signals, for commands that create something and remove it again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_TO_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise like ctrl-C, so that cleanups run."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore termination signals while the block cleans up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_END}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
