"""Loaded programs, described and run."""

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cells.maps.bpf import (
    BpfError,
    buffer,
    command,
    open_program,
    pin,
    program_by_id,
    program_info,
    program_name,
)
from cells.maps.bpf import (
    test_run as run_program,
)
from tests.support.namespaces import in_node, need_root

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

PROG_LOAD = 5
SCHED_CLS = 3


def load(*instructions: bytes) -> int:
    """A tc program of these instructions (the datapath's loader is libbpf; this needs no object)."""
    code, licence = buffer(b"".join(instructions)), buffer(b"GPL\0")
    at_code, at_licence = ctypes.addressof(code), ctypes.addressof(licence)
    fields = struct.pack(
        "<IIQQIIQII16s", SCHED_CLS, len(instructions), at_code, at_licence, 0, 0, 0, 0, 0, b"cil_test"
    )
    return command(PROG_LOAD, buffer(fields), "load", "program cil_test")


def mov(register: int, value: int) -> bytes:
    return struct.pack("<BBhi", 0xB7, register, 0, value)


def load_word(register: int, source: int, offset: int) -> bytes:
    return struct.pack("<BBhi", 0x61, register | source << 4, offset, 0)


EXIT = struct.pack("<BBhi", 0x95, 0, 0, 0)


@pytest.fixture
def shot() -> Iterator[int]:
    need_root()
    fd = load(mov(0, 2), EXIT)
    yield fd
    os.close(fd)


def test_a_program_is_described(shot: int) -> None:
    info = program_info(shot)
    assert (info.name, info.map_ids, len(info.tag)) == ("cil_test", (), 16)
    assert info.load_time > 0
    again = program_by_id(info.id)
    assert program_info(again) == info
    os.close(again)


def test_a_program_is_named_by_its_id(shot: int) -> None:
    assert program_name(program_info(shot).id) == "cil_test"


def test_an_id_of_no_program_has_no_name() -> None:
    need_root()
    assert program_name(2**31 - 1) is None  # the kernel's ids end below it


def test_a_failed_program_query_raises_its_error_and_does_not_mean_absent(shot: int) -> None:
    """Out of descriptors: else a dispatcher of ours would pass for someone else's."""
    number = program_info(shot).id
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(BpfError) as raised:
            program_name(number)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.errno == errno.EMFILE


def test_a_program_runs_on_a_packet(shot: int) -> None:
    frame = bytes(12) + b"\x08\x00" + bytes(50)
    run = run_program(shot, frame, repeat=10)
    assert (run.retval, run.packet) == (2, frame)


def test_a_negative_verdict_is_negative() -> None:
    need_root()
    fd = load(mov(0, -1), EXIT)
    assert run_program(fd, bytes(64)).retval == -1
    os.close(fd)


def test_the_packet_seems_to_come_from_the_given_interface(in_node: None) -> None:
    os.system("ip link add hive0 index 77 type veth peer name hive1")  # noqa: S605
    fd = load(load_word(0, 1, 40), EXIT)  # r0 = skb->ifindex
    assert run_program(fd, bytes(64), ifindex=77).retval == 77


def test_a_frame_too_short_is_refused_by_name(shot: int) -> None:
    with pytest.raises(BpfError, match="on a packet of 3 bytes: Invalid argument"):
        run_program(shot, b"abc")


def test_a_pinned_program_opens_by_its_path(in_node: None) -> None:
    path = Path("/sys/fs/bpf/cil_test")
    fd = load(mov(0, 0), EXIT)
    pin(fd, path)
    again = open_program(path)
    assert program_info(again) == program_info(fd)
