"""A listening socket for clients on this machine: for its owner, perhaps a group; never a live one."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
from pathlib import Path

from lifecycle.errors import HiveError
from lifecycle.process.socket_path import clear_socket

OWN, SHARED = 0o600, 0o660
BACKLOG = 128


def listen(path: Path, *, group: str | None = None) -> socket.socket:
    """Bind and listen at ``path``: mode 0600, or 0660 with a ``group``, which it gets where the host has it.

    A stale socket file is replaced. Raises HiveError, one line, when another process serves it,
    when something else is in the way, or when the path cannot be used.
    """
    try:
        clear_socket(path)
        return _bound(path, group)
    except OSError as error:
        raise HiveError(f"socket {path} cannot be made: {error.strerror or error}") from error


def _bound(path: Path, group: str | None) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(str(path))
        path.chmod(OWN if group is None else SHARED)  # connections are refused until listen()
        with contextlib.suppress(KeyError):
            os.chown(path, -1, -1 if group is None else grp.getgrnam(group).gr_gid)
        server.listen(BACKLOG)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server
