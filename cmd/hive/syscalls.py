"""System calls about namespaces and mounts that Python 3.11 lacks.

Source: unshare(2), setns(2), mount(2), umount2(2), statfs(2), netdevice(7).
"""

import ctypes
import fcntl
import os
import socket
import struct
from functools import cache
from pathlib import Path

CLONE_FS = 0x0000_0200
CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20

MNT_DETACH = 0x2

BPF_FS_MAGIC = 0xCAFE4A11  # linux/magic.h
CGROUP2_SUPER_MAGIC = 0x63677270

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ_FLAGS = struct.Struct("16sh22x")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces. Raises OSError."""
    _check(_libc().unshare(ctypes.c_int(flags)), f"unshare 0x{flags:x}")


def setns(fd: int, flags: int = 0) -> None:
    """Move the calling thread into the namespace of `fd`. Raises OSError."""
    _check(_libc().setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: Path | str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError that names source and target."""
    result = _libc().mount(
        source.encode(),
        os.fsencode(target),
        fstype.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, f"mount {fstype or source} on {target}")


def unmount(target: Path | str, flags: int = 0) -> None:
    """umount2(2). Raises OSError that names the target."""
    _check(_libc().umount2(os.fsencode(target), ctypes.c_int(flags)), f"unmount {target}")


def filesystem_type(path: Path | str) -> int:
    """Return the f_type of a path's filesystem, see statfs(2). Raises OSError."""
    answer = (ctypes.c_long * 32)()
    _check(_libc().statfs(os.fsencode(path), ctypes.byref(answer)), f"statfs {path}")
    return answer[0] & 0xFFFFFFFF


def set_loopback_up() -> None:
    """Set ``lo`` up in the current network namespace, since new ones have it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, _IFREQ_FLAGS.pack(b"lo", 0))
        _, flags = _IFREQ_FLAGS.unpack(answer)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _IFREQ_FLAGS.pack(b"lo", flags | _IFF_UP))
