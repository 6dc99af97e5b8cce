"""What is inside the maps of socket load balancing.

For:    its loader, the termination of sockets, local redirect policies. Needs: nothing.
Gives:  SockConfig, ReverseSkKey, ReverseSk, SkipLbKey.
Source: Cilium 1.17 for cilium_lb*_reverse_sk and cilium_skip_lb*; hive_sock is our own. Little endian, but
        addresses, ports and NAT indexes in network order; the port of cilium_skip_lb6 in the host's.
"""

from ipaddress import ip_address
from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import IPAddress, Layout

SOCK_HOST_ONLY: Final = 1
"""Sockets of pods are left alone."""
SOCK_BIND_PROTECTION: Final = 2
"""Nobody of the node takes the address and port of a service."""
SOCK_TRUSTS_EXTERNAL_IP: Final = 4
"""externalIPs are served that the node does not have."""
SOCK_REJECTS: Final = 8
"""A service without backends refuses connections."""

_config = Layout("sock_config", host_cookie="Q", node_port_min="H", node_port_max="H", flags="I")
_key4 = Layout("reverse_sk4_key", cookie="Q", address="4s", port="2s", pad="2x")
_key6 = Layout("reverse_sk6_key", cookie="Q", address="16s", port="2s", pad="2x", pad2="4x")
_value4 = Layout("reverse_sk4", address="4s", port="2s", rev_nat_index="2s")
_value6 = Layout("reverse_sk6", address="16s", port="2s", rev_nat_index="2s")
_skip4 = Layout("skip_lb4_key", netns_cookie="Q", address="4s", port="2s", pad="2x")
_skip6 = Layout("skip_lb6_key", netns_cookie="Q", address="16s", pad="4x", port="H", pad2="2x")


class SockConfig(msgspec.Struct, frozen=True):
    """The one value of hive_sock, 16 bytes: what the programs at sockets must know of the node."""

    SIZE: ClassVar = _config.size

    host_cookie: int
    """Of the node's own network namespace."""
    node_ports: tuple[int, int]
    """First and last."""
    flags: int = 0
    """SOCK_HOST_ONLY, SOCK_BIND_PROTECTION, SOCK_TRUSTS_EXTERNAL_IP, SOCK_REJECTS."""

    def pack(self) -> bytes:
        return _config.pack(self.host_cookie, *self.node_ports, self.flags)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        cookie, first, last, flags = _config.unpack(data)
        return cls(cookie, (first, last), flags)


class ReverseSkKey(msgspec.Struct, frozen=True):
    """Key of cilium_lb4_reverse_sk, 16 bytes, or cilium_lb6_reverse_sk, 32: a socket and its backend."""

    cookie: int
    ip: IPAddress
    port: int

    def pack(self) -> bytes:
        layout = _key4 if self.ip.version == 4 else _key6
        return layout.pack(self.cookie, self.ip.packed, self.port.to_bytes(2, "big"))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        cookie, address, port = (_key4 if len(data) == _key4.size else _key6).unpack(data)
        return cls(cookie, ip_address(address), int.from_bytes(port, "big"))


class ReverseSk(msgspec.Struct, frozen=True):
    """Its value, 8 bytes or 20: what the socket asked for."""

    ip: IPAddress
    port: int
    rev_nat_index: int

    def pack(self) -> bytes:
        layout = _value4 if self.ip.version == 4 else _value6
        return layout.pack(
            self.ip.packed, self.port.to_bytes(2, "big"), self.rev_nat_index.to_bytes(2, "big")
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        address, port, index = (_value4 if len(data) == _value4.size else _value6).unpack(data)
        return cls(ip_address(address), int.from_bytes(port, "big"), int.from_bytes(index, "big"))


class SkipLbKey(msgspec.Struct, frozen=True):
    """Key of cilium_skip_lb4, 16 bytes, or cilium_skip_lb6, 32: a network namespace and an address."""

    netns_cookie: int
    ip: IPAddress
    port: int

    def pack(self) -> bytes:
        if self.ip.version == 4:
            return _skip4.pack(self.netns_cookie, self.ip.packed, self.port.to_bytes(2, "big"))
        return _skip6.pack(self.netns_cookie, self.ip.packed, self.port)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        if len(data) == _skip4.size:
            cookie, address, port = _skip4.unpack(data)
            return cls(cookie, ip_address(address), int.from_bytes(port, "big"))
        cookie, address, number = _skip6.unpack(data)
        return cls(cookie, ip_address(address), number)
