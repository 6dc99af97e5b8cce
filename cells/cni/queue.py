"""The delete queue: what plugins left behind while no agent was there, and the lock that keeps them from it.

Source: Cilium 1.17, its delete queue; fcntl(2), open file description locks. The exclusive lock is taken
        before a socket appears and held until the queue is drained and both sockets accept: no request is
        written that no agent drains.
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
    """Held from its hook on until :meth:`release`."""

    def __init__(
        self, directory: Path, lifecycle: Lifecycle, log: Logger, lock_seconds: float = LOCK_SECONDS
    ) -> None:
        self._directory = directory
        self._log = log
        self._lock_seconds = lock_seconds
        self._lock: int | None = None
        lifecycle.append(Hook("lock the delete queue", self._take, self._stop))

    @property
    def held(self) -> bool:
        """Whether plugins are being held back."""
        return self._lock is not None

    def release(self) -> None:
        """Let plugins at the queue again: both sockets accept, so they will not need it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _stop(self) -> None:
        self.release()

    async def _take(self) -> None:
        path = self._directory / "lockfile"
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise HiveError(f"delete queue {self._directory} is not usable: {error}") from error
        self._lock = lock
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _EXCLUSIVE)
        except (BlockingIOError, PermissionError):  # plugins are writing (EAGAIN or EACCES)
            if not await self._wait(lock):
                self._go_on(path, f"plugins held the lock for {self._lock_seconds} s")
        except OSError as error:
            self._go_on(path, str(error))

    def _go_on(self, path: Path, why: str) -> None:
        self._log.warning("delete queue not locked, continuing without the lock", path=str(path), error=why)

    async def _wait(self, lock: int) -> bool:
        """Wait until they have written; False when they take too long."""
        loop, got, duplicate = asyncio.get_running_loop(), anyio.Event(), os.dup(lock)

        def block() -> None:
            """This cannot be cancelled. A late lock is freed with the last of both descriptors."""
            try:
                fcntl.fcntl(duplicate, fcntl.F_OFD_SETLKW, _EXCLUSIVE)
            finally:
                os.close(duplicate)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(got.set)

        try:
            with anyio.move_on_after(self._lock_seconds) as limit:
                threading.Thread(target=block, name="delete queue lock", daemon=True).start()
                await got.wait()
        except anyio.get_cancelled_exc_class():
            self.release()
            raise
        return not limit.cancelled_caught


# The delete queue: what plugins left behind while no agent was there.
#
# Source: Cilium 1.17, its delete queue. A plugin that finds no agent takes a shared lock on the queue, tries
#         once more, and writes a file.

_LONGEST_REQUEST = 4096


class BatchDelete(msgspec.Struct, frozen=True, rename="kebab"):
    """EndpointBatchDeleteRequest of the API."""

    container_id: str


class DeleteQueue:
    """Drained once its hook has run. The caller locks the queue before."""

    def __init__(self, directory: Path, detacher: Detacher, lifecycle: Lifecycle, log: Logger) -> None:
        self._directory = directory
        self._detacher = detacher
        self._log = log
        lifecycle.append(Hook("drain the delete queue", self._drain))

    async def _drain(self) -> None:
        try:
            for path in sorted(self._directory.glob("*.delete")):
                self._take(path)
                await anyio.lowlevel.checkpoint()
        except OSError as error:
            raise HiveError(f"delete queue {self._directory} cannot be drained: {error}") from error

    def _take(self, path: Path) -> None:
        """Do what the file asks for and remove it; one that cannot be read stays, and holds up nothing."""
        try:
            contents = _read(path)
        except OSError as error:
            self._log.warning("queued delete skipped", path=str(path), error=error.strerror or str(error))
            return
        self._execute(path, contents)
        try:
            path.unlink()
        except OSError as error:  # it will be done again at the next start, which is harmless
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
    """The file's contents; OSError for what is not a file, without waiting for anybody as a pipe would."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(fd, _LONGEST_REQUEST)
    finally:
        os.close(fd)
