"""A listening unix socket for its owner and perhaps a group; never replaces that of a live process."""

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
    """Bind and listen at ``path``: mode 0600, or 0660 with a ``group``, if the host has that group.

    A stale socket file is replaced. Raises HiveError, one line, if another process serves it, another kind of
    file is in the way, or the path cannot be used.
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
