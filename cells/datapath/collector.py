"""Deletion of conntrack and NAT entries by eBPF programs: expired ones, or all of some addresses.

No entry is copied to user space. A walk runs in a worker thread without the GIL, in slices, between which
other tasks can use the CPU. The programs are loaded at their first use, so the start does not wait for them.
ConntrackGC uses it, and the deletion of endpoints.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Final, NamedTuple

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


_WALK = struct.Struct("<8I")  # struct walk of bpf/gc/walk.h
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
"""The program that walks each map."""
_DELETE_BY_ADDRESS: Final = {
    4: ("hive_ct_forget_tcp4", "hive_ct_forget_any4", "hive_ct_forget_nat4"),
    6: ("hive_ct_forget_tcp6", "hive_ct_forget_any6", "hive_ct_forget_nat6"),
}
"""By family: programs for the conntrack maps, then for the NAT map."""
ADDRESSES: Final = MapSpec("hive_ct_deleted", MapType.HASH, 16, 4, 1 << 17, NO_PREALLOC)
"""Addresses of which to delete all entries; large enough for all endpoints' addresses of both families."""
_MAX_WALKS: Final = 8
"""Limit of walks per address: each looks for entries that the previous one missed."""


class Collected(msgspec.Struct, frozen=True):
    """Result of a walk over one map."""

    map: str
    max_entries: int
    seen: int
    alive: int
    deleted: int
    ingress_alive: int = 0
    """Of a NAT map, the entries of replies; the others are those of the flows' own packets."""
    ingress_deleted: int = 0


class Walk(NamedTuple):
    """Entries that a walk has found."""

    seen: int
    alive: int
    deleted: int
    ingress_alive: int
    ingress_deleted: int


class ConntrackCollector:
    """Runs the programs that walk the conntrack and NAT maps; one walk at a time."""

    def __init__(self, maps: Maps, lifecycle: Lifecycle) -> None:
        self._maps = maps
        self._one = anyio.CapacityLimiter(1)
        self._loaded: LoadedObject | None = None
        self._addresses: Map | None = None
        lifecycle.append(Hook("close the conntrack programs", stop=self._stop))

    async def collect(self) -> tuple[Collected, ...]:
        """Delete expired entries; return the results by map. Raises LoadError, BpfError."""
        return await anyio.to_thread.run_sync(self._collect, limiter=self._one)

    async def forget(self, addresses: Collection[IPv4Address | IPv6Address]) -> int:
        """Delete all entries from and to these addresses; return their number.

        Raises LoadError, BpfError.
        """
        return await anyio.to_thread.run_sync(self._forget, frozenset(addresses), limiter=self._one)

    async def _stop(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        if self._addresses is not None:
            self._addresses.close()
            self._addresses = None

    def _collect(self) -> tuple[Collected, ...]:
        programs = self._programs()
        return tuple(  # NAT maps last: their entries expire with the conntrack entries
            Collected(table.spec.name, table.spec.max_entries, *walk_map(programs[_GC[table.spec.name]]))
            for table in (*self._maps.conntrack, *self._maps.nat)
        )

    def _forget(self, addresses: Collection[IPv4Address | IPv6Address]) -> int:
        if not addresses:
            return 0
        programs, addresses_map = self._programs(), self._addresses
        assert addresses_map is not None  # noqa: S101  (created with the programs)
        deleted = 0
        # A padded IPv4 address could equal an IPv6 address, so each family has its own walks.
        for version in _DELETE_BY_ADDRESS:
            keys = [ip.packed.ljust(16, b"\0") for ip in addresses if ip.version == version]
            if not keys:
                continue
            addresses_map.update_batch([(key, bytes(4)) for key in keys])
            try:
                for name in _DELETE_BY_ADDRESS[version]:
                    deleted += _delete_all(programs[name])
            finally:
                addresses_map.delete_batch(keys)
        return deleted

    def _programs(self) -> dict[str, int]:
        if self._loaded is None:
            addresses_map = create_map(ADDRESSES)
            try:
                self._loaded = self._load(addresses_map)
            except BaseException:
                addresses_map.close()
                raise
            self._addresses = addresses_map
        return self._loaded.programs()

    def _load(self, addresses_map: Map) -> LoadedObject:
        path = PACKAGED_OBJECTS / "gc.o"
        loaded = LoadedObject(read_object(path), path.name)
        try:
            loaded.use_maps({table.spec.name: table.fd for table in (*self._maps.all(), addresses_map)})
            loaded.load()
            loaded.expect((*_GC.values(), *_DELETE_BY_ADDRESS[4], *_DELETE_BY_ADDRESS[6]))
        except (LoadError, OSError):
            loaded.close()
            raise
        return loaded


def walk_map(program: int) -> Walk:
    """Run a program over its whole map; return what it found. Raises BpfError."""
    *_, found = slices(program)
    return found


def slices(program: int) -> Iterator[Walk]:
    """Run a program over its whole map; yield what it has found so far after each slice."""
    state, bucket, buckets = bytes(_WALK.size), 0, 1
    while bucket < buckets:
        state = run_program(program, state)
        bucket, buckets, seen, alive, deleted, _, *ingress = _WALK.unpack(state)
        yield Walk(seen, alive, deleted, *ingress)


def _delete_all(program: int) -> int:
    """Walk until nothing is deleted: entries that move in their bucket during deletions may be missed."""
    deleted = 0
    for _ in range(_MAX_WALKS):
        found = walk_map(program).deleted
        deleted += found
        if not found:
            break
    return deleted
