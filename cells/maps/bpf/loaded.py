"""All BPF maps and programs on the system: how many, and how much memory.

For:    metrics. Needs: CAP_SYS_ADMIN. Gives: Loaded, loaded_maps(), loaded_programs().
Source: include/uapi/linux/bpf.h (BPF_MAP_GET_NEXT_ID and others); the memory is ``memlock`` of
        /proc/self/fdinfo, as bpftool shows it.
"""

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cells.maps.bpf.syscall import BpfError, buffer, command

PROG_NEXT_ID: Final = 11
MAP_NEXT_ID: Final = 12
PROG_FD_BY_ID: Final = 13
MAP_FD_BY_ID: Final = 14

_ID = struct.Struct("<III")  # start or id, next_id, open_flags


class Loaded(NamedTuple):
    """Objects of one kind."""

    number: int
    memory: int
    """Bytes, as the kernel charges for them."""


def loaded_maps() -> Loaded:
    """All maps of the system: some 10 µs for each."""
    return _all(MAP_NEXT_ID, MAP_FD_BY_ID)


def loaded_programs() -> Loaded:
    """All programs of the system."""
    return _all(PROG_NEXT_ID, PROG_FD_BY_ID)


def _all(next_id: int, fd_by_id: int) -> Loaded:
    sizes = [size for each in _ids(next_id) if (size := _memory(fd_by_id, each)) is not None]
    return Loaded(len(sizes), sum(sizes))


def _ids(next_id: int) -> Iterator[int]:
    attr = buffer(_ID.pack(0, 0, 0))
    while True:
        try:
            command(next_id, attr, "list", "BPF objects")
        except BpfError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        found = _ID.unpack(attr.raw)[1]
        yield found
        attr = buffer(_ID.pack(found, 0, 0))


def _memory(fd_by_id: int, object_id: int) -> int | None:
    """Bytes one object is charged with; None when it has gone meanwhile."""
    try:
        fd = command(fd_by_id, buffer(_ID.pack(object_id, 0, 0)), "open", f"BPF object id {object_id}")
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    finally:
        os.close(fd)
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("memlock:")), 0)
