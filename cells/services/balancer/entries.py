"""Keys and values of the load-balancing maps, as bytes.

Layouts: ``struct lb4_key``, ``lb4_service``, ``lb4_backend``, ``lb4_reverse_nat``, ``lb4_src_range_key``,
``lb_affinity_match`` of Cilium's bpf/lib/common.h (and their IPv6 twins). Addresses, ports and the number of
a frontend are in network order, the rest in the machine's, which is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network
from itertools import groupby
from typing import NamedTuple

from cells.services.model.types import Address, BackendState, FrontendKey, ServiceFlag

AFFINITY_MATCH = "cilium_lb_affinity_match"
PRESENT = b"\x00"

SERVICES = {version: f"cilium_lb{version}_services_v2" for version in (4, 6)}
BACKENDS = {version: f"cilium_lb{version}_backends_v3" for version in (4, 6)}
REVERSE_NAT = {version: f"cilium_lb{version}_reverse_nat" for version in (4, 6)}
MAGLEV = {version: f"cilium_lb{version}_maglev" for version in (4, 6)}
SOURCE_RANGES = {version: f"cilium_lb{version}_source_range" for version in (4, 6)}
"""Names of maps, by family."""

_U16, _U32 = struct.Struct("<H").pack, struct.Struct("<I").pack
_BE16 = struct.Struct(">H").pack
_AFTER_PROTOCOL = struct.Struct(">BHBx").pack  # the number of the cluster, which is 0, has no order
_AFTER_SLOT = struct.Struct("<BBxx").pack
_MASTER = struct.Struct("<IH2sHH").pack
_SLOTS = [_U16(slot) for slot in range(1 << 8)]
"""Numbers of the slots that nearly every frontend has."""


BACKEND_ENDS = [_AFTER_PROTOCOL(state, 0, 0) for state in sorted(BackendState)]
"""What a backend's value ends with behind its address, by state, without a zone."""

_QUARANTINED = struct.pack("<HH", ServiceFlag.QUARANTINED.value, 0)


class MapKey(NamedTuple):
    """A key of a named map."""

    map: str
    key: bytes


class Write(NamedTuple):
    """One change of a map; a value of None deletes the key."""

    where: MapKey
    value: bytes | None


class Batch(NamedTuple):
    """Entries of one map that are set, in this order, or removed where there are no values."""

    map: str
    keys: Sequence[bytes]
    values: Sequence[bytes] | None

    def writes(self) -> Iterator[Write]:
        """One by one."""
        values = self.values if self.values is not None else (None,) * len(self.keys)
        for key, value in zip(self.keys, values, strict=True):
            yield Write(MapKey(self.map, key), value)


class LookUpTable(bytes):
    """The value of a look-up table."""

    backends: frozenset[bytes] = frozenset()
    """The numbers in it."""


def batched(writes: Iterable[Write]) -> list[Batch]:
    """The same in as few batches as their order allows."""
    found: list[Batch] = []
    for (name, sets), group in groupby(writes, key=lambda one: (one.where.map, one.value is not None)):
        ones = list(group)
        values = [one.value for one in ones if one.value is not None] if sets else None
        found.append(Batch(name, [one.where.key for one in ones], values))
    return found


def service_key(frontend: FrontendKey, slot: int) -> MapKey:
    """Slot 0 is the frontend itself, the others its backends."""
    return MapKey(SERVICES[frontend.address.version], slot_keys(frontend, slot, slot + 1)[0])


def slot_keys(frontend: FrontendKey, first: int, end: int) -> list[bytes]:
    """The keys of slots ``first`` to ``end``, without that."""
    address, scope = frontend
    head, tail = address[1:-1], _AFTER_SLOT(address[-1], scope)
    if end <= len(_SLOTS):
        return [head + slot + tail for slot in _SLOTS[first:end]]
    return [head + _U16(slot) + tail for slot in range(first, end)]


def master_value(
    *,
    count: int,
    quarantined: int,
    number: int,
    flags: int,
    timeout: int = 0,
    algorithm: int = 0,
    proxy_port: int = 0,
) -> bytes:
    """Slot 0: how many backends, and what holds for the frontend."""
    union = struct.unpack("<H", struct.pack(">H", proxy_port))[0] if proxy_port else timeout
    union |= algorithm << 24
    return _MASTER(union, count, _BE16(number), flags, quarantined)


def slot_values(backends: Sequence[bytes], number: int, active: int) -> list[bytes]:
    """Slots of a frontend by its number: which backends, by their keys, first those in use."""
    tail = b"\0\0" + _BE16(number)
    end = tail + b"\0\0\0\0"
    if active == len(backends):
        return [backend + end for backend in backends]
    quarantined = tail + _QUARANTINED
    return [backend + (end if at < active else quarantined) for at, backend in enumerate(backends)]


def backend_number(number: int) -> bytes:
    """The key of a backend, whatever its family."""
    return _U32(number)


def backend_key(number: int, version: int) -> MapKey:
    """A backend by its number."""
    return MapKey(BACKENDS[version], _U32(number))


def backend_value(address: Address, state: BackendState, zone: int = 0) -> bytes:
    """A backend's address and state."""
    return address[1:] + _AFTER_PROTOCOL(state, 0, zone)


def reverse_nat_key(number: int, version: int) -> MapKey:
    """What replies of a frontend's backends are translated to."""
    return MapKey(REVERSE_NAT[version], _BE16(number))


def reverse_nat_value(address: Address) -> bytes:
    """The frontend's address."""
    return address[1:-1]


def source_range_key(number: int, prefix: IPv4Network | IPv6Network) -> MapKey:
    """A range of clients that a frontend serves."""
    head = struct.pack("<I", 32 + prefix.prefixlen) + struct.pack(">Hxx", number)
    return MapKey(SOURCE_RANGES[prefix.version], head + prefix.network_address.packed)


def affinity_key(number: int, backend: int) -> MapKey:
    """A backend that clients of a frontend may stay with."""
    return MapKey(AFFINITY_MATCH, struct.pack("<I", backend) + struct.pack(">Hxx", number))


def maglev_key(number: int, version: int) -> MapKey:
    """The look-up table of a frontend, in the outer map."""
    return MapKey(MAGLEV[version], _BE16(number))
