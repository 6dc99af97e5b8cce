"""Maglev consistent hashing through a C library; the tables are equal to Cilium's.

``LoadBalancer`` passes backends with their IDs, and writes the table to a frontend's inner map.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from cells.services import MAGLEV_SIZES, Backend, BackendState, Seed
from cells.services.model.backends import addresses_of

__all__ = ["MaglevBackend", "MaglevTables", "fill"]


# Look-up tables from hashes to backends, the same on every node.
#
# Tables follow from backends' names, not from numbers: all nodes must use the same form of name. The C code
# runs without the interpreter's lock: call it in a worker thread for large tables.

LIBRARY = Path(__file__).resolve().parent / "objects" / "libmaglev.so"
_STATE_NAMES = {BackendState.ACTIVE: "active", BackendState.TERMINATING: "terminating"}


class MaglevBackend(msgspec.Struct, frozen=True):
    """A backend in a look-up table."""

    name: str
    id: int
    weight: int


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.maglev_fill.restype = None
    library.maglev_fill.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    return library


def fill(candidates: Iterable[MaglevBackend], size: int, seed: int) -> bytes:
    """Return the table: ``size`` backend IDs, 32 bits each in native byte order.

    Raises ValueError without candidates, or for an unsupported size.
    """
    ordered = sorted(candidates, key=lambda one: one.name.encode())
    if not ordered or size not in MAGLEV_SIZES:
        raise ValueError(f"a table of {size} slots for {len(ordered)} backends cannot be made")
    names = bytearray()
    records = bytearray()
    for one in ordered:
        name = one.name.encode()
        records += struct.pack("<IIIIIId", one.id, one.weight, len(names), len(name), 0, 0, 0.0)
        names += name
    backends = (ctypes.c_char * len(records)).from_buffer(records)
    table = ctypes.create_string_buffer(4 * size)
    _library().maglev_fill(backends, len(ordered), bytes(names), seed, table, size)
    return table.raw


def name_of(backend: Backend) -> str:
    """Return the name that is hashed for a backend."""
    return f"[{backend.address},State:{_STATE_NAMES.get(backend.state, backend.state.name.lower())}]"


class MaglevTables:
    """Computes tables of one size and seed."""

    def __init__(self, size: int, seed: Seed) -> None:
        self._size = size
        self._seed = seed
        self._last: tuple[Sequence[Backend], Sequence[int], bytes] = ((), (), b"")

    def __call__(self, backends: Sequence[Backend], ids: Mapping[bytes, int]) -> bytes:
        """Return the table of these backends, by their IDs; the previous one if nothing changed."""
        last, their_numbers, table = self._last
        numbers = [ids[one] for one in addresses_of(backends)]
        if table and numbers == their_numbers and backends == last:
            return table
        candidates = [
            MaglevBackend(name_of(one), number, one.weight)
            for one, number in zip(backends, numbers, strict=True)
        ]
        table = fill(candidates, self._size, self._seed.names)
        self._last = (backends, numbers, table)
        return table
