"""Which pod a control group is of: socket traces name the process's group by its number alone.

Source: open_by_handle_at(2), whose handle of a group (FILEID_KERNFS) is its number; kubelet's names of them:
        ``kubepods/burstable/pod<uid>``, or ``kubepods-burstable-pod<uid>.slice`` with underscores in the UID.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from functools import lru_cache
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_FILEID_KERNFS = 0xFE
_UID = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?")


def cgroup2_mount(mounts: str) -> str:
    """Where cgroup v2 is mounted, by the text of a mountinfo; empty where it is not."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return before.split()[4]
    return ""


def pod_uid(path: str) -> str:
    """The UID of the pod that a control group's path is of; empty for another group."""
    for part in path.split("/"):
        if part.startswith(("pod", "kubepods")) and (match := _UID.search(part)):
            return match[1].replace("_", "-")
    return ""


@lru_cache(maxsize=4096)
def pod_of_cgroup(number: int) -> str:
    """The UID of the pod with this control group; empty where there is no such group, or it is no pod's."""
    root = cgroup2_mount(MOUNTS.read_text())
    return pod_uid(cgroup_path(root, number)) if root else ""


def cgroup_path(root: str, number: int) -> str:
    """The path of the control group with this number below cgroup v2's mount; empty where there is none."""
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number))
    try:
        mount = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = ctypes.CDLL(None, use_errno=True).open_by_handle_at(mount, handle, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(mount)
    if found < 0:
        return ""
    try:
        return str(Path(f"/proc/self/fd/{found}").readlink())
    finally:
        os.close(found)
