"""Reads the perf ring buffers of all CPUs of a perf event array, on the event loop.

``Events`` creates a Reader for its first subscriber. Source: perf_event_open(2).
"""

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
# The kernel writes records and advances the head; this process reads them and advances the tail. While the
# buffer is full, the kernel drops and counts records, and later reports their number (PERF_RECORD_LOST).

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
    """The kernel provides no perf buffer for a CPU; ``errno`` is the reason."""

    def __init__(self, code: int, cpu: int) -> None:
        super().__init__(f"cannot read the datapath's events of CPU {cpu}: {os.strerror(code)}")
        self.errno = code


def online_cpus() -> list[int]:
    """Return the numbers of the online CPUs."""
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class Ring:
    """A perf ring buffer of ``pages`` pages (a power of two) for the output of eBPF programs on one CPU."""

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
        """Unmap and close the buffer."""
        self._ends.release()
        self._data.release()
        self._memory.close()
        os.close(self.fd)

    def read(self, limit: int) -> list[bytes | int]:
        """Read at most ``limit`` records, oldest first: the bytes of a sample, or a number of lost samples.

        Fewer than ``limit``: the buffer was empty; its descriptor becomes readable with the next record.
        """
        head, tail = self._ends
        records: list[bytes | int] = []
        while tail != head and len(records) < limit:
            kind, _, size = _HEADER.unpack(self._bytes_at(tail, _HEADER.size))
            record = self._bytes_at(tail + _HEADER.size, size - _HEADER.size)
            tail += size
            if kind == _RECORD_SAMPLE:
                (length,) = _RAW_SIZE.unpack_from(record)
                records.append(record[_RAW_SIZE.size : _RAW_SIZE.size + length])
            elif kind == _RECORD_LOST:
                records.append(_LOST.unpack_from(record)[1])
        self._ends[1] = tail
        return records

    def _bytes_at(self, position: int, length: int) -> bytes:
        """Return bytes at a position, counted from the first byte ever written; the buffer wraps."""
        start = position % self._size
        first = bytes(self._data[start : start + length])
        return first if len(first) == length else first + bytes(self._data[: length - len(first)])


def _open(cpu: int) -> int:
    size = _ATTR.size
    # Wake the reader for each event (wakeup_events=1), without waiting for more.
    attr = _ATTR.pack(_TYPE_SOFTWARE, size, _COUNT_BPF_OUTPUT, 1, _SAMPLE_RAW, 0, 0, 1, 0, 0)
    number, any_process, no_group = (ctypes.c_long(n) for n in (_NR_PERF_EVENT_OPEN, -1, -1))
    fd: int = _syscall(number, attr, any_process, ctypes.c_long(cpu), no_group, ctypes.c_long(_CLOEXEC))
    if fd < 0:
        raise RingError(ctypes.get_errno(), cpu)
    return fd


MAX_RECORDS: Final = 256
"""Maximum number of records read from one buffer before other tasks run: about two milliseconds."""


class Reader:
    """Attaches a ring buffer of each CPU to the map, and publishes their records until it is closed.

    Belongs to the running event loop.
    """

    def __init__(self, table: Map, pages: int, publish: Callable[[Sample | Lost], None]) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._rings: list[Ring] = []
        # Use a separate descriptor: the kernel removes a perf event array's entries when the descriptor that
        # added them is closed. So our entries are removed even if the agent is killed.
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
            if error.errno == errno.ENODEV:  # the CPU went offline
                return
            raise
        self._rings.append(ring)
        self._table.update(struct.pack("<I", cpu), struct.pack("<I", ring.fd))
        self._loop.add_reader(ring.fd, self._drain, ring)

    def _drain(self, ring: Ring) -> None:
        if ring not in self._rings:  # closed before this callback ran
            return
        records = ring.read(MAX_RECORDS)
        for each in records:
            self._publish(Sample(ring.cpu, each) if isinstance(each, bytes) else Lost(each, ring.cpu))
        if len(records) == MAX_RECORDS:  # poll() reports a perf wakeup once, not while records remain
            self._loop.call_soon(self._drain, ring)

    def close(self) -> None:
        """Detach from the map."""
        self._table.close()
        for ring in self._rings:
            self._loop.remove_reader(ring.fd)
            ring.close()
        self._rings.clear()
