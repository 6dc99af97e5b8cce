"""Keys and values of the load-balancing maps, as bytes.

Layouts: ``struct lb4_key``, ``lb4_service``, ``lb4_backend``, ``lb4_reverse_nat``, ``lb4_src_range_key``,
``lb_affinity_match`` of Cilium's bpf/lib/common.h (and their IPv6 twins). Addresses, ports and the number of
a frontend are in network order, the rest in the machine's, which is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network
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
_AFTER_ADDRESS = struct.Struct(">HBBHBx").pack  # the number of the cluster, which is 0, has no order
_AFTER_SLOT = struct.Struct("<BBxx").pack


class MapKey(NamedTuple):
    """A key of a named map."""

    map: str
    key: bytes


def service_key(frontend: FrontendKey, slot: int) -> MapKey:
    """Slot 0 is the frontend itself, the others its backends."""
    return service_keys(frontend, slot, slot + 1)[0]


def service_keys(frontend: FrontendKey, first: int, end: int) -> list[MapKey]:
    """The keys of slots ``first`` to ``end``, without that."""
    address = frontend.address
    head = address.ip.packed + _BE16(address.port)
    tail = _AFTER_SLOT(address.protocol, frontend.scope)
    name = SERVICES[address.ip.version]
    if first + 1 == end:
        return [MapKey(name, head + _U16(first) + tail)]
    return [MapKey(name, head + _U16(slot) + tail) for slot in range(first, end)]


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
    return (
        struct.pack("<IH", union, count) + struct.pack(">H", number) + struct.pack("<HH", flags, quarantined)
    )


def slot_values(backends: Iterable[int], number: int, *, quarantined: bool) -> list[bytes]:
    """Slots of a frontend by its number: which backends."""
    flags = ServiceFlag.QUARANTINED.value if quarantined else 0
    tail = b"\0\0" + _BE16(number) + struct.pack("<HH", flags, 0)
    return [_U32(backend) + tail for backend in backends]


def backend_key(number: int, version: int) -> MapKey:
    """A backend by its number."""
    return MapKey(BACKENDS[version], _U32(number))


def backend_value(address: Address, state: BackendState, zone: int = 0) -> bytes:
    """A backend's address and state."""
    return backend_entry(0, address, state, zone)[1]


def backend_entry(number: int, address: Address, state: BackendState, zone: int = 0) -> tuple[MapKey, bytes]:
    """Both at once, of which there are many."""
    ip = address.ip
    value = ip.packed + _AFTER_ADDRESS(address.port, address.protocol, state, 0, zone)
    return MapKey(BACKENDS[ip.version], _U32(number)), value


def reverse_nat_key(number: int, version: int) -> MapKey:
    """What replies of a frontend's backends are translated to."""
    return MapKey(REVERSE_NAT[version], _BE16(number))


def reverse_nat_value(address: Address) -> bytes:
    """The frontend's address."""
    return address.ip.packed + struct.pack(">H", address.port)


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
