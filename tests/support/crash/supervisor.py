"""Receives an agent's calls with an effect outside of it, records them, and kills the agent before one.

Source: seccomp_unotify(2), pidfd_getfd(2); devinet_sysctl_forward in the kernel's net/ipv4/devinet.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import struct
from pathlib import Path
from typing import TextIO

from hive.lab.children import Stop
from tests.support.crash.calls import BPF_COMMANDS, names

_RECEIVE, _ANSWER = 0xC050_2100, 0xC018_2101
_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QII iIQ 6Q")  # struct seccomp_notif
_RESPONSE = struct.Struct("=QqiI")
_PIDFD_GETFD = {"x86_64": 438, "aarch64": 438}
_PATH_ARGUMENT = {
    "rename": 1,
    "renameat": 3,
    "renameat2": 3,
    "link": 1,
    "linkat": 3,
    "symlink": 1,
    "symlinkat": 2,
    "mount": 1,
    **dict.fromkeys(
        ("open", "creat", "unlink", "mkdir", "rmdir", "chmod", "chown", "truncate", "umount2"), 0
    ),
    **dict.fromkeys(("openat", "openat2", "unlinkat", "mkdirat", "mknodat", "fchmodat", "fchownat"), 1),
}
"""The argument with the path that identifies a call best; other calls have a descriptor first."""
_Call = tuple[int, tuple[int, ...]]
"""Its number and arguments."""
_RESTARTED = "/proc/sys/net/"
WRITING = frozenset(("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendto", "sendmsg", "sendmmsg"))


class Control:
    """Two numbers shared with the supervisor: calls so far, and the call before which to kill (0: none)."""

    def __init__(self) -> None:
        self._page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")

    @property
    def counted(self) -> int:
        """Calls so far, including the one before which the agent was killed."""
        return self._page[0]

    @property
    def kill_at(self) -> int:
        """The call not to be reached alive."""
        return self._page[1]

    @kill_at.setter
    def kill_at(self, number: int) -> None:
        """The call before which the agent is killed."""
        self._page[1] = number

    def count(self) -> int:
        """Count one more call."""
        self._page[0] += 1
        return self._page[0]


def supervise(stop: Stop, listening: socket.socket, log: Path, control: Control) -> None:
    """Supervise one agent from before its first call until it ends or the test stops the supervisor."""
    waiting = select.poll()
    waiting.register(stop.fd)
    waiting.register(listening, select.POLLIN)
    if not any(fd == listening.fileno() for fd, _ in waiting.poll()):
        return
    with listening.accept()[0] as trapped, log.open("w", buffering=1) as lines:
        place = int.from_bytes(trapped.recv(4), "little")
        while trapped.recv(1):  # until it sends its last message
            pass
        pid, _, _ = struct.unpack("=3i", trapped.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        agent = os.pidfd_open(pid)
        listener = _descriptor_of(agent, place)
        trapped.send(b"x")
        waiting.unregister(listening)
        waiting.register(listener, select.POLLIN)
        before: dict[int, _Call] = {}
        while True:
            for fd, events in waiting.poll():
                if fd != listener or not events & select.POLLIN:
                    return  # it has ended, or the reader has closed
                if not _take(listener, agent, pid, lines, control, before):
                    return


def _take(
    listener: int, agent: int, pid: int, lines: TextIO, control: Control, before: dict[int, _Call]
) -> bool:
    """Receive one call and let it continue; false if the agent was killed before it.

    ``before``: each thread's last call. The kernel restarts a write to the forwarding setting of a namespace
    until it gets the lock of all network settings, and notifies each time: that is one call.
    """
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except FileNotFoundError:  # the thread was killed meanwhile
        return True
    cookie, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    name = names().get(number, str(number))
    what = _object(name, arguments, pid)
    call = number, tuple(arguments)
    restarted = before.get(thread) == call and what.startswith(_RESTARTED)
    before[thread] = call
    try:
        inward = name in WRITING and not restarted and _is_inward(agent, arguments[0], what)
    except ProcessLookupError:  # the agent was killed meanwhile
        return True
    if restarted:
        print(f"= {name} {what}", file=lines)
    elif inward:
        print(f"- {name} {what}", file=lines)
    else:
        mine = control.count()
        print(f"{mine} {name} {what}", file=lines)
        if mine == control.kill_at:
            os.kill(pid, signal.SIGKILL)
            return False
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(listener, _ANSWER, _RESPONSE.pack(cookie, 0, 0, _CONTINUE))
    return True


def _object(name: str, arguments: list[int], pid: int) -> str:
    """Return what the call acts on: a path, a bpf command, or what its descriptor is."""
    if name == "bpf":
        return BPF_COMMANDS[arguments[0]] if arguments[0] < len(BPF_COMMANDS) else str(arguments[0])
    if name in _PATH_ARGUMENT:
        return _string(pid, arguments[_PATH_ARGUMENT[name]])
    try:
        return str(Path(f"/proc/{pid}/fd/{arguments[0]}").readlink())
    except OSError:
        return f"0x{arguments[0]:x}"


def _string(pid: int, address: int) -> str:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        room = mmap.PAGESIZE - address % mmap.PAGESIZE  # the next page may not be there
        read = memory.read(room)
        if b"\0" not in read:
            read += memory.read(mmap.PAGESIZE)
    return os.fsdecode(read.partition(b"\0")[0])


def _is_inward(agent: int, fd: int, what: str) -> bool:
    """Return whether the written data stays in the agent, is its log, or is a reply to a health probe."""
    if fd in {1, 2} or what.startswith(("pipe:", "anon_inode:[eventfd]")):
        return True
    if not what.startswith("socket:"):
        return False
    with socket.socket(fileno=_descriptor_of(agent, fd)) as found:
        if found.family != socket.AF_UNIX:
            return False
        ours = found.getsockname()
        if not ours:  # a pair, or a client: of a pair no other process has the other end
            try:
                return not found.getpeername()
            except OSError:
                return False
        return str(ours).endswith("/cilium.sock")


def _descriptor_of(agent: int, fd: int) -> int:
    """Return a duplicate of another process's descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.syscall(_PIDFD_GETFD[platform.machine()], agent, ctypes.c_int(fd), 0)
    if got < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_getfd {fd}: {os.strerror(ctypes.get_errno())}")
    return int(got)
