"""Compiles the datapath with tunnel and routing helpers that record their calls for a test."""

from __future__ import annotations

import struct
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

from cells.base.addresses import IPAddress
from cells.datapath.build import SOURCES
from cells.maps.map import Map, MapSpec, MapType, create_map
from tests.support.compiled import compiled

_TUNNEL = struct.Struct("<3I16s16s7I")
_ROUTE = struct.Struct("<iI6s2x6s2x16s")
_HANDED = struct.Struct("<II")
_SIZE = _TUNNEL.size + _ROUTE.size + _HANDED.size
OVER_IPV6 = 1
"""BPF_F_TUNINFO_IPV6 (linux/bpf.h)."""
NOT_FORWARDED = 4
"""BPF_FIB_LKUP_RET_NOT_FWDED (linux/bpf.h)."""
_SPEC = MapSpec("hive_recorded", MapType.ARRAY, 4, _SIZE, 1)


@cache
def recorded_object(name: str = "recorded") -> bytes:
    """Return the tc object, or with ``recorded_xdp`` the driver's."""
    return compiled(Path(__file__).with_name(f"{name}.c"), SOURCES).read_bytes()


class Tunnelled(NamedTuple):
    """The tunnel key that a program set for one packet."""

    vni: int
    remote: IPAddress
    ttl: int
    size: int
    flags: int
    local: IPAddress | None = None
    """The source address, recorded for IPv6 only; None: routing chooses."""


class Route(NamedTuple):
    """The result of the route lookup of any packet: BPF_FIB_LKUP_RET_*, and the next hop."""

    answer: int = NOT_FORWARDED
    ifindex: int = 0
    source: bytes = bytes(6)
    destination: bytes = bytes(6)
    next_hop: bytes = bytes(16)


NOWHERE = Route()


class Redirected(NamedTuple):
    """The target of a redirect."""

    ifindex: int
    flags: int


class Recorder:
    """The map shared by the object and the test."""

    def __init__(self) -> None:
        self.map: Map = create_map(_SPEC)

    def nothing(self, route: Route = NOWHERE) -> None:
        """Reset: no recorded calls; the next packet has no tunnel key and this route."""
        self.map.update(bytes(4), bytes(_TUNNEL.size) + _ROUTE.pack(*route) + bytes(_HANDED.size))

    def handed(self, what: int) -> None:
        """Set the verdict of the driver's program on the next packet."""
        row = self._reported()
        self.map.update(bytes(4), row[: -_HANDED.size] + _HANDED.pack(what, self._mtu(row)))

    def narrow(self, mtu: int) -> None:
        """Set the MTU of the next hop."""
        self.map.update(bytes(4), self._reported()[: -_HANDED.size] + _HANDED.pack(0, mtu))

    def _reported(self) -> bytes:
        return self.map.lookup(bytes(4)) or bytes(_SIZE)

    @staticmethod
    def _mtu(row: bytes) -> int:
        return int(_HANDED.unpack(row[-_HANDED.size :])[1])

    def comes_from(self, node: str, vni: int, route: Route = NOWHERE) -> None:
        """Have the next packets come out of the tunnel, with this outer source address and identity."""
        ip = ip_address(node)
        ends = (int(ip), b"") if ip.version == 4 else (0, ip.packed)
        tunnel = _TUNNEL.pack(1, vni, *ends, b"", *(0,) * 7)
        self.map.update(bytes(4), tunnel + _ROUTE.pack(*route) + bytes(_HANDED.size))

    def _row(self) -> tuple[Any, ...]:
        return _TUNNEL.unpack_from(self.map.lookup(bytes(4)) or bytes(_SIZE))

    @property
    def tunnelled(self) -> Tunnelled | None:
        """Return the tunnel key that was set, or None."""
        _, vni, remote, remote6, local6, ttl, size, flags, _, _, _, count = self._row()
        if not count:
            return None
        if not flags & OVER_IPV6:
            return Tunnelled(vni, IPv4Address(remote), ttl, size, flags)
        local = IPv6Address(local6) if any(local6) else None
        return Tunnelled(vni, IPv6Address(remote6), ttl, size, flags, local)

    @property
    def redirected(self) -> Redirected | None:
        """Return the target of bpf_redirect(), or None if it was not called."""
        count, ifindex, flags = self._row()[8:11]
        return Redirected(ifindex, flags) if count else None
