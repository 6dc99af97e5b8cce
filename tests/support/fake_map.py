"""A BPF map on a dict, for unit tests, with the interface of the real one."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Generic, Self, TypeVar

from cells.maps.bpf import BpfError, MapType
from cells.maps.map import ANY, Epochs, Map, MapSpec
from cells.maps.specs import MapSettings, map_specs, sizes
from cells.maps.target import BYTES, Codec

Key = TypeVar("Key")
Value = TypeVar("Value")

_CLOSED = 0xFFFFFFFF
_EPOCH = MapSpec("hive_epoch", MapType.ARRAY, 4, 8, 65536)
SPECS = map_specs(sizes(MapSettings(), 0), preallocate=False, cpus=1)
"""The node's maps, by the attribute of Maps."""


class Rows(MutableMapping[Key, Value]):
    """The decoded rows of a map."""

    def __init__(self, raw: dict[bytes, bytes], key: Codec[Key], value: Codec[Value]) -> None:
        self._raw, self._key, self._value = raw, key, value

    def __getitem__(self, key: Key) -> Value:
        return self._value.unpack(self._raw[self._key.pack(key)])

    def __setitem__(self, key: Key, value: Value) -> None:
        self._raw[self._key.pack(key)] = self._value.pack(value)

    def __delitem__(self, key: Key) -> None:
        del self._raw[self._key.pack(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter([self._key.unpack(key) for key in self._raw])

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return repr(dict(self))


class FakeMap(Map, Generic[Key, Value]):
    """A map in memory; ``rows`` has its decoded rows, and tests may write them as other programs do.

    A subclass refuses writes in refuse(). ``voided`` counts invalidations of verdicts.
    """

    __slots__ = ("__dict__",)

    def __init__(
        self,
        spec: MapSpec,
        key: Codec[Key] = BYTES,  # type: ignore[assignment]  # of a map of bytes
        value: Codec[Value] = BYTES,  # type: ignore[assignment]
    ) -> None:
        super().__init__(_CLOSED, 1, spec)
        self.raw: dict[bytes, bytes] = {}
        self.key = key
        self.rows: Rows[Key, Value] = Rows(self.raw, key, value)
        self.broken = False
        """Whether the kernel refuses every write."""
        self.writes: list[tuple[str, str]] = []
        """Attempted writes and their keys."""
        self._epoch: FakeMap[Any, Any] | None = None
        if spec is not _EPOCH:
            self._epoch = FakeMap(_EPOCH)
            self.epochs = Epochs(self._epoch)

    def refuse(self, what: str, key: Key) -> None:
        """Raise the kernel's error for a write; ``what``: update or delete."""
        if self.broken:
            raise BpfError(errno.ENOMEM, what, f"map {self.spec.name}")

    @property
    def invalidated(self) -> int:
        """How often verdicts were invalidated."""
        return 0 if self._epoch is None else len(self._epoch.writes)

    def lookup(self, key: bytes) -> bytes | None:
        if self.spec.type is not MapType.LPM_TRIE:
            return self.raw.get(key)
        inner = [row for row in self.raw if _covers(row, key)]
        return self.raw[max(inner, key=_length)] if inner else None

    def _update(self, key: bytes, value: bytes, flags: int, invalidated: int | None) -> None:
        del flags
        if len(key) != self.spec.key_size or len(value) != self.spec.value_size:
            raise ValueError(f"map {self.spec.name}: wrong size of key or value")
        self._try("update", key)
        if self.raw.pop(self._same(key), None) is None and len(self.raw) >= self.spec.max_entries:
            full = errno.ENOSPC if self.spec.type is MapType.LPM_TRIE else errno.E2BIG
            raise BpfError(full, "update", f"map {self.spec.name}")
        self.raw[key] = value
        self._changed(key, value, invalidated)

    def delete(self, key: bytes) -> bool:
        invalidated = next(iter(self._invalidated((key,))), None)
        self._try("delete", key)
        if self.raw.pop(self._same(key), None) is None:
            return False
        self._changed(key, None, invalidated)
        return True

    def update_all(self, keys: Sequence[bytes], values: Sequence[bytes], flags: int = ANY) -> None:
        with self.invalidate_once():
            for key, value in zip(keys, values, strict=True):
                self.update(key, value, flags)

    def delete_batch(self, keys: Sequence[bytes]) -> None:
        with self.invalidate_once():
            for key in keys:
                if not self.delete(key):
                    raise BpfError(errno.ENOENT, "delete from", f"map {self.spec.name}")

    def keys(self) -> Iterator[bytes]:
        return iter(list(self.raw))

    def first_key(self) -> bytes | None:
        return next(iter(self.raw), None)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(list(self.raw.items()))

    def reopened(self) -> Self:
        return self

    def _same(self, key: bytes) -> bytes:
        """Return the key that the kernel treats as equal: in a trie, bits behind the prefix are ignored."""
        if self.spec.type is not MapType.LPM_TRIE or key in self.raw:
            return key
        alike = (row for row in self.raw if _length(row) == _length(key) and _covers(row, key))
        return next(alike, key)

    def _try(self, what: str, key: bytes) -> None:
        self.writes.append((what, str(self.key.unpack(key))))
        self.refuse(what, self.key.unpack(key))

    def _changed(self, key: bytes, value: bytes | None, invalidated: int | None) -> None:
        if self.log is not None:
            self.log.note(key, value)
        if invalidated is not None and self.epochs is not None:
            self.epochs.advance(invalidated)


def _length(key: bytes) -> int:
    (length,) = struct.unpack_from("<I", key)
    return int(length)


def _covers(row: bytes, key: bytes) -> bool:
    """Return whether a prefix of a trie equals or contains the other one."""
    length = _length(row)
    if length > _length(key):
        return False
    ours, theirs = (int.from_bytes(each[4:], "big") for each in (row, key))
    return (ours ^ theirs) >> (8 * (len(row) - 4) - length) == 0
