"""Run a Python function in a forked child, usually inside other namespaces, and return its result."""

import contextlib
import contextvars
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class ChildDiedError(RuntimeError):
    """Raised if a child exits without a result."""


def readable(fd: int, seconds: float) -> bool:
    """Wait up to ``seconds`` until a read would not block; by poll(2), which has no limit on descriptors."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


class Stop:
    """Signals a child to finish: the parent has closed its end of a pipe, or has died."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def wait(self, seconds: float) -> bool:
        """Sleep up to ``seconds``; return True as soon as the child should finish."""
        return readable(self.fd, seconds)


_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM until the block ends.

    For cleanup, which must not stop halfway, and for forks, where Python would swallow the exception.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Unblock these signals in a child of a parent that blocks them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_END)


_parent_ends: set[int] = set()
"""The parent's pipe ends of all running children: a later child must not keep them open."""


class Child(Generic[T]):
    """A forked child that runs ``fn(stop, *args)`` and sends back its pickled result.

    ``enter`` runs first in the child, to join namespaces.
    """

    def __init__(self, fn: Callable[..., T], *args: Any, enter: Callable[[], None] | None = None) -> None:
        result_read, result_write = os.pipe()
        stop_read, stop_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with signals_blocked(), warnings.catch_warnings():
            # Python 3.12 warns when other threads exist; the child takes no lock they could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                for fd in (result_read, stop_write, *_parent_ends):
                    os.close(fd)
                _parent_ends.clear()
                _child(result_write, Stop(stop_read), fn, args, enter)
        os.close(result_write)
        os.close(stop_read)
        self._result = result_read
        self._stop = stop_write
        _parent_ends.update((result_read, stop_write))

    def stop(self) -> None:
        """Signal the child to finish; returns at once."""
        if self._stop >= 0:
            _parent_ends.discard(self._stop)
            os.close(self._stop)
            self._stop = -1

    def result(self, within: float | None = None) -> T:
        """Wait up to ``within`` seconds for the result.

        Raises the child's exception, ChildDiedError, or TimeoutError after killing the child.
        """
        try:
            data = self._read(within)
        except BaseException:
            self.kill()
            raise
        status = self._reap()
        if not data:
            raise ChildDiedError(f"the child process ended without a result (wait status {status})")
        done, value = pickle.loads(data)  # noqa: S301 - written by our own child
        if not done:
            raise value
        return value  # type: ignore[no-any-return]

    def finish(self, within: float | None = None) -> T:
        """Signal the child to finish, and wait for its result."""
        self.stop()
        return self.result(within)

    def kill(self) -> None:
        """Kill the child; does nothing if it has exited."""
        if self.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _read(self, within: float | None) -> bytes:
        deadline = None if within is None else time.monotonic() + within
        chunks: list[bytes] = []
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and (left <= 0 or not readable(self._result, left)):
                raise TimeoutError(f"a child process gave no result within {within:g} s")
            chunk = os.read(self._result, 1 << 16)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)

    def _reap(self) -> int:
        self.stop()
        _parent_ends.discard(self._result)
        os.close(self._result)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return status


def run_child(
    fn: Callable[..., T],
    *args: Any,
    enter: Callable[[], None] | None = None,
    within: float | None = None,
) -> T:
    """Run ``fn(*args)`` in a forked child and return its result. Raises as Child.result() does."""
    return Child(lambda _stop: fn(*args), enter=enter).result(within)


def _child(
    result: int,
    stop: Stop,
    fn: Callable[..., object],
    args: tuple[Any, ...],
    enter: Callable[[], None] | None,
) -> NoReturn:
    # The child must never return into its parent's stack.
    try:
        try:
            unblock_signals()
            if enter is not None:
                enter()
            # In a new context: the parent's context variables refer to its event loop.
            answer = (True, contextvars.Context().run(fn, stop, *args))
        except BaseException as error:  # noqa: BLE001  # raised in the parent
            error.add_note("in a child process:\n" + traceback.format_exc())
            answer = (False, error)
        data = _dumps(answer)
        while data:
            data = data[os.write(result, data) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _dumps(answer: tuple[bool, object]) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)  # noqa: S301 - an exception may pickle and yet not unpickle
    except Exception as error:  # noqa: BLE001  # pickle raises anything; a plain error replaces it
        text = f"{answer[1]!r} cannot be handed to the parent process ({error})"
        replacement = RuntimeError(text)
        for note in getattr(answer[1], "__notes__", ()):
            replacement.add_note(note)
        return pickle.dumps((False, replacement))
    return data
