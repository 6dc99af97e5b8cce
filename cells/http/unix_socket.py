"""A listening socket for clients on the node: of root and the group ``cilium``, taken from no live agent.

Needs: nothing.   Gives: listen.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
from pathlib import Path

from cells.config import clear_socket
from lifecycle import HiveError

GROUP = "cilium"
MODE = 0o660
BACKLOG = 128


def listen(path: Path, *, group: str = GROUP) -> socket.socket:
    """Bind and listen at ``path``, mode 0660, in ``group`` where the host has it.

    A socket file nobody answers at is replaced. Raises HiveError, one line, when another process serves it,
    when something else is in the way, or when the path cannot be used.
    """
    try:
        clear_socket(path)
        return _bound(path, group)
    except OSError as error:
        raise HiveError(f"socket {path} cannot be made: {error.strerror or error}") from error


def _bound(path: Path, group: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(str(path))
        path.chmod(MODE)  # nobody can connect before listen()
        with contextlib.suppress(KeyError):
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        server.listen(BACKLOG)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server
