"""bpf(2) itself: one call, its errors, and pins.

For:    maps and programs. Needs: Linux, CAP_BPF. Gives: command(), pin(), BpfError.
Source: include/uapi/linux/bpf.h (union bpf_attr) and kernel/bpf/syscall.c.

Two ways into the kernel. Element operations take about a microsecond, less than handing the GIL to
another thread would, so they keep it (``quick``). Commands that may take long - creation, batches, test
runs, and maps of maps, whose updates wait for RCU - let other threads run (``sleeping``).
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from lifecycle import HiveError

NR_BPF: Final = ctypes.c_long(
    {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}.get(os.uname().machine, -1)
)

OBJ_PIN: Final = 6
OBJ_GET: Final = 7
OBJ_INFO: Final = 15

_PIN = struct.Struct("<QII")
_UNFINISHED = "_new"  # bpffs reserves dots
_INFO = struct.Struct("<IIQ")


class BpfError(OSError, HiveError):
    """A bpf command the kernel refused; ``errno`` says why, the text also which command on what."""

    def __init__(self, code: int, operation: str, what: str) -> None:
        super().__init__(code, os.strerror(code))
        self.operation = operation
        self.what = what

    def __reduce__(self) -> tuple[type[Self], tuple[int, str, str]]:
        return type(self), (self.errno or 0, self.operation, self.what)

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, str(self.errno))
        return f"cannot {self.operation} {self.what}: {self.strerror} ({name})"


def _entry(library: type[ctypes.CDLL]) -> "ctypes._NamedFuncPointer":
    function = library(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


quick = _entry(ctypes.PyDLL)
sleeping = _entry(ctypes.CDLL)


def command(
    number: int,
    attr: ctypes.Array[ctypes.c_char],
    operation: str,
    what: str,
    *,
    call: "ctypes._NamedFuncPointer" = quick,
) -> int:
    """Run one bpf command and return its result; raises BpfError.

    ``attr`` ends with the command's last field: the kernel wants every byte after it to be zero.
    """
    result: int = call(NR_BPF, number, attr, len(attr))
    if result < 0:
        raise BpfError(ctypes.get_errno(), operation, what)
    return result


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    """A writable copy of ``data`` the kernel can be pointed to."""
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


def pin(fd: int, path: Path | str) -> None:
    """Keep a map or program alive under ``path``; BpfError EEXIST if that name is taken."""
    name = buffer(os.fsencode(path) + b"\0")
    command(OBJ_PIN, buffer(_PIN.pack(ctypes.addressof(name), fd, 0)), "pin", str(path))


def replace_pin(fd: int, path: Path) -> None:
    """Pin under ``path``, at once in place of what is pinned there. Cut short, see unpin_unfinished()."""
    fresh = path.with_name(path.name + _UNFINISHED)
    fresh.unlink(missing_ok=True)
    pin(fd, fresh)
    fresh.rename(path)


def unpin_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Remove what a killed process pinned and had no time to put in the place of these names."""
    unfinished = {name + _UNFINISHED for name in names}
    for path in directory.glob("*" + _UNFINISHED):
        if path.name in unfinished:
            unpin(path)


def unpin(path: Path) -> bool:
    """Remove a pin; False if there was none. Programs that use the object keep it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def open_pin(path: Path) -> int:
    """A descriptor of the map or program pinned at ``path``."""
    name = buffer(os.fsencode(path) + b"\0")
    return command(OBJ_GET, buffer(_PIN.pack(ctypes.addressof(name), 0, 0)), "open", str(path))


def object_info(fd: int, info: ctypes.Array[ctypes.c_char], what: str) -> None:
    """Fill ``info`` (struct bpf_map_info or bpf_prog_info) from an open object."""
    command(OBJ_INFO, buffer(_INFO.pack(fd, len(info), ctypes.addressof(info))), "inspect", what)
