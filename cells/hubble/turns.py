"""Turns of the ring's readers: a reader has its turn when those that waited longer have had theirs.

Why:    a hundred readers cost what else the loop has to do, a pod's ADD above all, a wait for few of them.
        While pods are added, clients get a part of the processor's time: an ADD is a millisecond of several
        processes' work, which readers that follow or ask without a pause would slow down between its steps.
        A reader's task is woken when there is something for its client, not for each event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from lifecycle.http import turns_of

_ROUND: Final = 0.0002
"""Seconds of reading, about, in one round of the event loop."""
_SERVED: Final = 4
"""Clients for which something is found, and then written to their sockets, in one round: 0.1 ms of work."""
_ADDING: Final = 0.1
"""Seconds since the last call of the CNI plugin for which pods count as being added."""
_WORK: Final = 0.001
"""Seconds of turns, about, after which clients pause while pods are added."""
_PAUSE: Final = 0.009
"""Seconds of such a pause: clients get a tenth of a processor."""

T = TypeVar("T")


class _Waiting(msgspec.Struct, eq=False):
    read: Callable[[], Any]
    at_end: Callable[[], bool]
    found: asyncio.Future[Any]


class ReaderTurns:
    """Hands out the turns. With ``yielding``, readers pause while pods are added."""

    def __init__(self, *, yielding: bool = False) -> None:
        self._yielding = yielding
        self._waiting: deque[_Waiting] = deque()
        self._idle: dict[_Waiting, None] = {}
        """Readers that have read everything, in the order of their last turns."""
        self._running = False
        self._began: float | None = None
        """When the last turn began; None while there is none."""
        self._worked = 0.0
        """Seconds of turns since the last pause."""

    async def read(self, read: Callable[[], T | None], at_end: Callable[[], bool]) -> T:
        """Call a function in the reader's turns until it returns something, and return that.

        Where there is nothing more to read, the next turn is after wake(). Raises what the function raises.
        """
        reader = _Waiting(read, at_end, asyncio.get_running_loop().create_future())
        if at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
            self._run()
        try:
            result: T = await reader.found
        finally:
            self._idle.pop(reader, None)
        return result

    def wake(self) -> None:
        """There is more to read."""
        if self._idle:
            self._waiting.extend(self._idle)
            self._idle.clear()
            self._run()

    def _run(self) -> None:
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Give the turns of this round of the loop."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._began is not None:
            self._worked += now - self._began
            self._began = None
        if self._worked >= _WORK:
            self._worked = 0.0
            if self._yielding and now - turns_of(loop).preceded_at < _ADDING:
                loop.call_later(_PAUSE, self._next)
                return
        if not self._waiting:
            self._running = False
            return
        self._began = now
        served = 0
        while self._waiting and served < _SERVED and loop.time() - now < _ROUND:
            served += self._give(self._waiting.popleft())
        loop.call_soon(self._next)

    def _give(self, reader: _Waiting) -> bool:
        """Give a reader its turn; whether it found something."""
        if reader.found.done():  # its task was cancelled
            return False
        try:
            result = reader.read()
        except Exception as error:  # noqa: BLE001  # its task raises it
            reader.found.set_exception(error)
            return True
        if result is not None:
            reader.found.set_result(result)
            return True
        if reader.at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
        return False
