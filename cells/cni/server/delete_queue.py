"""The delete queue: what plugins left behind while no agent was there.

Needs: its directory, locked; Detacher.   Gives: DeleteQueue.
Source: Cilium 1.17, its delete queue. A plugin that finds no agent takes a shared lock on the queue,
tries once more, and writes a file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import anyio.lowlevel
import msgspec

from cells.cni.server.attachment.detach import Detacher
from lifecycle import HiveError, Hook, Lifecycle, Logger

_LONGEST_REQUEST = 4096


class BatchDelete(msgspec.Struct, frozen=True, rename="kebab"):
    """EndpointBatchDeleteRequest of the API."""

    container_id: str


class DeleteQueue:
    """Drained once its hook has run. Whoever makes it sees to it that the queue is locked by then."""

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
    """The file's contents; OSError for what is no file, without waiting for anybody as a pipe would."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(fd, _LONGEST_REQUEST)
    finally:
        os.close(fd)
