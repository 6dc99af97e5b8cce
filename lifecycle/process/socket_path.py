"""Frees the path of a unix socket: takes it over from a dead process, never from a live one."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from lifecycle.errors import HiveError


def clear_socket(path: Path) -> None:
    """Remove the socket file of a process that no longer exists; a no-op if there is no file.

    Raises HiveError, one line, if a process serves it, with a socket of whatever type, or if another kind of
    file is in the way.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise HiveError(f"{path} is in the way and is not a socket: remove it, or choose another state-dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:  # full backlog, or a socket of another type: the server is alive
            pass
    raise HiveError(f"another process serves {path}: stop that agent, or choose another state-dir")
