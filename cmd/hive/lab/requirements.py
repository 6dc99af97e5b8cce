"""Check whether a lab can work here, by trying namespaces, mounts and BPF in a child process.

Source: bpf(2), unshare(2), mount(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from hive import syscalls

_BPF_CALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
_MAP_CREATE = 0
_ARRAY = 2
ELSEWHERE = "run it on a machine, in a virtual machine, or in a privileged container"


def missing() -> str:
    """Describe in one line what the lab needs and cannot use here; empty if it can work."""
    if os.geteuid() != 0:
        return "the lab makes network namespaces and loads BPF programs: run it as root"
    if not Path("/sys/fs/cgroup").is_dir():
        return f"the lab needs control groups, mounted on /sys/fs/cgroup: {ELSEWHERE}"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            os.write(write, _try_all().encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as output:
        found = output.read()
    _, status = os.waitpid(child, 0)
    return found if status == 0 else f"the lab cannot be tried here: the trial ended with status {status}"


def _try_all() -> str:
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("make network and mount namespaces", _namespaces),
        ("mount in them", lambda: syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)),
        ("mount a BPF filesystem", lambda: syscalls.mount("bpf", "/sys/fs/bpf", "bpf")),
        ("mount a sysfs of its own", lambda: syscalls.mount("sysfs", "/sys", "sysfs")),
        ("make BPF maps", _bpf_map),
    )
    for what, step in steps:
        try:
            step()
        except OSError as error:
            return f"the lab cannot {what} here ({os.strerror(error.errno or 0)}): {ELSEWHERE}"
    return ""


def _namespaces() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWNS)


def _bpf_map() -> None:
    number = _BPF_CALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "bpf")
    attributes = ctypes.create_string_buffer(struct.pack("=IIII", _ARRAY, 4, 4, 1), 128)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _MAP_CREATE, attributes, len(attributes)) < 0:
        raise OSError(ctypes.get_errno(), "bpf")


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"make: {reason}")
