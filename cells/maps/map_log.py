"""The agent's latest writes to a BPF map, for `cilium-dbg map events`; and how long its system calls take."""

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final

import anyio
import msgspec

from cells.base.metrics import Histogram
from cells.maps.bpf import Syscall

__all__ = ["SYSCALLS", "MapChange", "MapLog", "SyscallTimes"]


RETAINED: Final = 256


class MapChange(msgspec.Struct, frozen=True):
    """One write of the agent."""

    number: int
    """Number of the change, counted per map from 1."""
    at: float
    """Seconds since the epoch."""
    key: bytes
    value: bytes | None
    """None: the entry was deleted."""
    error: str
    """The errno's name if the kernel refused the write; empty on success."""


class MapLog:
    """The latest 256 changes of a map. note() takes less than a microsecond."""

    __slots__ = ("_changed", "_changes", "_count")

    def __init__(self) -> None:
        self._changes: deque[MapChange] = deque(maxlen=RETAINED)
        self._count = 0
        self._changed: anyio.Event | None = None

    def note(self, key: bytes, value: bytes | None, error: str = "") -> None:
        """Append a change with the current time."""
        self._count += 1
        self._changes.append(MapChange(self._count, time.time(), key, value, error))
        self.wake()

    def note_many(self, changes: Collection[tuple[bytes, bytes | None]]) -> None:
        """Append the changes of one batch; of a batch that is too large, the last ones."""
        dropped = max(0, len(changes) - RETAINED)
        self._count += dropped
        for key, value in islice(changes, dropped, None):
            self.note(key, value)

    def since(self, number: int) -> list[MapChange]:
        """Retained changes with a larger number."""
        return [change for change in self._changes if change.number > number]

    async def wait(self, number: int) -> None:
        """Wait for a change with a larger number, or for wake()."""
        if number < self._count:
            return
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        """Wake all waiters, for example at shutdown."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None


# Durations of system calls.
#
# Source: Cilium 1.17, cilium_bpf_syscall_duration_seconds; a missing key counts as a failure, as there.

SYSCALLS: Final = "cilium_bpf_syscall_duration_seconds"
_OPERATIONS: Final[Mapping[int, str]] = {
    0: "create",
    1: "lookup",
    2: "update",
    3: "delete",
    4: "getNextKey",
    6: "objPin",
    7: "objGet",
}
"""Commands of bpf(2) that are measured: of one entry, or one map."""


class SyscallTimes:
    """Measures bpf(2) commands; two clock readings and a lock for each, so only on request."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], Histogram] = {}
        """Seconds, by operation and outcome."""
        self._lock = threading.Lock()

    def wrap(self, call: Syscall) -> Syscall:
        """The system call, measured."""

        def timed(nr: object, command: int, attr: object, size: int) -> int:
            operation = _OPERATIONS.get(command)
            if operation is None:
                return call(nr, command, attr, size)
            began = time.perf_counter()
            result = call(nr, command, attr, size)
            took = time.perf_counter() - began
            with self._lock:
                key = operation, "fail" if result < 0 else "success"
                self.took.setdefault(key, Histogram()).observe(took)
            return result

        return timed
