"""The API's listening socket: owned by root and the group ``cilium``, never stolen from a live agent.

Needs: nothing.   Gives: listen.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
from pathlib import Path

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
        _clear(path)
        return _bound(path, group)
    except OSError as error:
        raise HiveError(f"API socket {path} cannot be made: {error.strerror or error}") from error


def _clear(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise HiveError(f"{path} is in the way and is no socket: remove it, or choose another state-dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise HiveError(f"another process serves {path}: stop that agent, or choose another state-dir")


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
