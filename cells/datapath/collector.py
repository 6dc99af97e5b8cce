"""Removes connections from the maps of flows: ended ones, or all of some addresses, within the kernel.

Nothing is copied out of the maps. A walk runs in a worker thread, outside the interpreter's lock, in slices
of entries, or of empty buckets, between which the processor is free for others. The programs are loaded at
their first use: a start does not wait for them.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Final

import anyio.to_thread
import msgspec

from cells.datapath.generation import read_object
from cells.datapath.libbpf import LoadedObject, LoadError
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.maps.bpf import run_program
from cells.maps.map import NO_PREALLOC, Map, MapSpec, MapType, create_map
from cells.maps.node_maps import Maps
from lifecycle import Hook, Lifecycle

__all__ = ["Collected", "ConntrackCollector"]


_WALK = struct.Struct("<IIIIII")  # struct walk of bpf/gc/walk.h
_GC: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cilium_ct4_global": "hive_ct_gc_tcp4",
        "cilium_ct_any4_global": "hive_ct_gc_any4",
        "cilium_ct6_global": "hive_ct_gc_tcp6",
        "cilium_ct_any6_global": "hive_ct_gc_any6",
        "cilium_snat_v4_external": "hive_nat_gc_v4",
        "cilium_snat_v6_external": "hive_nat_gc_v6",
    }
)
"""By map: which program walks it."""
_FORGET: Final = {
    4: ("hive_ct_forget_tcp4", "hive_ct_forget_any4", "hive_ct_forget_nat4"),
    6: ("hive_ct_forget_tcp6", "hive_ct_forget_any6", "hive_ct_forget_nat6"),
}
"""By family: of flows, then of translations."""
FORGOTTEN: Final = MapSpec("hive_ct_deleted", MapType.HASH, 16, 4, 1 << 17, NO_PREALLOC)
"""The addresses to forget: as many as two families of endpoints can have."""
_WALKS: Final = 8
"""Walks for one address, at the most. Each looks for what the one before may have passed over."""


class Collected(msgspec.Struct, frozen=True):
    """What a pass found in one map of flows."""

    map: str
    max_entries: int
    seen: int
    alive: int
    deleted: int


class ConntrackCollector:
    """The programs that walk the conntrack maps; one walk at a time."""

    def __init__(self, maps: Maps, lifecycle: Lifecycle) -> None:
        self._maps = maps
        self._one = anyio.CapacityLimiter(1)
        self._loaded: LoadedObject | None = None
        self._forgotten: Map | None = None
        lifecycle.append(Hook("close the conntrack programs", stop=self._stop))

    async def collect(self) -> tuple[Collected, ...]:
        """Remove expired connections; by map. Raises LoadError, BpfError."""
        return await anyio.to_thread.run_sync(self._collect, limiter=self._one)

    async def forget(self, addresses: Collection[IPv4Address | IPv6Address]) -> int:
        """Remove all connections from and to these addresses; how many there were. LoadError, BpfError."""
        return await anyio.to_thread.run_sync(self._forget, frozenset(addresses), limiter=self._one)

    async def _stop(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        if self._forgotten is not None:
            self._forgotten.close()
            self._forgotten = None

    def _collect(self) -> tuple[Collected, ...]:
        programs = self._programs()
        return tuple(  # translations last: they end with their flows
            Collected(table.spec.name, table.spec.max_entries, *walked(programs[_GC[table.spec.name]]))
            for table in (*self._maps.conntrack, *self._maps.nat)
        )

    def _forget(self, addresses: Collection[IPv4Address | IPv6Address]) -> int:
        if not addresses:
            return 0
        programs, forgotten = self._programs(), self._forgotten
        assert forgotten is not None  # noqa: S101  (made with the programs)
        deleted = 0
        # An IPv4 address looks like an IPv6 one that ends in zeros: each family is looked for on its own.
        for version in _FORGET:
            keys = [ip.packed.ljust(16, b"\0") for ip in addresses if ip.version == version]
            if not keys:
                continue
            forgotten.update_batch([(key, bytes(4)) for key in keys])
            try:
                for name in _FORGET[version]:
                    deleted += _delete_all(programs[name])
            finally:
                forgotten.delete_batch(keys)
        return deleted

    def _programs(self) -> dict[str, int]:
        if self._loaded is None:
            forgotten = create_map(FORGOTTEN)
            try:
                self._loaded = self._load(forgotten)
            except BaseException:
                forgotten.close()
                raise
            self._forgotten = forgotten
        return self._loaded.programs()

    def _load(self, forgotten: Map) -> LoadedObject:
        path = PACKAGED_OBJECTS / "gc.o"
        loaded = LoadedObject(read_object(path), path.name)
        try:
            loaded.use_maps({table.spec.name: table.fd for table in (*self._maps.all(), forgotten)})
            loaded.load()
            loaded.expect((*_GC.values(), *_FORGET[4], *_FORGET[6]))
        except (LoadError, OSError):
            loaded.close()
            raise
        return loaded


def walked(program: int) -> tuple[int, int, int]:
    """Walk the map of one of the programs, a slice a run: entries seen, alive, deleted. Raises BpfError."""
    *_, (seen, alive, deleted) = slices(program)
    return seen, alive, deleted


def slices(program: int) -> Iterator[tuple[int, int, int]]:
    """Walk the map of one of the programs: entries seen, alive and deleted so far, after each slice."""
    state, bucket, buckets = bytes(_WALK.size), 0, 1
    while bucket < buckets:
        state = run_program(program, state)
        bucket, buckets, seen, alive, deleted, _ = _WALK.unpack(state)
        yield seen, alive, deleted


def _delete_all(program: int) -> int:
    """Walk until a walk finds nothing to delete: what moves in its bucket as others go may be missed."""
    deleted = 0
    for _ in range(_WALKS):
        _, _, found = walked(program)
        deleted += found
        if not found:
            break
    return deleted
