"""SIGINT, SIGTERM and SIGHUP for the hives of a process.

Signals are counted even if the hive is already ending for another reason. The handlers are Python's, not the
event loop's, which would wait for code that blocks the loop in a hook or a constructor. A forked child
restores the earlier handlers: otherwise signals would not end it.
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

from lifecycle.hooks.stacks import running_threads

__all__ = ["bound_end", "leave", "signals"]

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST = 0.1
"""Seconds within which several signals count as one, as a terminal and a supervisor may both send one."""
END_SECONDS = 5.0
"""How long a process waits for its threads after everything else has ended."""


class _Listener:
    """A running hive, and whether it has received its first signal."""

    def __init__(
        self, name: str, call: Callable[[signal.Signals], None], reload: Callable[[], bool] | None
    ) -> None:
        self.name = name
        self.call = call
        self.reload = reload
        self.asked_at: float | None = None
        """By the loop's clock."""
        self.loop = asyncio.get_running_loop()


_listeners: list[_Listener] = []
_before: dict[signal.Signals, Any] = {}


@contextmanager
def signals(
    name: str, call: Callable[[signal.Signals], None], reload: Callable[[], bool] | None = None
) -> Iterator[None]:
    """A block in which the first signal calls `call` in this event loop, and a second one ends the process.

    SIGHUP first calls `reload`, at once: if that returns True, the signal does not end the run. If several
    blocks are active, each receives the signal. At the end, earlier handlers are restored. SIGHUP stays
    ignored if it was (nohup). Raises RuntimeError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{name}: run() handles signals, which only the main thread can; "
            "in another one use `async with hive.started()`"
        )
    listener = _Listener(name, call, reload)
    if not _listeners:
        _before.update({number: signal.signal(number, _on_signal) for number in _handled()})
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _restore()


def bound_end(name: str, code: int) -> None:
    """From now on, end the process with this code: at once at a signal, otherwise after END_SECONDS at most.

    Python waits for threads without limit. Threads that still run are named, with what they execute.
    """

    def end(*_: object) -> None:
        running = ", ".join(running_threads())
        leave(name, f"leaving with {running}" if running else "", code)

    for number in _handled():
        signal.signal(number, end)
    _before.clear()  # handlers are not restored, even after a block of signals()
    timer = threading.Timer(END_SECONDS, end)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started: only signals end the process
        timer.start()


def leave(name: str, why: str, code: int) -> NoReturn:
    """End the process at once, from any thread, without waiting for threads. Prints the reason, if given."""
    with contextlib.suppress(Exception):  # the interrupted code may hold their locks
        sys.stdout.flush()
        sys.stderr.flush()
    if why:
        os.write(2, f"{name}: {why}\n".encode())
    os._exit(code)


def _handled() -> list[signal.Signals]:
    return [
        number for number in NUMBERS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def _restore() -> None:
    """Restore the handlers from before any hive ran."""
    for number, handler in _before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _before.clear()


def _forked() -> None:
    """In a forked child: stop handling signals for hives of the parent."""
    _listeners.clear()
    _restore()


os.register_at_fork(after_in_child=_forked)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    reloads = (
        [listener.reload() for listener in _listeners if listener.reload is not None]
        if number == signal.SIGHUP
        else []
    )
    if any(reloads):
        return
    for listener in _listeners:
        if listener.asked_at is not None and listener.loop.time() - listener.asked_at >= ONE_REQUEST:
            leave(listener.name, "second signal, leaving at once", 1)
    for listener in _listeners:
        if listener.asked_at is None:
            listener.asked_at = listener.loop.time()
            with contextlib.suppress(RuntimeError):  # its loop is closed
                listener.loop.call_soon_threadsafe(listener.call, signal.Signals(number))
