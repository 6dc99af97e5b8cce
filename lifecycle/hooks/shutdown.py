"""Asking the hive to end."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

__all__ = ["Shutdown"]


class Shutdown:
    """Ends the hive from inside. It is only an asking, so it returns at once; the first fault counts."""

    def __init__(self) -> None:
        self.requested = False
        """Whether someone has asked."""
        self.error: BaseException | None = None
        """Why, when it was a fault."""
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # a signal handler may interrupt who holds it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def request(self, error: BaseException | None = None) -> None:
        """Ask for an ordered stop. With an error the run ends with its exit code, else with 0.

        May be called from any thread, and by a signal handler. Raises TypeError for an error that is none.
        """
        if error is not None and not isinstance(error, BaseException):
            raise TypeError(f"Shutdown.request({error!r}): expected an exception, or nothing")
        with self._lock:
            before, self.requested = self.requested, True
            if self.error is None:
                self.error = error
            if before:
                return
        if self._loop is None:
            return
        here = threading.get_ident() == self._thread
        if here:
            self._notify()
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to end
            # a signal handler runs in the loop's own thread, but while the loop sleeps
            self._loop.call_soon_threadsafe(_wake if here else self._notify)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` in this event loop when someone asks; at once when someone has."""
        with self._lock:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
            asked = self.requested
            self._listeners.append(listener)
        if asked:
            listener()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _wake() -> None:
    """There is nothing to do but to look again."""
