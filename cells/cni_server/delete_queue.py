"""The delete queue: what plugins left behind while no agent was there.

Needs: AgentConfig (the directory), ExposedEndpoints, Detacher.   Gives: DeleteQueue.
Source: Cilium 1.17, its delete queue. A plugin that finds no agent takes a shared lock on the queue,
tries once more, and writes a file. The exclusive lock taken here lasts from before the drain until both
sockets accept, so no request is written that nobody drains.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from cells.cni_server.detach import Detacher
from lifecycle import HiveError, Hook, Lifecycle, Logger

LOCK_SECONDS = 10.0
_RETRY_SECONDS = 0.02
_LONGEST_REQUEST = 4096
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class BatchDelete(msgspec.Struct, frozen=True, rename="kebab"):
    """EndpointBatchDeleteRequest of the API."""

    container_id: str


class DeleteQueue:
    """Drained by its hook; the lock is held until :meth:`release`."""

    def __init__(
        self,
        directory: Path,
        detacher: Detacher,
        lifecycle: Lifecycle,
        log: Logger,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self._directory = directory
        self._detacher = detacher
        self._log = log
        self._lock_seconds = lock_seconds
        self._lock: int | None = None
        lifecycle.append(Hook("drain the delete queue", self._start, self._stop))

    @property
    def locked(self) -> bool:
        """Whether plugins are being held back."""
        return self._lock is not None

    def release(self) -> None:
        """Let plugins at the queue again: both sockets accept, so they will not need it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _start(self) -> None:
        await self._take_lock()
        try:
            for path in sorted(self._directory.glob("*.delete")):
                self._take(path)
                await anyio.lowlevel.checkpoint()
        except OSError as error:
            self.release()
            raise HiveError(f"delete queue {self._directory} cannot be drained: {error}") from error

    async def _stop(self) -> None:
        self.release()

    async def _take_lock(self) -> None:
        path = self._directory / "lockfile"
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise HiveError(f"delete queue {self._directory} is not usable: {error}") from error
        self._lock = lock
        exclusive = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        with anyio.move_on_after(self._lock_seconds):
            while True:
                try:
                    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, exclusive)
                except OSError:  # held by plugins that are writing: the kernel has no waiting one can cancel
                    await anyio.sleep(_RETRY_SECONDS)
                else:
                    return
        self._log.warning(
            "delete queue not locked: going on without", path=str(path), waited_seconds=self._lock_seconds
        )

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
        except OSError as error:  # it will be done once more at the next start, which harms nobody
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
    """The file's contents; OSError for what is no file, without waiting for anybody as a pipe would."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(fd, _LONGEST_REQUEST)
    finally:
        os.close(fd)
