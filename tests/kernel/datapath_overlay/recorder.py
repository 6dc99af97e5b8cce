"""The datapath compiled with a tunnel and routes that a test can look into."""

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
    """The object, or with ``recorded_xdp`` that of drivers."""
    return compiled(Path(__file__).with_name(f"{name}.c"), SOURCES).read_bytes()


class Tunnelled(NamedTuple):
    """What was asked of the kernel for one packet."""

    vni: int
    remote: IPAddress
    ttl: int
    size: int
    flags: int
    local: IPAddress | None = None
    """The address it is sent from, noted of IPv6 alone; None: routing chooses."""


class Route(NamedTuple):
    """What the kernel's routes say of any packet: BPF_FIB_LKUP_RET_*, and the next hop."""

    answer: int = NOT_FORWARDED
    ifindex: int = 0
    source: bytes = bytes(6)
    destination: bytes = bytes(6)
    next_hop: bytes = bytes(16)


NOWHERE = Route()


class Redirected(NamedTuple):
    """Where the packet was sent."""

    ifindex: int
    flags: int


class Recorder:
    """The map between the object and the test."""

    def __init__(self) -> None:
        self.map: Map = create_map(_SPEC)

    def nothing(self, route: Route = NOWHERE) -> None:
        """As if no packet had passed; the next does not come out of a tunnel, and is routed so."""
        self.map.update(bytes(4), bytes(_TUNNEL.size) + _ROUTE.pack(*route) + bytes(_HANDED.size))

    def handed(self, what: int) -> None:
        """The verdict of a program in the driver on the next packet."""
        row = self._reported()
        self.map.update(bytes(4), row[: -_HANDED.size] + _HANDED.pack(what, self._mtu(row)))

    def narrow(self, mtu: int) -> None:
        """The next hop takes packets of so many bytes at most."""
        self.map.update(bytes(4), self._reported()[: -_HANDED.size] + _HANDED.pack(0, mtu))

    def _reported(self) -> bytes:
        return self.map.lookup(bytes(4)) or bytes(_SIZE)

    @staticmethod
    def _mtu(row: bytes) -> int:
        return int(_HANDED.unpack(row[-_HANDED.size :])[1])

    def comes_from(self, node: str, vni: int, route: Route = NOWHERE) -> None:
        """The next packets come out of the tunnel, from this address outside, with this identity."""
        ip = ip_address(node)
        ends = (int(ip), b"") if ip.version == 4 else (0, ip.packed)
        tunnel = _TUNNEL.pack(1, vni, *ends, b"", *(0,) * 7)
        self.map.update(bytes(4), tunnel + _ROUTE.pack(*route) + bytes(_HANDED.size))

    def _row(self) -> tuple[Any, ...]:
        return _TUNNEL.unpack_from(self.map.lookup(bytes(4)) or bytes(_SIZE))

    @property
    def tunnelled(self) -> Tunnelled | None:
        """The tunnel key that was set; None: none was."""
        _, vni, remote, remote6, local6, ttl, size, flags, _, _, _, count = self._row()
        if not count:
            return None
        if not flags & OVER_IPV6:
            return Tunnelled(vni, IPv4Address(remote), ttl, size, flags)
        local = IPv6Address(local6) if any(local6) else None
        return Tunnelled(vni, IPv6Address(remote6), ttl, size, flags, local)

    @property
    def redirected(self) -> Redirected | None:
        """Where bpf_redirect() was to send the packet; None: it was not called."""
        count, ifindex, flags = self._row()[8:11]
        return Redirected(ifindex, flags) if count else None
