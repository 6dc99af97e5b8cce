"""bpf(2) for loaded programs: open, describe, and run one on a packet without any interface.

For:    the datapath's loader and self-check, and tests. Needs: cells.maps.bpf. Gives: ProgramInfo, TestRun.
Source: include/uapi/linux/bpf.h; net/bpf/test_run.c (bpf_prog_test_run_skb, bpf_prog_test_run_syscall).
"""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from cells.maps.bpf.syscall import BpfError, buffer, command, object_info, open_pin, sleeping

PROG_TEST_RUN: Final = 10
PROG_FD_BY_ID: Final = 13

_PROG_INFO = struct.Struct("<II8sIIQQQIIQ16s")
_TEST_RUN = struct.Struct("<IIIIQQIIIIQQIII")
_SKB_SIZE = 192  # struct __sk_buff
_SKB_IFINDEX = 40
_ROOM = 512  # how much longer a packet may have become


class ProgramInfo(msgspec.Struct, frozen=True):
    """A loaded program. ``tag`` is the kernel's digest of its instructions; ``load_time`` ns since boot."""

    id: int
    tag: str
    name: str
    load_time: int
    map_ids: tuple[int, ...]


class TestRun(msgspec.Struct, frozen=True):
    """What a program did with a packet. ``retval`` is signed (TC_ACT_UNSPEC is -1); the time is per run."""

    __test__ = False  # not a class of tests

    retval: int
    packet: bytes
    duration_ns: int
    ctx_out: bytes


def open_program(path: Path) -> int:
    """A descriptor of the program pinned at ``path``; the caller closes it."""
    return open_pin(path)


def program_by_id(id: int) -> int:  # noqa: A002  (the kernel's word)
    """A descriptor of the program with this kernel id; the caller closes it."""
    return command(PROG_FD_BY_ID, buffer(struct.pack("<III", id, 0, 0)), "open", f"program id {id}")


def program_name(id: int) -> str | None:  # noqa: A002  (as above)
    """Name of the loaded program with this id, at most 15 characters; None if there is none. BpfError."""
    try:
        descriptor = program_by_id(id)
    except BpfError as error:
        if error.errno != errno.ENOENT:  # else unloaded meanwhile
            raise
        return None
    try:
        return program_info(descriptor).name
    finally:
        os.close(descriptor)


def program_info(fd: int) -> ProgramInfo:
    """Describe the program behind ``fd``."""
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
    """Run a program of type ``syscall``, outside the interpreter's lock; its context as it leaves it.

    Raises BpfError, also with the error that the program returns.
    """
    given = buffer(context)
    attr = buffer(_TEST_RUN.pack(fd, *(0,) * 7, len(given), 0, ctypes.addressof(given), *(0,) * 4))
    what = f"program fd {fd}"
    command(PROG_TEST_RUN, attr, "run", what, call=sleeping)
    retval: int = _TEST_RUN.unpack(attr.raw)[1]
    if retval:
        raise BpfError((1 << 32) - retval, "run", what)
    return given.raw
