"""SIGINT and SIGTERM, for the hives that run in a process.

Needs:  the main thread, which alone can have signal handlers.
Gives:  signals(), leave().

Signals are counted, whatever else has asked a hive to end. The handlers are Python's own and not the event
loop's: those would wait for code that blocks the loop, in a hook or a constructor.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["leave", "signals"]

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class _Listener:
    """A hive that runs, and whether it has had its first signal."""

    def __init__(self, name: str, call: Callable[[signal.Signals], None]) -> None:
        self.name = name
        self.call = call
        self.asked = False
        self.loop = asyncio.get_running_loop()


_listeners: list[_Listener] = []
_before: dict[signal.Signals, Any] = {}


@contextmanager
def signals(name: str, call: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside the block the first signal is handed to `call`, in this event loop; a second ends the process.

    Several may listen at once: each gets the signal. Afterwards signals are handled as they were before.
    Raises RuntimeError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{name}: run() handles signals, which only the main thread can; "
            "in another one use `async with hive.started()`"
        )
    listener = _Listener(name, call)
    if not _listeners:
        _before.update({number: signal.signal(number, _on_signal) for number in NUMBERS})
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            for number, handler in _before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave(name: str, why: str, code: int) -> NoReturn:
    """End the process at once, without waiting for its threads, from wherever this is called."""
    with contextlib.suppress(Exception):  # what was interrupted may hold them
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(2, f"{name}: {why}\n".encode())
    os._exit(code)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for listener in _listeners:
        if listener.asked:
            leave(listener.name, "second signal, leaving at once", 1)
    for listener in _listeners:
        listener.asked = True
        with contextlib.suppress(RuntimeError):  # its loop is closed
            listener.loop.call_soon_threadsafe(listener.call, signal.Signals(number))
