"""Reads all CPUs' buffers of a perf event array on the event loop."""

import asyncio
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cells.maps.map import Map, map_by_id
from cells.observe.events.records import Lost, Sample
from lifecycle import HiveError

# One CPU's buffer of perf events: opened, mapped, read.
#
# Source: perf_event_open(2), include/uapi/linux/perf_event.h, kernel/events/ring_buffer.c.
#
# The kernel writes and moves the head, we read and move the tail. When the buffer is full the kernel drops
# what comes, counts it, and reports how much that was once it can write again.

_NR_PERF_EVENT_OPEN: Final = {
    "x86_64": 298,
    "aarch64": 241,
    "riscv64": 241,
    "s390x": 331,
    "ppc64le": 319,
}.get(os.uname().machine, -1)

_TYPE_SOFTWARE: Final = 1
_COUNT_BPF_OUTPUT: Final = 10
_SAMPLE_RAW: Final = 1 << 10
_CLOEXEC: Final = 1 << 3
_ATTR: Final = struct.Struct("<IIQQQQQIIQ")  # up to config1: PERF_ATTR_SIZE_VER0 and 8 more

_HEAD_AND_TAIL: Final = slice(1024, 1040)  # of struct perf_event_mmap_page
_HEADER: Final = struct.Struct("<IHH")  # type, misc, size of the record with this header
_RAW_SIZE: Final = struct.Struct("<I")
_LOST: Final = struct.Struct("<QQ")  # id, how many
_RECORD_LOST: Final = 2
_RECORD_SAMPLE: Final = 9

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class RingError(HiveError):
    """The kernel provides no buffer for a CPU; ``errno`` has the reason."""

    def __init__(self, code: int, cpu: int) -> None:
        super().__init__(f"cannot read the datapath's events of CPU {cpu}: {os.strerror(code)}")
        self.errno = code


def online_cpus() -> list[int]:
    """Numbers of the online CPUs."""
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class Ring:
    """A buffer of ``pages`` pages (a power of two) for the output of eBPF programs on one CPU."""

    def __init__(self, cpu: int, pages: int) -> None:
        self.cpu = cpu
        self.fd = _open(cpu)
        self._size = pages * mmap.PAGESIZE
        try:
            self._memory = mmap.mmap(self.fd, mmap.PAGESIZE + self._size)
        except OSError as error:
            os.close(self.fd)
            raise RingError(error.errno or 0, cpu) from error
        whole = memoryview(self._memory)
        self._ends = whole[_HEAD_AND_TAIL].cast("Q")
        self._data = whole[mmap.PAGESIZE :]
        whole.release()

    def close(self) -> None:
        """Release the buffer."""
        self._ends.release()
        self._data.release()
        self._memory.close()
        os.close(self.fd)

    def read(self, most: int) -> list[bytes | int]:
        """Read at most ``most`` records, oldest first: the bytes of a sample, or the number of lost samples.

        Fewer than ``most`` means that the buffer was empty; the descriptor becomes readable when it is not.
        """
        head, tail = self._ends
        taken: list[bytes | int] = []
        while tail != head and len(taken) < most:
            kind, _, size = _HEADER.unpack(self._at(tail, _HEADER.size))
            record = self._at(tail + _HEADER.size, size - _HEADER.size)
            tail += size
            if kind == _RECORD_SAMPLE:
                (length,) = _RAW_SIZE.unpack_from(record)
                taken.append(record[_RAW_SIZE.size : _RAW_SIZE.size + length])
            elif kind == _RECORD_LOST:
                taken.append(_LOST.unpack_from(record)[1])
        self._ends[1] = tail
        return taken

    def _at(self, position: int, length: int) -> bytes:
        """Bytes at a position, counted from the first byte ever written; the buffer wraps around."""
        start = position % self._size
        first = bytes(self._data[start : start + length])
        return first if len(first) == length else first + bytes(self._data[: length - len(first)])


def _open(cpu: int) -> int:
    size = _ATTR.size
    # Wake the reader for each event: one that comes alone must not wait for others.
    attr = _ATTR.pack(_TYPE_SOFTWARE, size, _COUNT_BPF_OUTPUT, 1, _SAMPLE_RAW, 0, 0, 1, 0, 0)
    number, everyone, no_group = (ctypes.c_long(n) for n in (_NR_PERF_EVENT_OPEN, -1, -1))
    fd: int = _syscall(number, attr, everyone, ctypes.c_long(cpu), no_group, ctypes.c_long(_CLOEXEC))
    if fd < 0:
        raise RingError(ctypes.get_errno(), cpu)
    return fd


AT_ONCE: Final = 256
"""Maximum number of records that are read from one buffer before other work: some two milliseconds."""


class Reader:
    """Attached to the map from its creation until it is closed. Belongs to the running event loop."""

    def __init__(self, table: Map, pages: int, publish: Callable[[Sample | Lost], None]) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._rings: list[Ring] = []
        # Opened separately: the kernel removes the entries that were added through a descriptor when that
        # is closed. So only ours are removed, also if the agent is killed.
        self._table = map_by_id(table.id, writable=True)
        try:
            for cpu in online_cpus():
                self._attach(cpu, pages)
        except BaseException:
            self.close()
            raise

    def _attach(self, cpu: int, pages: int) -> None:
        try:
            ring = Ring(cpu, pages)
        except RingError as error:
            if error.errno == errno.ENODEV:  # went offline meanwhile
                return
            raise
        self._rings.append(ring)
        self._table.update(struct.pack("<I", cpu), struct.pack("<I", ring.fd))
        self._loop.add_reader(ring.fd, self._drain, ring)

    def _drain(self, ring: Ring) -> None:
        if ring not in self._rings:  # closed while this was waiting for its turn
            return
        taken = ring.read(AT_ONCE)
        for each in taken:
            self._publish(Sample(ring.cpu, each) if isinstance(each, bytes) else Lost(each, ring.cpu))
        if len(taken) == AT_ONCE:  # the kernel reports a buffer once, not for as long as it holds something
            self._loop.call_soon(self._drain, ring)

    def close(self) -> None:
        """Detach from the map."""
        self._table.close()
        for ring in self._rings:
            self._loop.remove_reader(ring.fd)
            ring.close()
        self._rings.clear()
