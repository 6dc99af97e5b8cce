"""Requests to end the hive."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

__all__ = ["Shutdown"]


class Shutdown:
    """Ends the hive from inside. A request returns at once; the first error counts."""

    def __init__(self) -> None:
        self.requested = False
        """Whether a request was made."""
        self.error: BaseException | None = None
        """The error of the request, if any."""
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the holder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def request(self, error: BaseException | None = None) -> None:
        """Request an ordered stop. With an error the run ends with its exit code, otherwise with 0.

        May be called from any thread and by a signal handler. Raises TypeError if the error is not an
        exception.
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
        in_loop_thread = threading.get_ident() == self._thread
        if in_loop_thread:
            self._notify()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the hive has ended
            # wake the loop: a signal handler runs in its thread while it sleeps
            self._loop.call_soon_threadsafe(_wake if in_loop_thread else self._notify)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` in this event loop at a request; at once if there was one."""
        with self._lock:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
            already_requested = self.requested
            self._listeners.append(listener)
        if already_requested:
            listener()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _wake() -> None:
    """Do nothing; scheduled to wake the loop."""
