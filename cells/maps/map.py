"""BPF maps: each operation on an entry is one system call on preallocated buffers.

Source: include/uapi/linux/bpf.h (union bpf_attr), kernel/bpf/{hashtab,arraymap,lpm_trie}.c.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from cells.maps.bpf import (
    EVERY_FLOW,
    NR_BPF,
    BpfError,
    MapSpec,
    MapType,
    buffer,
    command,
    joined,
    measured,
    object_info,
    open_pin,
    possible_cpus,
    quick,
    sleeping,
)
from cells.maps.map_log import MapLog

__all__ = [
    "ANY",
    "EVERY_FLOW",
    "EXIST",
    "NOEXIST",
    "NO_PREALLOC",
    "Epochs",
    "Map",
    "MapSpec",
    "MapType",
    "create_map",
    "map_by_id",
    "open_map",
    "possible_cpus",
]


MAP_CREATE: Final = 0
MAP_LOOKUP: Final = 1
MAP_UPDATE: Final = 2
MAP_DELETE: Final = 3
MAP_NEXT_KEY: Final = 4
MAP_FD_BY_ID: Final = 14
MAP_LOOKUP_BATCH: Final = 24
MAP_UPDATE_BATCH: Final = 26
MAP_DELETE_BATCH: Final = 27

ANY: Final = 0
"""Update flag: create or replace."""
NOEXIST: Final = 1
"""Update flag: create only (EEXIST)."""
EXIST: Final = 2
"""Update flag: replace only (ENOENT)."""

NO_PREALLOC: Final = 1
"""Map flag BPF_F_NO_PREALLOC; every LPM trie needs it."""
_READ_ONLY: Final = 1 << 3
"""BPF_F_RDONLY: a property of the descriptor, not of the map."""

_ELEMENT = struct.Struct("<IIQQQ")  # map_fd, pad, key, value or next_key, flags
_BATCH = struct.Struct("<QQQQIIQQ")  # in, out, keys, values, count, map_fd, elem_flags, flags
_CREATE = struct.Struct("<IIIIIII16s7I")  # up to map_extra; all from map_ifindex on is zero
_MAP_INFO = struct.Struct("<IIIIII16s")
_CLOSED = 0xFFFFFFFF  # an invalid descriptor: later use fails with EBADF
_CHUNK = 4096  # entries of one batch
_index = struct.Struct("<I").pack
_flat = chain.from_iterable

_PER_CPU = {MapType.PERCPU_HASH, MapType.PERCPU_ARRAY, MapType.LRU_PERCPU_HASH}
_OF_MAPS = {MapType.ARRAY_OF_MAPS, MapType.HASH_OF_MAPS}
_BATCHED = {MapType.HASH, MapType.LRU_HASH, MapType.ARRAY, MapType.LPM_TRIE} | _PER_CPU
_BY_INDEX = {MapType.ARRAY_OF_MAPS, MapType.PROG_ARRAY}


class Map:
    """An open BPF map. Keys and values are bytes of exactly the map's sizes (ValueError otherwise).

    A value of a per-CPU map is the concatenation of all CPUs' values, each padded to 8 bytes: see
    :meth:`per_cpu`. lookup, update and delete share one buffer, so only one thread at a time may call them;
    the other methods are safe in any thread.

    A write advances the policy epochs that the spec's ``invalidates`` selects, even if a batch fails halfway.
    Writing such a map without ``epochs`` raises RuntimeError.
    """

    __slots__ = (
        "_attr", "_call", "_flags", "_keep", "_key", "_value", "deletes", "epochs", "failed_deletes",
        "failed_updates", "fd", "id", "log", "spec", "updates", "value_bytes",
    )  # fmt: skip

    def __init__(self, fd: int, id: int, spec: MapSpec) -> None:  # noqa: A002  (the kernel's word)
        self.fd = fd
        self.id = id
        self.spec = spec
        self.updates = self.deletes = 0
        """Entries written and deleted through this object."""
        self.failed_updates = self.failed_deletes = 0
        self.log: MapLog | None = None
        """Records writes, if set."""
        self.epochs: Epochs | None = None
        """Policy epochs to advance on writes."""
        stride = (spec.value_size + 7) & ~7
        self.value_bytes = stride * possible_cpus() if spec.type in _PER_CPU else spec.value_size
        memory = bytearray(_ELEMENT.size + spec.key_size + self.value_bytes)
        self._keep = (ctypes.c_char * len(memory)).from_buffer(memory)
        base = ctypes.addressof(self._keep)
        key, value = base + _ELEMENT.size, base + _ELEMENT.size + spec.key_size
        _ELEMENT.pack_into(memory, 0, fd, 0, key, value, 0)
        view = memoryview(memory)
        self._flags = view[24:32].cast("Q")
        self._key = view[_ELEMENT.size : _ELEMENT.size + spec.key_size]
        self._value = view[_ELEMENT.size + spec.key_size :]
        self._attr = ctypes.c_void_p(base)
        self._call = measured(sleeping if spec.type in _OF_MAPS else quick)

    def __repr__(self) -> str:
        return f"<Map {self.spec.name} id={self.id} fd={self.fd}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. The kernel keeps the map while it is pinned or a program uses it."""
        if self.fd != _CLOSED:
            os.close(self.fd)
            self.fd = _CLOSED
            _ELEMENT.pack_into(self._keep, 0, _CLOSED, 0, 0, 0, 0)

    def remeasure(self) -> None:
        """Measure the calls of a map that was opened before measure()."""
        self._call = measured(self._call)

    def lookup(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        try:
            self._key[:] = key
        except ValueError:
            raise self._wrong_size("key", key) from None
        self._flags[0] = 0
        if self._call(NR_BPF, MAP_LOOKUP, self._attr, 32) < 0:
            self._check_absent("look up in")
            return None
        return bytes(self._value)

    def update(self, key: bytes, value: bytes, flags: int = ANY) -> None:
        """Set ``key`` to ``value``; ``flags`` is ANY, NOEXIST or EXIST."""
        invalidates = self.spec.invalidates
        if invalidates is not None and self.epochs is None:
            raise self._read_only()
        invalidated = self._invalidated_by(self.lookup(key)) if callable(invalidates) else invalidates
        self._update(key, value, flags, invalidated)

    def update_changed(self, key: bytes, value: bytes) -> None:
        """Set ``key`` to ``value`` unless it has this value already.

        One look-up serves both the comparison and ``invalidates``.
        """
        invalidates = self.spec.invalidates
        if invalidates is not None and self.epochs is None:
            raise self._read_only()
        if (before := self.lookup(key)) != value:
            self._update(
                key, value, ANY, self._invalidated_by(before) if callable(invalidates) else invalidates
            )

    def _update(self, key: bytes, value: bytes, flags: int, invalidated: int | None) -> None:
        try:
            self._key[:] = key
            self._value[:] = value
        except ValueError:
            raise self._wrong_size("key or value", key, value) from None
        self._flags[0] = flags
        if self._call(NR_BPF, MAP_UPDATE, self._attr, 32) < 0:
            what = f"{self._description()} of {self.spec.max_entries} entries"
            error = BpfError(ctypes.get_errno(), "update", what)
            self.failed_updates += 1
            if self.log is not None:
                self.log.note(key, value, errno.errorcode.get(error.errno or 0, str(error.errno)))
            raise error
        self.updates += 1
        if self.log is not None:
            self.log.note(key, value)
        if invalidated is not None and self.epochs is not None:
            self.epochs.advance(invalidated)

    def delete(self, key: bytes) -> bool:
        """Delete ``key``; False if it does not exist."""
        invalidates = self.spec.invalidates
        if invalidates is not None and self.epochs is None:
            raise self._read_only()
        invalidated = self._invalidated_by(self.lookup(key)) if callable(invalidates) else invalidates
        try:
            self._key[:] = key
        except ValueError:
            raise self._wrong_size("key", key) from None
        if self._call(NR_BPF, MAP_DELETE, self._attr, 16) < 0:  # the command's attribute ends with the key
            self.failed_deletes += ctypes.get_errno() != errno.ENOENT
            self._check_absent("delete from")
            return False
        self.deletes += 1
        if self.log is not None:
            self.log.note(key, None)
        if invalidated is not None and self.epochs is not None:
            self.epochs.advance(invalidated)
        return True

    def _invalidated_by(self, before: bytes | None) -> int | None:
        """Return the endpoint with verdicts that a change of this value invalidates; None without a value."""
        invalidates = self.spec.invalidates
        return invalidates(before) if callable(invalidates) and before is not None else None

    def _invalidated(self, keys: Iterable[bytes]) -> Collection[int]:
        """Return the endpoints with verdicts that changes of these keys invalidate."""
        invalidates = self.spec.invalidates
        if invalidates is None:
            return ()
        if self.epochs is None:
            raise self._read_only()
        if isinstance(invalidates, int):
            return (invalidates,)
        return {invalidates(row) for key in keys if (row := self.lookup(key)) is not None}

    def invalidate_once(self) -> AbstractContextManager[object]:
        """Advance the epochs of a block's writes once, at its end. Do not await inside."""
        return nullcontext() if self.epochs is None else self.epochs

    def reopened(self) -> "Map":
        """The same map with its own buffers, read-only, for another thread, which must close it."""
        table = map_by_id(self.id, self.spec.name)
        table.spec = self.spec
        return table

    def first_key(self) -> bytes | None:
        """The first key in the kernel's order, or None if the map is empty."""
        return self._next_key(None)

    def keys(self) -> Iterator[bytes]:
        """All keys, by one system call each. The key yielded last may be deleted."""
        key = self._next_key(None)
        while key is not None:
            following = self._next_key(key)
            yield key
            key = following

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """All keys and values, in the kernel's order. Not a snapshot if other writers change the map."""
        if self.spec.type in _BATCHED:
            yield from self._batched_items()
            return
        if self.spec.type in _OF_MAPS:
            # 0.4 ms for 4096 entries; single calls take 6 ms, and 80 ms if another thread waits for the GIL
            try:
                entries = list(self._batched_items())
            except BpfError as error:
                if error.errno != errno.EINTR:  # kernels before 6.14 return it for an empty slot
                    raise
            else:
                yield from entries
                return
        indexes = (struct.pack("<I", i) for i in range(self.spec.max_entries))
        for key in indexes if self.spec.type in _BY_INDEX else self.keys():
            value = self.lookup(key)
            if value is not None:
                yield key, value

    def update_batch(self, entries: Collection[tuple[bytes, bytes]], flags: int = ANY) -> None:
        """Set entries by one system call, 3 to 6 times as fast. Stops at the first error."""
        self.update_all([key for key, _ in entries], [value for _, value in entries], flags)

    def update_all(self, keys: Sequence[bytes], values: Sequence[bytes], flags: int = ANY) -> None:
        """Set entries by one system call: ``values`` has the value of each of ``keys``."""
        all_keys, all_values = joined(keys), joined(values)
        size, value_size = len(keys) * self.spec.key_size, len(values) * self.value_bytes
        if len(keys) != len(values) or len(all_keys) != size or len(all_values) != value_size:
            raise self._wrong_size("keys or values", all_keys, all_values)
        invalidated = self._invalidated(keys) if keys else ()
        try:
            self._batch(MAP_UPDATE_BATCH, len(keys), all_keys, all_values, flags)
        finally:
            if invalidated and self.epochs is not None:
                self.epochs.advance(*invalidated)
        if self.log is not None:
            self.log.note_many(list(zip(keys, values, strict=True)))

    def delete_batch(self, keys: Sequence[bytes]) -> None:
        """Delete keys by one system call. Raises BpfError ENOENT at a missing key, and keeps the rest."""
        joined = b"".join(keys)
        if len(joined) != len(keys) * self.spec.key_size:
            raise self._wrong_size("keys", joined)
        invalidated = self._invalidated(keys) if keys else ()
        try:
            self._batch(MAP_DELETE_BATCH, len(keys), joined)
        finally:
            if invalidated and self.epochs is not None:
                self.epochs.advance(*invalidated)
        if self.log is not None:
            self.log.note_many([(key, None) for key in keys])

    def clear(self) -> int:
        """Delete all entries; returns their number."""
        removed = 0
        for key in self.keys():
            removed += self.delete(key)
        return removed

    def _batch(self, number: int, count: int, keys: bytes, values: bytes = b"", flags: int = ANY) -> None:
        if not count:
            return
        key_memory, value_memory = buffer(keys), buffer(values)
        at_keys, at_values = ctypes.addressof(key_memory), ctypes.addressof(value_memory)
        attr = buffer(_BATCH.pack(0, 0, at_keys, at_values if values else 0, count, self.fd, flags, 0))
        operation = "update" if values else "delete from"
        what = f"{self._description()} ({count} entries at once)"
        try:
            command(number, attr, operation, what, call=sleeping)
        except BpfError:
            self.failed_updates += bool(values)
            self.failed_deletes += not values
            raise
        self.updates += count if values else 0
        self.deletes += 0 if values else count

    def _batched_items(self) -> Iterator[tuple[bytes, bytes]]:
        key_size, value_size = self.spec.key_size, self.value_bytes
        key, value = struct.Struct(f"{key_size}s"), struct.Struct(f"{value_size}s")
        chunk = min(self.spec.max_entries, _CHUNK)
        cursor = ctypes.create_string_buffer(max(key_size, 8))
        at_cursor = ctypes.addressof(cursor)
        started = done = False
        while not done:
            keys = ctypes.create_string_buffer(chunk * key_size)
            values = ctypes.create_string_buffer(chunk * value_size)
            first, at_keys, at_values = at_cursor if started else 0, *map(ctypes.addressof, (keys, values))
            attr = buffer(_BATCH.pack(first, at_cursor, at_keys, at_values, chunk, self.fd, 0, 0))
            if sleeping(NR_BPF, MAP_LOOKUP_BATCH, attr, len(attr)) < 0:
                code = ctypes.get_errno()
                if code == errno.ENOSPC:  # one hash bucket holds more than a chunk
                    chunk *= 2
                    continue
                if code != errno.ENOENT:
                    raise BpfError(code, "read", self._description())
                done = True  # end of the map; the count is valid
            started = True
            count = _BATCH.unpack(attr.raw)[4]
            if count:  # split in C: maps of services have 100,000 entries
                got_keys = key.iter_unpack(memoryview(keys)[: count * key_size])
                got_values = value.iter_unpack(memoryview(values)[: count * value_size])
                yield from zip(_flat(got_keys), _flat(got_values), strict=True)

    def _next_key(self, key: bytes | None) -> bytes | None:
        memory = buffer((key or bytes(self.spec.key_size)) + bytes(self.spec.key_size))
        at = ctypes.addressof(memory)
        attr = buffer(_ELEMENT.pack(self.fd, 0, 0 if key is None else at, at + self.spec.key_size, 0))
        if measured(quick)(NR_BPF, MAP_NEXT_KEY, attr, 32) < 0:
            self._check_absent("read")
            return None
        return memory.raw[self.spec.key_size :]

    def _check_absent(self, operation: str) -> None:
        code = ctypes.get_errno()
        if code != errno.ENOENT:
            raise BpfError(code, operation, self._description())

    def _description(self) -> str:
        return f"map {self.spec.name}"

    def _read_only(self) -> RuntimeError:
        return RuntimeError(f"map {self.spec.name} is open for reading only: write it through Maps")

    def _wrong_size(self, what: str, *data: bytes) -> ValueError:
        sizes = "/".join(str(len(each)) for each in data)
        expected = f"keys have {self.spec.key_size}, values {self.value_bytes} bytes"
        return ValueError(f"map {self.spec.name}: wrong size of {what} ({sizes} bytes): {expected}")


# Policy epochs: a change makes the datapath ignore cached verdicts.

_epoch = struct.Struct("<Q")
_FEW: Final = 2  # up to this number, single writes are faster than a batch


class Epochs:
    """The policy epochs of the node and of its endpoints, in hive_epoch. Only one process writes them.

    Maps advance them on writes. As a context manager, it collects the endpoints to invalidate in a block and
    advances their epochs once, at its end. Blocks may be nested; do not await inside.
    """

    def __init__(self, table: Map) -> None:
        self._table = table
        self._cached: dict[int, int] = {}
        self._depth = 0
        self._due: set[int] = set()

    def advance(self, *endpoint_ids: int) -> None:
        """Invalidate the cached verdicts of these endpoints' flows; 0 for all flows. Raises BpfError."""
        if self._depth:
            self._due.update(endpoint_ids)
        elif len(endpoint_ids) <= _FEW:  # the usual case, and pods wait for it
            for one in endpoint_ids:
                value = self._current(one) + 1
                self._table.update(_index(one), _epoch.pack(value))
                self._cached[one] = value
        else:
            following = {one: self._current(one) + 1 for one in endpoint_ids}
            self._table.update_batch([(_index(one), _epoch.pack(value)) for one, value in following.items()])
            self._cached.update(following)

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._depth -= 1
        if self._due and not self._depth:
            due, self._due = self._due, set()
            self.advance(*due)

    def _current(self, endpoint_id: int) -> int:
        if (cached := self._cached.get(endpoint_id)) is not None:
            return cached
        (stored,) = _epoch.unpack(self._table.lookup(_index(endpoint_id)) or bytes(_epoch.size))
        return int(stored)


def create_map(spec: MapSpec) -> Map:
    """Create an unpinned map. Large preallocated maps take milliseconds."""
    if spec.inner is None:
        return _create(spec, 0)
    with _create(spec.inner, 0) as inner:  # a template: the kernel copies its attributes
        created = _create(spec, inner.fd)
    created.spec = replace(created.spec, inner=spec.inner)  # the kernel does not report it
    return created


def _create(spec: MapSpec, inner_fd: int) -> Map:
    name = spec.name.encode()[:15]
    sizes = (spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags)
    attr = buffer(_CREATE.pack(*sizes, inner_fd, 0, name, *[0] * 7))
    fd = command(MAP_CREATE, attr, "create", f"map {spec.name} ({spec})", call=sleeping)
    return _opened(fd, spec.name)


def open_map(path: Path) -> Map:
    """Open the map pinned at ``path``. Raises BpfError, ENOENT if no such pin exists."""
    return _opened(open_pin(path), path.name)


def map_by_id(id: int, name: str = "", *, writable: bool = False) -> Map:  # noqa: A002  (the kernel's word)
    """Open the map with this kernel id, read-only (writes fail with EPERM) unless ``writable``.

    ``name`` is used in error messages. Raises BpfError.
    """
    flags = 0 if writable else _READ_ONLY
    fd = command(MAP_FD_BY_ID, buffer(struct.pack("<III", id, 0, flags)), "open", f"map {name} (id {id})")
    return _opened(fd, name or f"id {id}")


def _opened(fd: int, name: str) -> Map:
    try:
        info = ctypes.create_string_buffer(_MAP_INFO.size)
        object_info(fd, info, f"map {name}")
        kind, id_, key_size, value_size, max_entries, flags, _ = _MAP_INFO.unpack(info.raw)
        return Map(fd, id_, MapSpec(name, MapType(kind), key_size, value_size, max_entries, flags))
    except BaseException:
        os.close(fd)
        raise
