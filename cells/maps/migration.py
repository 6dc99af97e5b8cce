"""Takes the entries of a pinned map over into one of another size or layout. They are never dropped.

The programs in force use the old map until they are replaced, and may write to it until then. So it stays
pinned beside the new one, as ``<name>_former_<id>``, until :meth:`RetiredMap.settle` has taken over what
it got meanwhile. The pin itself changes hands in one step: an agent killed anywhere leaves a generation that
forwards, and a start that can be tried again.
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
"""Makes a new value of an old one."""

_RETIRED = re.compile(r"(.+)_former_\d+")
_CHUNK: Final = 4096
_id = struct.Struct("<I")

_KINDS: Final = (
    frozenset({MapType.HASH, MapType.LRU_HASH}),
    frozenset({MapType.PERCPU_HASH, MapType.LRU_PERCPU_HASH}),
)
"""Types with compatible entries; any other is only compatible with itself."""

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
"""Maps of which an unknown layout is given up: counts, and what programs remember for seconds."""

_CONNTRACK: Final = frozenset(
    {"cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global"}
)
"""Maps that the programs in force write to while they are copied."""


def _longer(size: int) -> Value:
    """Old fields first, as they were; new ones are zero."""
    return lambda value: value.ljust(size, b"\0")


_CONVERTERS: Final[dict[tuple[str, int, int], Value]] = {
    ("hive_endpoints", 32, 64): _longer(64),  # before IPv6
    ("hive_node", 48, 96): _longer(96),
}
"""By name, old and new size of the values."""


def migrate(pinned: Map, wanted: MapSpec, path: Path, log: Logger) -> Map:
    """A map as wanted with the entries of the pinned one, pinned in its place.

    Raises HiveError, one line, and changes nothing when they cannot be taken over.
    """
    value = _conversion(pinned.spec, wanted, path)
    retired = path.with_name(f"{path.name}_former_{pinned.id}")
    fresh = create_map(wanted)
    try:
        _keep(pinned, retired)
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
    """A map that a start replaced, or one before it that was cut short."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self.name = name

    def catch_up(self, current: Map) -> int:
        """Take over what came into it since; how many entries that were."""
        with open_map(self._path) as retired:
            alike = (retired.spec.key_size, retired.value_bytes) == (
                current.spec.key_size,
                current.value_bytes,
            )
            if self.name not in _CONNTRACK or not alike or retired.id == current.id:
                return 0
            with map_by_id(current.id, self.name, writable=True) as own:  # this thread's
                return sum(_merge(own, key, value) for key, value in retired.items())

    def settle(self, current: Map) -> int:
        """Catch up for the last time, no program using it any more, and let it go."""
        taken = self.catch_up(current)
        self.remove()
        return taken

    def remove(self) -> None:
        """Let it go, with what came into it."""
        unpin(self._path)


def retired_maps(directory: Path) -> list[RetiredMap]:
    """The replaced maps that still exist."""
    found = ((path, _RETIRED.fullmatch(path.name)) for path in directory.iterdir())
    return [RetiredMap(path, match[1]) for path, match in found if match]


def _conversion(old: MapSpec, new: MapSpec, path: Path) -> Value | None:
    """What makes new values of old ones; None: leave them. HiveError if there is no way."""
    alike = old.type == new.type or any({old.type, new.type} <= kind for kind in _KINDS)
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


def _keep(pinned: Map, retired: Path) -> None:
    try:
        pin(pinned.fd, retired)
    except BpfError as error:
        if error.errno != errno.EEXIST:  # by a start that was cut short; the id shows that it is this one
            raise


def _copy(source: Map, target: Map, value: Value) -> int:
    """Enter all entries of one map into another; how many."""
    match source.spec.type:
        case MapType.PERF_EVENT_ARRAY:
            return 0  # its readers enter themselves
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


def _copy_references(source: Map, target: Map, opened: Callable[[int], int]) -> int:
    """Of a map of maps or programs: it shows ids, and wants descriptors."""
    copied = 0
    for key, value in source.items():
        (number,) = _id.unpack(value)
        if number:
            descriptor = opened(number)
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
    """Enter a connection of an earlier map, unless it has ended or went on in the new one."""
    there = current.lookup(key)
    if there == value:  # nearly all, so that it has to be quick
        return False
    entry = CtEntry.unpack(value)
    if entry.lifetime < time.monotonic():
        return False
    if there is not None and CtEntry.unpack(there).lifetime >= entry.lifetime:  # each packet renews it
        return False
    try:
        current.update(key, value, NOEXIST if there is None else EXIST)
    except BpfError as error:
        if error.errno not in {errno.EEXIST, errno.ENOENT}:  # a packet or the collector came before us
            raise
        return False
    return True
