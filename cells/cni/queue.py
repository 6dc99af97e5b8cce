"""The delete queue: deletions that plugins queue as files while no agent runs, and the queue's lock.

A plugin without an agent takes a shared lock on the queue, tries the agent once more, and writes a file. The
agent takes the exclusive lock before its sockets exist and releases it when the queue is drained and both
sockets accept, so that no queued deletion is missed.

Source: Cilium 1.17, plugins/cilium-cni/lib/deletion_queue.go; fcntl(2), open file description locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from cells.cni.detach import Detacher
from lifecycle import HiveError, Hook, Lifecycle, Logger

LOCK_SECONDS = 10.0
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_EXCLUSIVE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class QueueLock:
    """The exclusive lock of the queue, from its start hook until :meth:`release`."""

    def __init__(
        self, directory: Path, lifecycle: Lifecycle, log: Logger, lock_seconds: float = LOCK_SECONDS
    ) -> None:
        self._directory = directory
        self._log = log
        self._lock_seconds = lock_seconds
        self._lock: int | None = None
        lifecycle.append(Hook("lock the delete queue", self._acquire, self._stop))

    @property
    def held(self) -> bool:
        """Whether the lock is held, so that plugins wait."""
        return self._lock is not None

    def release(self) -> None:
        """Release the lock. Both sockets accept, so plugins will not use the queue."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _stop(self) -> None:
        self.release()

    async def _acquire(self) -> None:
        path = self._directory / "lockfile"
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise HiveError(f"delete queue {self._directory} is not usable: {error}") from error
        self._lock = lock
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _EXCLUSIVE)
        except (BlockingIOError, PermissionError):  # a plugin holds the lock (EAGAIN or EACCES)
            if not await self._wait(lock):
                self._continue_unlocked(path, f"plugins held the lock for {self._lock_seconds} s")
        except OSError as error:
            self._continue_unlocked(path, str(error))

    def _continue_unlocked(self, path: Path, why: str) -> None:
        self._log.warning("delete queue not locked, continuing without the lock", path=str(path), error=why)

    async def _wait(self, lock: int) -> bool:
        """Wait for the lock; return False after the timeout."""
        loop, acquired, duplicate = asyncio.get_running_loop(), anyio.Event(), os.dup(lock)

        def block() -> None:
            # Cannot be cancelled. A lock acquired too late is released with the last of both descriptors.
            try:
                fcntl.fcntl(duplicate, fcntl.F_OFD_SETLKW, _EXCLUSIVE)
            finally:
                os.close(duplicate)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(acquired.set)

        try:
            with anyio.move_on_after(self._lock_seconds) as limit:
                threading.Thread(target=block, name="delete queue lock", daemon=True).start()
                await acquired.wait()
        except anyio.get_cancelled_exc_class():
            self.release()
            raise
        return not limit.cancelled_caught


_LONGEST_REQUEST = 4096


class BatchDelete(msgspec.Struct, frozen=True, rename="kebab"):
    """The body of Cilium's EndpointBatchDeleteRequest."""

    container_id: str


class DeleteQueue:
    """Drains the queue in its start hook. The queue must be locked before."""

    def __init__(self, directory: Path, detacher: Detacher, lifecycle: Lifecycle, log: Logger) -> None:
        self._directory = directory
        self._detacher = detacher
        self._log = log
        lifecycle.append(Hook("drain the delete queue", self._drain))

    async def _drain(self) -> None:
        try:
            for path in sorted(self._directory.glob("*.delete")):
                self._process(path)
                await anyio.lowlevel.checkpoint()
        except OSError as error:
            raise HiveError(f"delete queue {self._directory} cannot be drained: {error}") from error

    def _process(self, path: Path) -> None:
        """Carry out a queued deletion and remove its file. An unreadable file is skipped and stays."""
        try:
            contents = _read(path)
        except OSError as error:
            self._log.warning("queued delete skipped", path=str(path), error=error.strerror or str(error))
            return
        self._execute(path, contents)
        try:
            path.unlink()
        except OSError as error:  # repeated at the next start, which is harmless
            self._log.warning("queued delete not removed", path=str(path), error=error.strerror or str(error))

    def _execute(self, path: Path, contents: bytes) -> None:
        try:
            container_id = msgspec.json.decode(contents, type=BatchDelete).container_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            count = self._detacher.detach_named(contents.decode(errors="replace").strip())
        else:
            count = self._detacher.detach_container(container_id)
        self._log.info("queued delete done", file=path.name, endpoints=count)


def _read(path: Path) -> bytes:
    """Return the file's contents. Raises OSError if it is not a regular file, without blocking on a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(fd, _LONGEST_REQUEST)
    finally:
        os.close(fd)
