"""Executes another program under a supervisor of its system calls: trap.py SOCKET FILTER COMMAND...

Source: seccomp(2), SECCOMP_FILTER_FLAG_NEW_LISTENER; seccomp_unotify(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from pathlib import Path

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 1 << 3, 1 << 5


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("count", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main(where: str, filter_file: str, *command: str) -> None:
    """Install the filter, send its listener to the supervisor, and execute the command."""
    steps = Path(filter_file).read_bytes()
    program = Program(len(steps) // 8, steps)
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(where)
        # Sent before: afterwards a send would wait for the supervisor itself.
        place = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        supervisor.send(place.to_bytes(4, "little"))
        arguments = (_SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE, ctypes.byref(program))
        listener = libc.syscall(_SECCOMP[platform.machine()], *arguments)
        if listener < 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
        os.dup2(listener, place, inheritable=False)
        supervisor.shutdown(socket.SHUT_WR)
        supervisor.recv(1)  # taken
    os.execv(command[0], command)  # noqa: S606 - the test's own command


if __name__ == "__main__":
    main(*sys.argv[1:])
