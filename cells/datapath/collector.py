"""Removes connections from the maps of flows: ended ones, or all of some addresses, within the kernel.

For:    the conntrack cell, and endpoints that go. Needs: Maps, gc.o. Gives: Collector, Collected.

Nothing is copied out of the maps. A walk runs in a worker thread, outside the interpreter's lock, in slices
between which the processor is free for others. The programs are loaded at their first use: a start does not
wait for them.
"""

import os
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import anyio.to_thread

from cells.datapath.datapath import read_object
from cells.datapath.libbpf import LoadedObject, LoadError
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.maps import BpfError, Map, Maps, run_syscall, walk
from lifecycle import Hook, Lifecycle

_COUNTS = struct.Struct("<III4x")  # struct gc_counts of bpf/gc.c
_HEAD = struct.Struct("<IIII")  # struct forget_context: how many addresses of each family, deleted, pad
_GC: Final = ("hive_ct_gc_tcp4", "hive_ct_gc_any4", "hive_ct_gc_tcp6", "hive_ct_gc_any6")
_NAT_GC: Final = ("hive_nat_gc_v4", "hive_nat_gc_v6")
"""In the order of Maps.conntrack, and of Maps.nat, whose flows end with conntrack's."""
_FORGET: Final = "hive_ct_forget"
_IPV4_AT_ONCE: Final = 48
_IPV6_AT_ONCE: Final = 12


@dataclass(frozen=True, slots=True)
class Collected:
    """What a pass found in one map of flows."""

    map: str
    max_entries: int
    seen: int
    alive: int
    deleted: int


class Collector:
    """The programs that walk the conntrack maps; one walk at a time."""

    def __init__(self, maps: Maps, lifecycle: Lifecycle) -> None:
        self._maps = maps
        self._one = anyio.CapacityLimiter(1)
        self._loaded: LoadedObject | None = None
        lifecycle.append(Hook("let go of the conntrack programs", stop=self._stop))

    async def collect(self) -> tuple[Collected, ...]:
        """Remove the connections whose lifetime is over; by map. Raises LoadError, BpfError."""
        return await anyio.to_thread.run_sync(self._collect, limiter=self._one)

    async def forget(self, addresses: Collection[IPv4Address | IPv6Address]) -> int:
        """Remove all connections from and to these addresses; how many there were. LoadError, BpfError."""
        v4 = [ip.packed for ip in addresses if isinstance(ip, IPv4Address)]
        v6 = [ip.packed for ip in addresses if isinstance(ip, IPv6Address)]
        return await anyio.to_thread.run_sync(self._forget, v4, v6, limiter=self._one)

    async def _stop(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _collect(self) -> tuple[Collected, ...]:
        programs = self._programs()
        return tuple(
            Collected(table.spec.name, table.spec.max_entries, *walked(programs[name], table))
            for name, table in zip((*_GC, *_NAT_GC), self._tables(), strict=True)
        )

    def _forget(self, v4: Sequence[bytes], v6: Sequence[bytes]) -> int:
        deleted = 0
        while v4 or v6:
            now4, v4 = v4[:_IPV4_AT_ONCE], v4[_IPV4_AT_ONCE:]
            now6, v6 = v6[:_IPV6_AT_ONCE], v6[_IPV6_AT_ONCE:]
            addresses = b"".join(now4).ljust(4 * _IPV4_AT_ONCE, b"\0")
            addresses += b"".join(now6).ljust(16 * _IPV6_AT_ONCE, b"\0")
            context = _HEAD.pack(len(now4), len(now6), 0, 0) + addresses
            result, context = run_syscall(self._programs()[_FORGET], context)
            if result < 0:
                raise BpfError(-result, "walk", f"the conntrack maps with {_FORGET}")
            deleted += _HEAD.unpack_from(context)[2]
        return deleted

    def _tables(self) -> tuple[Map, ...]:
        return *self._maps.conntrack, *self._maps.nat

    def _programs(self) -> dict[str, int]:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded.programs()

    def _load(self) -> LoadedObject:
        path = PACKAGED_OBJECTS / "gc.o"
        loaded = LoadedObject(read_object(path), path.name)
        try:
            loaded.use_maps({table.spec.name: table.fd for table in self._tables()})
            loaded.load()
            loaded.expect((*_GC, *_NAT_GC, _FORGET))
        except (LoadError, OSError):
            loaded.close()
            raise
        return loaded


def walked(program: int, table: Map) -> tuple[int, int, int]:
    """Walk a map with one of the programs, a slice a read: entries seen, alive, deleted. Raises OSError."""
    counts = bytes(_COUNTS.size)
    with walk(program, table.fd) as reader:
        while told := os.read(reader, _COUNTS.size):
            counts = told
    seen, alive, deleted = _COUNTS.unpack(counts)
    return seen, alive, deleted
