"""The control group whose processes are served.

Needs: cgroup v2 mounted somewhere, or CAP_SYS_ADMIN to mount it.   Gives: find_root(), CgroupRoot.
Source: Documentation/admin-guide/cgroup-v2.rst. With version 1 beside it (a hybrid mount) every process is in
        a group of version 2 as well.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

import msgspec

from lifecycle import HiveError

CGROUP2_SUPER_MAGIC: Final = 0x63677270  # linux/magic.h


class CgroupRoot(msgspec.Struct, frozen=True):
    """A control group."""

    path: Path
    id: int
    """The inode of its directory."""
    is_whole: bool
    """Whether every process of the machine is in it."""


def find_root(path: Path) -> CgroupRoot:
    """The control group at ``path``, mounted there if nothing is. Raises HiveError, one line.

    Touches the kernel: for a worker thread.
    """
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if filesystem_type(path) != CGROUP2_SUPER_MAGIC:
            mount_cgroup2(path)
        # The first group alone has no such file; but a container's namespace shows its own as the first.
        return CgroupRoot(path, path.stat().st_ino, not (path / "cgroup.events").exists())
    except OSError as error:
        raise HiveError(
            f"cgroup-root={path} is no control group ({error.strerror}): mount cgroup v2 there, as"
            " hive mount-cgroup does"
        ) from error


def filesystem_type(path: Path) -> int:
    """The f_type of the filesystem, see statfs(2). Raises OSError."""
    answer = (ctypes.c_long * 32)()
    _check(_libc().statfs(os.fsencode(path), answer), path)
    return int(answer[0])


def mount_cgroup2(path: Path) -> None:
    """Mount cgroup v2. Raises OSError; ENOTEMPTY if the directory is somebody's."""
    if any(path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    _check(_libc().mount(b"none", os.fsencode(path), b"cgroup2", ctypes.c_ulong(0), None), path)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, path: Path) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
