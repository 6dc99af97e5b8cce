"""bpf(2) for links of programs: to control groups they are made, replaced, described; to devices, described.

For:    socket load balancing; what another agent attached. Needs: cells.maps.bpf.
Gives:  LinkInfo, attach_cgroup(), replace_program(), detach(), linked_device().
Source: include/uapi/linux/bpf.h (BPF_LINK_CREATE, struct bpf_link_info), kernel/bpf/{cgroup,tcx}.c.
"""

import struct
from pathlib import Path
from typing import Final

import msgspec

from cells.maps.bpf.syscall import buffer, command, object_info, open_pin, sleeping

LINK_CREATE: Final = 28
LINK_UPDATE: Final = 29
LINK_DETACH: Final = 34
_LINK_TYPE_CGROUP: Final = 3
_LINK_TYPES_OF_DEVICES: Final = frozenset({6, 11, 13})
"""BPF_LINK_TYPE_XDP, TCX, NETKIT."""

_CREATE = struct.Struct("<IIII")
_UPDATE = struct.Struct("<IIII")
_INFO = struct.Struct("<III4xQI20x")


class LinkInfo(msgspec.Struct, frozen=True):
    """A link of a program to a control group."""

    id: int
    program: int
    """Its kernel id."""
    cgroup: int
    """Id of the control group, the inode of its directory; 0 once detached."""


def attach_cgroup(program: int, cgroup: int, attach_type: int) -> int:
    """Run the program for every process of the control group beside others' programs; the link's descriptor.

    All arguments are descriptors but the last, one of enum bpf_attach_type. Raises BpfError.
    """
    attr = buffer(_CREATE.pack(program, cgroup, attach_type, 0))
    return command(LINK_CREATE, attr, "attach", f"program fd {program} to a control group", call=sleeping)


def replace_program(link: int, program: int) -> None:
    """Have the link run another program, from one call to the next. Raises BpfError."""
    attr = buffer(_UPDATE.pack(link, program, 0, 0))
    command(LINK_UPDATE, attr, "replace", f"the program of link fd {link}", call=sleeping)


def detach(link: int) -> None:
    """Detach the program, even if others hold the link open or pinned. Raises BpfError."""
    command(LINK_DETACH, buffer(struct.pack("<I", link)), "detach", f"link fd {link}", call=sleeping)


def open_link(path: Path) -> int:
    """A descriptor of what is pinned at ``path``; the caller closes it. Raises BpfError."""
    return open_pin(path)


def link_info(fd: int) -> LinkInfo | None:
    """Describe the link behind ``fd``; None if it is no link to a control group. Raises BpfError."""
    info = buffer(bytes(_INFO.size))
    object_info(fd, info, f"link fd {fd}")
    kind, number, program, cgroup, _ = _INFO.unpack(info.raw)
    return LinkInfo(number, program, cgroup) if kind == _LINK_TYPE_CGROUP else None


def linked_device(fd: int) -> int:
    """Index of the device that the link is at (XDP, tcx, netkit); 0 if it is gone, or it is another link.

    Raises BpfError.
    """
    info = buffer(bytes(_INFO.size))
    object_info(fd, info, f"link fd {fd}")
    kind: int = _INFO.unpack(info.raw)[0]
    return int.from_bytes(info.raw[16:20], "little") if kind in _LINK_TYPES_OF_DEVICES else 0
