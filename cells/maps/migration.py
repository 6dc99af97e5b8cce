"""Migration of a pinned map to another size or layout, without losing entries.

The loaded programs use the old map, and may write to it, until they are replaced. So it stays pinned beside
the new one as ``<name>_former_<id>`` until :meth:`RetiredMap.finish` has copied its late entries. The pin of
the new map replaces the old one atomically: wherever an agent is killed, the loaded programs keep forwarding,
and the next start can retry.
"""

import errno
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cells.maps.bpf import BpfError, pin, program_by_id, replace_pin, unpin
from cells.maps.map import ANY, EXIST, NOEXIST, Map, MapSpec, MapType, create_map, map_by_id, open_map
from cells.maps.records.flows import CtEntry
from lifecycle import HiveError, Logger

Value = Callable[[bytes], bytes]
"""Converts an old value to the new layout."""

_RETIRED = re.compile(r"(.+)_former_\d+")
_CHUNK: Final = 4096
_id = struct.Struct("<I")

_COMPATIBLE_TYPES: Final = (
    frozenset({MapType.HASH, MapType.LRU_HASH}),
    frozenset({MapType.PERCPU_HASH, MapType.LRU_PERCPU_HASH}),
)
"""Map types with compatible entries; any other type is only compatible with itself."""

_DISPOSABLE: Final = frozenset(
    {
        "cilium_events",
        "cilium_ipv4_frag_datagrams",
        "cilium_ipv6_frag_datagrams",
        "cilium_metrics",
        "hive_links",
        "hive_passage",
    }
)
"""Maps that are emptied if their layout is unknown: counters and caches of seconds."""

_CONNTRACK: Final = frozenset(
    {"cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global"}
)
"""Maps to which the loaded programs write during the copy."""


def _zero_extended(size: int) -> Value:
    """Keep the old fields, which come first, and fill new ones with zeros."""
    return lambda value: value.ljust(size, b"\0")


_CONVERTERS: Final[dict[tuple[str, int, int], Value]] = {
    ("hive_endpoints", 32, 64): _zero_extended(64),  # before IPv6
    ("hive_node", 48, 96): _zero_extended(96),
}
"""By map name, old and new value size."""


def migrate(pinned: Map, wanted: MapSpec, path: Path, log: Logger) -> Map:
    """Create a map with the wanted attributes, copy the pinned map's entries, and pin it in its place.

    Raises HiveError and changes nothing if the entries cannot be copied.
    """
    value = _value_converter(pinned.spec, wanted, path)
    retired = path.with_name(f"{path.name}_former_{pinned.id}")
    fresh = create_map(wanted)
    try:
        _pin_retired(pinned, retired)
        copied = 0 if value is None else _copy(pinned, fresh, value)
        replace_pin(fresh.fd, path)
    except BpfError as error:
        fresh.close()
        unpin(retired)
        if error.is_full:
            raise HiveError(
                f"map {wanted.name}: the entries of {path} ({pinned.spec}) do not fit into one of "
                f"{wanted.max_entries}: leave its size as it was"
            ) from error
        raise
    except BaseException:
        fresh.close()
        raise
    log.warning(
        "pinned map does not fit, entries taken over into a new one",
        map=wanted.name,
        old=str(pinned.spec),
        new=str(wanted),
        entries=copied,
    )
    return fresh


class RetiredMap:
    """A map that this start, or an interrupted earlier one, replaced."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self.name = name

    def catch_up(self, current: Map) -> int:
        """Copy entries written to it since the migration; return their number."""
        with open_map(self._path) as retired:
            alike = (retired.spec.key_size, retired.value_bytes) == (
                current.spec.key_size,
                current.value_bytes,
            )
            if self.name not in _CONNTRACK or not alike or retired.id == current.id:
                return 0
            with map_by_id(current.id, self.name, writable=True) as own:  # its buffers are this thread's
                return sum(_merge(own, key, value) for key, value in retired.items())

    def finish(self, current: Map) -> int:
        """Copy late entries once no program uses the map, and unpin it; return their number."""
        taken = self.catch_up(current)
        self.remove()
        return taken

    def remove(self) -> None:
        """Unpin it without copying late entries."""
        unpin(self._path)


def retired_maps(directory: Path) -> list[RetiredMap]:
    """Return the replaced maps that are still pinned."""
    found = ((path, _RETIRED.fullmatch(path.name)) for path in directory.iterdir())
    return [RetiredMap(path, match[1]) for path, match in found if match]


def _value_converter(old: MapSpec, new: MapSpec, path: Path) -> Value | None:
    """Return the converter from old to new values; None if the entries are dropped.

    Raises HiveError if there is none.
    """
    alike = old.type == new.type or any({old.type, new.type} <= types for types in _COMPATIBLE_TYPES)
    if alike and old.key_size == new.key_size:
        if old.value_size == new.value_size:
            return bytes
        if converter := _CONVERTERS.get((new.name, old.value_size, new.value_size)):
            return converter
    if new.name in _DISPOSABLE:
        return None
    raise HiveError(
        f"map {new.name}: {path} is {old}, this agent wants {new} and cannot take its entries over: "
        "start the version that made it, or remove the file once the node has no pods"
    )


def _pin_retired(pinned: Map, retired: Path) -> None:
    try:
        pin(pinned.fd, retired)
    except BpfError as error:
        if error.errno != errno.EEXIST:  # an interrupted start pinned it; the name has the map's id
            raise


def _copy(source: Map, target: Map, value: Value) -> int:
    """Copy all entries from one map to another; return their number."""
    match source.spec.type:
        case MapType.PERF_EVENT_ARRAY:
            return 0  # its readers add their own entries
        case MapType.PROG_ARRAY:
            return _copy_references(source, target, program_by_id)
        case MapType.ARRAY_OF_MAPS | MapType.HASH_OF_MAPS:
            return _copy_references(source, target, _map_descriptor)
    copied = 0
    for chunk in _chunks(source):
        entries = [(key, value(old)) for key, old in chunk if source.spec.type != MapType.ARRAY or any(old)]
        target.update_batch(entries, ANY)
        copied += len(entries)
    return copied


def _chunks(source: Map) -> Iterator[list[tuple[bytes, bytes]]]:
    chunk = []
    for entry in source.items():
        chunk.append(entry)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    yield chunk


def _copy_references(source: Map, target: Map, open_by_id: Callable[[int], int]) -> int:
    """Copy a map of maps or programs: lookups return ids, updates require descriptors."""
    copied = 0
    for key, value in source.items():
        (number,) = _id.unpack(value)
        if number:
            descriptor = open_by_id(number)
            try:
                target.update(key, _id.pack(descriptor))
            finally:
                os.close(descriptor)
            copied += 1
    return copied


def _map_descriptor(number: int) -> int:
    with map_by_id(number) as table:
        return os.dup(table.fd)


def _merge(current: Map, key: bytes, value: bytes) -> bool:
    """Copy a conntrack entry of a retired map, unless it expired or the current map has a newer one."""
    present = current.lookup(key)
    if present == value:  # nearly all entries: the fast path
        return False
    entry = CtEntry.unpack(value)
    if entry.lifetime < time.monotonic():
        return False
    if present is not None and CtEntry.unpack(present).lifetime >= entry.lifetime:  # each packet extends it
        return False
    try:
        current.update(key, value, NOEXIST if present is None else EXIST)
    except BpfError as error:
        if error.errno not in {errno.EEXIST, errno.ENOENT}:  # a packet or the garbage collector was first
            raise
        return False
    return True
