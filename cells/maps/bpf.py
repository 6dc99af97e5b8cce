"""bpf(2) for maps, programs and links: create, pin, open, describe, run."""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final, Self, overload

import msgspec
from msgspec.structs import replace

from lifecycle import HiveError

__all__ = [
    "EVERY_FLOW",
    "BpfError",
    "CgroupLinkInfo",
    "MapSpec",
    "MapType",
    "PackedColumn",
    "ProgramInfo",
    "TestRun",
    "attach_cgroup",
    "detach",
    "joined",
    "link_info",
    "linked_device",
    "open_link",
    "open_program",
    "pin",
    "program_by_id",
    "program_info",
    "program_name",
    "replace_pin",
    "replace_program",
    "run_program",
    "test_run",
    "unpin",
    "unpin_unfinished",
]


# Map types and attributes.


class MapType(IntEnum):
    """enum bpf_map_type, up to BPF_MAP_TYPE_ARENA."""

    HASH = 1
    ARRAY = 2
    PROG_ARRAY = 3
    PERF_EVENT_ARRAY = 4
    PERCPU_HASH = 5
    PERCPU_ARRAY = 6
    STACK_TRACE = 7
    CGROUP_ARRAY = 8
    LRU_HASH = 9
    LRU_PERCPU_HASH = 10
    LPM_TRIE = 11
    ARRAY_OF_MAPS = 12
    HASH_OF_MAPS = 13
    DEVMAP = 14
    SOCKMAP = 15
    CPUMAP = 16
    XSKMAP = 17
    SOCKHASH = 18
    CGROUP_STORAGE = 19
    REUSEPORT_SOCKARRAY = 20
    PERCPU_CGROUP_STORAGE = 21
    QUEUE = 22
    STACK = 23
    SK_STORAGE = 24
    DEVMAP_HASH = 25
    STRUCT_OPS = 26
    RINGBUF = 27
    INODE_STORAGE = 28
    TASK_STORAGE = 29
    BLOOM_FILTER = 30
    USER_RINGBUF = 31
    CGRP_STORAGE = 32
    ARENA = 33


EVERY_FLOW: Final = 0
"""For MapSpec.invalidates: a change of any entry invalidates the cached verdicts of all flows."""


class MapSpec(msgspec.Struct, frozen=True):
    """Attributes of a map. Sizes in bytes; the kernel shows only the first 15 characters of ``name``."""

    name: str
    type: MapType
    key_size: int
    value_size: int
    max_entries: int
    flags: int = 0
    inner: "MapSpec | None" = None
    """For a map of maps: the attributes of its inner maps. The kernel does not report them."""
    invalidates: int | Callable[[bytes], int] | None = None
    """The cached verdicts that a change of an entry invalidates.

    EVERY_FLOW, those of the endpoint with this id, or those of the endpoint that the function reads from the
    previous value; None: no verdict depends on the map. Only the agent uses it.
    """

    def __str__(self) -> str:
        kind = self.type.name.lower()
        sizes = f"key {self.key_size} B value {self.value_size} B max {self.max_entries}"
        return f"{kind} {sizes} flags {self.flags:#x}"

    def same_as(self, other: "MapSpec") -> bool:
        """Whether type, sizes and flags are equal, so that a map made from ``other`` can be used."""
        return replace(self, name="", inner=None, invalidates=None) == replace(
            other, name="", inner=None, invalidates=None
        )


@cache
def possible_cpus() -> int:
    """The number of values per key in a per-CPU map; it can exceed the number of online CPUs."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(text.strip().replace(",", "-").rsplit("-", 1)[-1]) + 1


# bpf(2): the system call, its errors, and pins.
#
# Source: include/uapi/linux/bpf.h (union bpf_attr) and kernel/bpf/syscall.c.
#
# Operations on one entry take about a microsecond, less than a change of threads, so they keep the GIL
# (``quick``). Slow commands release it (``sleeping``): creation, batches, test runs, and updates of maps of
# maps, which wait for RCU.

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
    """Raised when the kernel refuses a bpf command.

    ``errno`` is the reason; the text also names command and object.
    """

    def __init__(self, code: int, operation: str, what: str) -> None:
        super().__init__(code, os.strerror(code))
        self.operation = operation
        self.what = what

    def __reduce__(self) -> tuple[type[Self], tuple[int, str, str]]:
        return type(self), (self.errno or 0, self.operation, self.what)

    @property
    def is_full(self) -> bool:
        """Whether the map is full: the kernel returns E2BIG for a hash and ENOSPC for a trie."""
        return self.operation == "update" and self.errno in {errno.E2BIG, errno.ENOSPC}

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, str(self.errno))
        reason = "it is full" if self.is_full else self.strerror
        return f"cannot {self.operation} {self.what}: {reason} ({name})"


def _entry(library: type[ctypes.CDLL]) -> "ctypes._NamedFuncPointer":
    function = library(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


quick = _entry(ctypes.PyDLL)
sleeping = _entry(ctypes.CDLL)
Syscall = Callable[..., int]
_measured: list[tuple[Syscall, Syscall]] = []


def measure(wrap: Callable[[Syscall], Syscall] | None) -> None:
    """Wrap the system calls of all maps that are opened from now on, and of commands; None: no longer."""
    _measured[:] = [(call, wrap(call)) for call in (quick, sleeping)] if wrap is not None else []


def measured(call: Syscall) -> Syscall:
    """A system call with its wrapper, if there is one."""
    return next((wrapped for plain, wrapped in _measured if plain is call), call) if _measured else call


def command(
    number: int,
    attr: ctypes.Array[ctypes.c_char],
    operation: str,
    what: str,
    *,
    call: "ctypes._NamedFuncPointer" = quick,
) -> int:
    """Run one bpf command and return its result. Raises BpfError.

    ``attr`` must end with the command's last field: the kernel requires zeros after it.
    """
    result: int = measured(call)(NR_BPF, number, attr, len(attr))
    if result < 0:
        raise BpfError(ctypes.get_errno(), operation, what)
    return result


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    """A writable copy of ``data`` with a stable address, for the kernel."""
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


class PackedColumn(Sequence[bytes]):
    """Keys or values of one size in one bytes object, for many entries."""

    __slots__ = ("joined", "size")

    def __init__(self, joined: bytes, size: int) -> None:
        self.joined = joined
        self.size = size

    def __len__(self) -> int:
        return len(self.joined) // self.size

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        return list(self)[at]

    def __iter__(self) -> Iterator[bytes]:
        size = self.size
        return (self.joined[first : first + size] for first in range(0, len(self.joined), size))


def joined(entries: Sequence[bytes]) -> bytes:
    """The concatenated keys or values."""
    return entries.joined if isinstance(entries, PackedColumn) else b"".join(entries)


def pin(fd: int, path: Path | str) -> None:
    """Pin a map or program at ``path``. Raises BpfError, EEXIST if the path exists."""
    name = buffer(os.fsencode(path) + b"\0")
    command(OBJ_PIN, buffer(_PIN.pack(ctypes.addressof(name), fd, 0)), "pin", str(path))


def replace_pin(fd: int, path: Path) -> None:
    """Pin at ``path`` and atomically replace an earlier pin.

    A killed process can leave a temporary pin: see unpin_unfinished().
    """
    fresh = path.with_name(path.name + _UNFINISHED)
    fresh.unlink(missing_ok=True)
    pin(fd, fresh)
    fresh.rename(path)


def unpin_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Remove temporary pins that a killed replace_pin() left for these names."""
    unfinished = {name + _UNFINISHED for name in names}
    for path in directory.glob("*" + _UNFINISHED):
        if path.name in unfinished:
            unpin(path)


def unpin(path: Path) -> bool:
    """Remove a pin; False if it does not exist. Programs that use the object keep it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def open_pin(path: Path) -> int:
    """Open the map or program pinned at ``path``; returns its descriptor."""
    name = buffer(os.fsencode(path) + b"\0")
    return command(OBJ_GET, buffer(_PIN.pack(ctypes.addressof(name), 0, 0)), "open", str(path))


def object_info(fd: int, info: ctypes.Array[ctypes.c_char], what: str) -> None:
    """Fill ``info`` (struct bpf_map_info or bpf_prog_info) for an open object."""
    command(OBJ_INFO, buffer(_INFO.pack(fd, len(info), ctypes.addressof(info))), "inspect", what)


# bpf(2) for loaded programs: open, describe, and run on a packet without an interface.
#
# Source: include/uapi/linux/bpf.h; net/bpf/test_run.c (bpf_prog_test_run_skb, bpf_prog_test_run_syscall).

PROG_TEST_RUN: Final = 10
PROG_FD_BY_ID: Final = 13

_PROG_INFO = struct.Struct("<II8sIIQQQIIQ16s")
_TEST_RUN = struct.Struct("<IIIIQQIIIIQQIII")
_SKB_SIZE = 192  # struct __sk_buff
_SKB_IFINDEX = 40
_ROOM = 512  # bytes by which a program may lengthen the packet


class ProgramInfo(msgspec.Struct, frozen=True):
    """A loaded program.

    ``tag`` is the kernel's digest of the instructions; ``load_time`` is in ns since boot.
    """

    id: int
    tag: str
    name: str
    load_time: int
    map_ids: tuple[int, ...]


class TestRun(msgspec.Struct, frozen=True):
    """The result of a test run. ``retval`` is signed (TC_ACT_UNSPEC is -1); ``duration_ns`` is per run."""

    __test__ = False  # not a class of tests

    retval: int
    packet: bytes
    duration_ns: int
    ctx_out: bytes


def open_program(path: Path) -> int:
    """Open the program pinned at ``path``; the caller closes the descriptor."""
    return open_pin(path)


def program_by_id(id: int) -> int:  # noqa: A002  (the kernel's word)
    """Open the program with this kernel id; the caller closes the descriptor."""
    return command(PROG_FD_BY_ID, buffer(struct.pack("<III", id, 0, 0)), "open", f"program id {id}")


def program_name(id: int) -> str | None:  # noqa: A002  (as above)
    """Name of the loaded program with this id, at most 15 characters; None if it is unloaded.

    Raises BpfError.
    """
    try:
        descriptor = program_by_id(id)
    except BpfError as error:
        if error.errno != errno.ENOENT:  # ENOENT: unloaded in the meantime
            raise
        return None
    try:
        return program_info(descriptor).name
    finally:
        os.close(descriptor)


def program_info(fd: int) -> ProgramInfo:
    """Describe the program of descriptor ``fd``."""
    room = 64
    while True:
        ids = (ctypes.c_uint32 * room)()
        blank = _PROG_INFO.pack(0, 0, b"", 0, 0, 0, 0, 0, 0, room, ctypes.addressof(ids), b"")
        info = buffer(blank)
        object_info(fd, info, f"program fd {fd}")
        _, id_, tag, _, _, _, _, load_time, _, count, _, name = _PROG_INFO.unpack(info.raw)
        if count <= room:
            text = name.rstrip(b"\0").decode(errors="replace")
            return ProgramInfo(id_, tag.hex(), text, load_time, tuple(ids[:count]))
        room = count


def test_run(
    fd: int,
    packet: bytes,
    *,
    ifindex: int = 0,  # noqa: PT028  (the kernel's name for the command; not a test)
    repeat: int = 1,  # noqa: PT028
    ctx_in: bytes | None = None,  # noqa: PT028
) -> TestRun:
    """Run a tc program on an Ethernet frame; BpfError EINVAL for frames shorter than 14 bytes.

    ``ifindex`` is the interface the frame seems to come from (of this network namespace; 0: none).
    ``ctx_in`` is a struct __sk_buff where only mark, priority, ifindex, cb, tstamp and GSO fields may be set.
    """
    context = bytearray(ctx_in or bytes(_SKB_SIZE if ifindex else 0))
    if ifindex:
        struct.pack_into("<I", context, _SKB_IFINDEX, ifindex)
    given, given_context = buffer(packet), buffer(bytes(context))
    got, got_context = (
        ctypes.create_string_buffer(len(packet) + _ROOM),
        ctypes.create_string_buffer(_SKB_SIZE),
    )
    at_given, at_got, at_context, at_got_context = map(
        ctypes.addressof, (given, got, given_context, got_context)
    )
    attr = buffer(
        _TEST_RUN.pack(
            *(fd, 0, len(packet), len(got), at_given, at_got, repeat, 0),
            *(len(context), len(got_context), at_context if context else 0, at_got_context, 0, 0, 0),
        )
    )
    what = f"program fd {fd} on a packet of {len(packet)} bytes"
    command(PROG_TEST_RUN, attr, "run", what, call=sleeping)
    fields = _TEST_RUN.unpack(attr.raw)
    retval, size, duration, context_size = fields[1], fields[3], fields[7], fields[9]
    signed = retval - (1 << 32) if retval >= 1 << 31 else retval
    return TestRun(signed, got.raw[:size], duration, got_context.raw[:context_size])


def run_program(fd: int, context: bytes) -> bytes:
    """Run a program of type ``syscall`` without the GIL; returns its context afterwards.

    Raises BpfError, also for an error that the program returns.
    """
    given = buffer(context)
    attr = buffer(_TEST_RUN.pack(fd, *(0,) * 7, len(given), 0, ctypes.addressof(given), *(0,) * 4))
    what = f"program fd {fd}"
    command(PROG_TEST_RUN, attr, "run", what, call=sleeping)
    retval: int = _TEST_RUN.unpack(attr.raw)[1]
    if retval:
        raise BpfError((1 << 32) - retval, "run", what)
    return given.raw


# bpf(2) for links: create, update and describe those to control groups, describe those to devices.
#
# Source: include/uapi/linux/bpf.h (BPF_LINK_CREATE, struct bpf_link_info), kernel/bpf/{cgroup,tcx}.c.

LINK_CREATE: Final = 28
LINK_UPDATE: Final = 29
LINK_DETACH: Final = 34
_LINK_TYPE_CGROUP: Final = 3
_LINK_TYPES_OF_DEVICES: Final = frozenset({6, 11, 13})
"""BPF_LINK_TYPE_XDP, TCX, NETKIT."""

_CREATE = struct.Struct("<IIII")
_UPDATE = struct.Struct("<IIII")
_LINK_INFO = struct.Struct("<III4xQI20x")


class CgroupLinkInfo(msgspec.Struct, frozen=True):
    """A link that attaches a program to a control group."""

    id: int
    program: int
    """Kernel id of the program."""
    cgroup: int
    """Id of the control group (its directory's inode); 0 if the link is detached."""


def attach_cgroup(program: int, cgroup: int, attach_type: int) -> int:
    """Attach a program to a control group beside other programs; returns the link's descriptor.

    ``program`` and ``cgroup`` are descriptors; ``attach_type`` is one of enum bpf_attach_type. Raises
    BpfError.
    """
    attr = buffer(_CREATE.pack(program, cgroup, attach_type, 0))
    return command(LINK_CREATE, attr, "attach", f"program fd {program} to a control group", call=sleeping)


def replace_program(link: int, program: int) -> None:
    """Atomically replace the link's program. Raises BpfError."""
    attr = buffer(_UPDATE.pack(link, program, 0, 0))
    command(LINK_UPDATE, attr, "replace", f"the program of link fd {link}", call=sleeping)


def detach(link: int) -> None:
    """Detach the link's program, even if the link is open or pinned elsewhere. Raises BpfError."""
    command(LINK_DETACH, buffer(struct.pack("<I", link)), "detach", f"link fd {link}", call=sleeping)


def open_link(path: Path) -> int:
    """Open the link pinned at ``path``; the caller closes the descriptor. Raises BpfError."""
    return open_pin(path)


def link_info(fd: int) -> CgroupLinkInfo | None:
    """Describe the link of descriptor ``fd``; None if it does not attach to a control group.

    Raises BpfError.
    """
    info = buffer(bytes(_LINK_INFO.size))
    object_info(fd, info, f"link fd {fd}")
    kind, number, program, cgroup, _ = _LINK_INFO.unpack(info.raw)
    return CgroupLinkInfo(number, program, cgroup) if kind == _LINK_TYPE_CGROUP else None


def linked_device(fd: int) -> int:
    """Index of the link's device (XDP, tcx, netkit); 0 if it does not exist, or for other links.

    Raises BpfError.
    """
    info = buffer(bytes(_LINK_INFO.size))
    object_info(fd, info, f"link fd {fd}")
    kind: int = _LINK_INFO.unpack(info.raw)[0]
    return int.from_bytes(info.raw[16:20], "little") if kind in _LINK_TYPES_OF_DEVICES else 0
