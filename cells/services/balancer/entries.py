"""Keys and values of the load-balancing maps, as bytes.

Layouts: ``struct lb4_key``, ``lb4_service``, ``lb4_backend``, ``lb4_reverse_nat``, ``lb4_src_range_key``,
``lb_affinity_match`` of Cilium's bpf/lib/common.h (and their IPv6 twins). Addresses, ports and the number of
a frontend are in network order, the rest in the machine's, which is little-endian.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple

from cells.services.model.types import Address, BackendState, FrontendKey, IPAddress, ServiceFlag

AFFINITY_MATCH = "cilium_lb_affinity_match"
PRESENT = b"\x00"


class MapKey(NamedTuple):
    """A key of a named map."""

    map: str
    key: bytes


def family(address: IPAddress) -> int:
    """The digit in a map's name."""
    return address.version


def service_key(frontend: FrontendKey, slot: int) -> MapKey:
    """Slot 0 is the frontend itself, the others its backends."""
    address = frontend.address
    tail = struct.pack("<HBBxx", slot, address.protocol, frontend.scope)
    return MapKey(
        f"cilium_lb{family(address.ip)}_services_v2",
        address.ip.packed + struct.pack(">H", address.port) + tail,
    )


def master_value(
    *,
    count: int,
    quarantined: int,
    number: int,
    flags: ServiceFlag,
    timeout: int = 0,
    algorithm: int = 0,
    proxy_port: int = 0,
) -> bytes:
    """Slot 0: how many backends, and what holds for the frontend."""
    union = struct.unpack("<H", struct.pack(">H", proxy_port))[0] if proxy_port else timeout
    union |= algorithm << 24
    return (
        struct.pack("<IH", union, count)
        + struct.pack(">H", number)
        + struct.pack("<HH", int(flags), quarantined)
    )


def slot_value(*, backend: int, number: int, quarantined: bool) -> bytes:
    """A slot: which backend."""
    flags = ServiceFlag.QUARANTINED if quarantined else ServiceFlag(0)
    return struct.pack("<IH", backend, 0) + struct.pack(">H", number) + struct.pack("<HH", int(flags), 0)


def backend_key(number: int, version: int) -> MapKey:
    """A backend by its number."""
    return MapKey(f"cilium_lb{version}_backends_v3", struct.pack("<I", number))


def backend_value(address: Address, state: BackendState, zone: int = 0) -> bytes:
    """A backend's address and state."""
    return (
        address.ip.packed
        + struct.pack(">H", address.port)
        + struct.pack("<BBHBx", address.protocol, int(state), 0, zone)
    )


def reverse_nat_key(number: int, version: int) -> MapKey:
    """What replies of a frontend's backends are translated to."""
    return MapKey(f"cilium_lb{version}_reverse_nat", struct.pack(">H", number))


def reverse_nat_value(address: Address) -> bytes:
    """The frontend's address."""
    return address.ip.packed + struct.pack(">H", address.port)


def source_range_key(number: int, prefix: IPv4Network | IPv6Network) -> MapKey:
    """A range of clients that a frontend serves."""
    head = struct.pack("<I", 32 + prefix.prefixlen) + struct.pack(">Hxx", number)
    return MapKey(f"cilium_lb{prefix.version}_source_range", head + prefix.network_address.packed)


def affinity_key(number: int, backend: int) -> MapKey:
    """A backend that clients of a frontend may stay with."""
    return MapKey(AFFINITY_MATCH, struct.pack("<I", backend) + struct.pack(">Hxx", number))


def maglev_key(number: int, version: int) -> MapKey:
    """The look-up table of a frontend, in the outer map."""
    return MapKey(f"cilium_lb{version}_maglev", struct.pack(">H", number))


def maglev_value(table: list[int]) -> bytes:
    """The one entry of an inner map: the backend's number for each slot of the table."""
    return struct.pack(f"<{len(table)}I", *table)
