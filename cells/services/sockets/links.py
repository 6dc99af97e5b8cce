"""BPF links of the socket programs: load, attach to the root cgroup, pin, replace and detach.

``KernelSocketHooks`` uses them. A pinned link outlives the agent, and a new build replaces its program
atomically, so every socket call runs one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from cells.datapath.libbpf import LoadedObject
from cells.maps.bpf import (
    BpfError,
    CgroupLinkInfo,
    attach_cgroup,
    link_info,
    open_link,
    program_by_id,
    program_info,
    program_name,
    replace_pin,
    replace_program,
    unpin_unfinished,
)
from cells.maps.bpf import detach as detach_link
from cells.maps.map import Map
from lifecycle import HiveError

# The control group with the processes to serve.
#
# Source: Documentation/admin-guide/cgroup-v2.rst. With version 1 mounted, too (a hybrid mount), every process
#         is still in a group of version 2.

CGROUP2_SUPER_MAGIC: Final = 0x63677270  # linux/magic.h


class CgroupRoot(msgspec.Struct, frozen=True):
    """A control group."""

    path: Path
    id: int
    """The inode of its directory."""
    is_whole: bool
    """Whether every process of the machine is in it."""


def find_root(path: Path) -> CgroupRoot:
    """Return the cgroup at ``path``; mount cgroup v2 there if necessary.

    Raises HiveError with one line. Blocking system calls: run in a worker thread.
    """
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if filesystem_type(path) != CGROUP2_SUPER_MAGIC:
            mount_cgroup2(path)
        # Only the machine's root group lacks the file; the root of a container's cgroup namespace has it.
        return CgroupRoot(path, path.stat().st_ino, not (path / "cgroup.events").exists())
    except OSError as error:
        raise HiveError(
            f"cgroup-root={path} is not a control group ({error.strerror}): mount cgroup v2 there, as"
            " hive mount-cgroup does"
        ) from error


def filesystem_type(path: Path) -> int:
    """Return the filesystem's f_type, see statfs(2). Raises OSError."""
    answer = (ctypes.c_long * 32)()
    _check(_libc().statfs(os.fsencode(path), answer), path)
    return int(answer[0])


def mount_cgroup2(path: Path) -> None:
    """Mount cgroup v2. Raises OSError; ENOTEMPTY if the directory is in use."""
    if any(path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    _check(_libc().mount(b"none", os.fsencode(path), b"cgroup2", ctypes.c_ulong(0), None), path)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, path: Path) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


HOOKS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "cil_sock4_connect": 10,
        "cil_sock6_connect": 11,
        "cil_sock4_post_bind": 12,
        "cil_sock6_post_bind": 13,
        "cil_sock4_sendmsg": 14,
        "cil_sock6_sendmsg": 15,
        "cil_sock4_recvmsg": 19,
        "cil_sock6_recvmsg": 20,
        "cil_sock4_getpeername": 29,
        "cil_sock6_getpeername": 30,
        "cil_sock_release": 34,
    }
)
"""Programs, and their hooks as numbers of enum bpf_attach_type."""


class SocketPrograms:
    """The links of this node. For one worker thread at a time; methods raise BpfError and LoadError."""

    def __init__(self, pins: Path, data: bytes, tables: Collection[Map]) -> None:
        self._pins = pins
        self._data = data
        self._tables = {table.spec.name: table for table in tables}
        self._links: dict[str, int] = {}

    def attach(self, root: CgroupRoot) -> list[str]:
        """Attach the programs to every hook of the cgroup; return the names of changed links.

        Up-to-date links are not touched.
        """
        self._pins.mkdir(mode=0o755, parents=True, exist_ok=True)
        unpin_unfinished(self._pins, HOOKS)
        with LoadedObject(self._data, "sock.o") as loaded:
            loaded.use_maps({name: table.fd for name, table in self._tables.items()})
            loaded.load()
            loaded.expect(HOOKS)
            fresh = loaded.programs()
            group = os.open(root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return [name for name in HOOKS if self._attach_one(name, fresh[name], group, root.id)]
            finally:
                os.close(group)

    def missing(self, root: CgroupRoot) -> list[str]:
        """Return the names of links that were detached, unpinned or replaced since :meth:`attach`."""
        return [name for name in HOOKS if not self._is_current(name, root)]

    def close(self) -> None:
        """Close the descriptors; pinned programs stay attached."""
        for descriptor in self._links.values():
            os.close(descriptor)
        self._links.clear()

    def _attach_one(self, name: str, program: int, group: int, group_id: int) -> bool:
        """Attach one program; return whether anything changed."""
        path = self._pins / name
        link = self._links.pop(name, None)
        if link is None:
            link = _open(path)
        info = None if link is None else link_info(link)
        if link is not None and info is not None and info.cgroup == group_id:
            self._links[name] = link
            changed = not _runs(info, program, self._tables.values())
            if changed:
                replace_program(link, program)
            if not _pinned(path, info.id):
                replace_pin(link, path)
                changed = True
            return changed
        previous, link = link, attach_cgroup(program, group, HOOKS[name])
        self._links[name] = link
        replace_pin(link, path)
        if previous is not None:
            try:
                if info is not None:
                    # An unreferenced link is detached only some time later, and would serve clients there.
                    detach_link(previous)
            finally:
                os.close(previous)
        return True

    def _is_current(self, name: str, root: CgroupRoot) -> bool:
        link = self._links.get(name)
        info = None if link is None else link_info(link)
        if info is None or info.cgroup != root.id or not _pinned(self._pins / name, info.id):
            return False
        return program_name(info.program) == name[:15]


def detach_all(pins: Path) -> list[str]:
    """Detach all programs and remove their pins; return their names. Raises OSError."""
    found = [name for name in HOOKS if (pins / name).exists()]
    for name in found:
        link = _open(pins / name)
        if link is not None:
            try:
                detach_link(link)
            finally:
                os.close(link)
        (pins / name).unlink(missing_ok=True)
    return found


def _open(path: Path) -> int | None:
    try:
        return open_link(path)
    except BpfError:  # nothing or something else is pinned: it will be replaced
        return None


def _pinned(path: Path, number: int) -> bool:
    link = _open(path)
    if link is None:
        return False
    try:
        info = link_info(link)
        return info is not None and info.id == number
    finally:
        os.close(link)


def _runs(info: CgroupLinkInfo, program: int, tables: Collection[Map]) -> bool:
    """Whether the link runs this program with these maps."""
    try:
        current = program_by_id(info.program)
    except BpfError:
        return False
    try:
        was, is_ = program_info(current), program_info(program)
    finally:
        os.close(current)
    known = {table.id for table in tables}  # each load has its own maps for constants
    return (was.tag, was.name, known & {*was.map_ids}) == (is_.tag, is_.name, known & {*is_.map_ids})
