"""Rows of cilium_ipcache: whose a prefix is, and where.

For:    every cell that reads or writes the map. Needs: nothing. Gives: IpcacheKey, IpcacheValue.
Source: Cilium 1.16/1.17 map ABI. Little endian, but addresses and ports in network order.

struct.error on data of another size.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import ClassVar, Self

import msgspec

from cells.maps.records.abi import IPV4, IPV6, IPAddress, Layout, address_of, family_of

_ipcache_key = Layout("ipcache_key", prefixlen="I", cluster_id="H", pad="B", family="B", ip="16s")
_ipcache_value = Layout("ipcache_info", identity="I", tunnel_endpoint="4s", pad="2x", key="B", flags="B")


class IpcacheKey(msgspec.Struct, frozen=True):
    """Key of cilium_ipcache, 24 bytes: a prefix. Make it with :meth:`host` or :meth:`of`."""

    SIZE: ClassVar = _ipcache_key.size

    ip: IPAddress
    bits: int
    """Length of the prefix in the address: 32 for one IPv4 address."""
    cluster_id: int = 0

    @classmethod
    def host(cls, ip: IPAddress) -> Self:
        """One address."""
        return cls(ip, ip.max_prefixlen)

    @classmethod
    def of(cls, network: IPv4Network | IPv6Network) -> Self:
        """A network."""
        return cls(network.network_address, network.prefixlen)

    @property
    def network(self) -> IPv4Network | IPv6Network:
        """The prefix as a network."""
        return ip_network((self.ip, self.bits))

    def pack(self) -> bytes:
        return _ipcache_key.pack(32 + self.bits, self.cluster_id, 0, family_of(self.ip), self.ip.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        length, cluster_id, _, family, ip = _ipcache_key.unpack(data)
        return cls(address_of(ip, family), length - 32, cluster_id)


def ipcache_key(prefix: str) -> bytes:
    """Key of cilium_ipcache for a prefix given as text, without the objects that IpcacheKey is made of."""
    address, _, bits = prefix.partition("/")
    family, kind = (IPV6, AF_INET6) if ":" in address else (IPV4, AF_INET)
    return _ipcache_key.pack(32 + int(bits), 0, 0, family, inet_pton(kind, address))


def ipcache_prefix(key: bytes) -> str:
    """The prefix of such a key, as :mod:`ipaddress` writes it."""
    length, _, _, family, ip = _ipcache_key.unpack(key)
    address = inet_ntop(AF_INET, ip[:4]) if family == IPV4 else str(IPv6Address(ip))
    return f"{address}/{length - 32}"


class IpcacheValue(msgspec.Struct, frozen=True):
    """Value of cilium_ipcache, 12 bytes: whose a prefix is and where."""

    SIZE: ClassVar = _ipcache_value.size

    identity: int
    tunnel_endpoint: IPv4Address = IPv4Address(0)
    """The node to tunnel to; 0.0.0.0: here, or no tunnel."""
    encrypt_key: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return _ipcache_value.pack(self.identity, self.tunnel_endpoint.packed, self.encrypt_key, self.flags)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        identity, tunnel_endpoint, encrypt_key, flags = _ipcache_value.unpack(data)
        return cls(identity, IPv4Address(tunnel_endpoint), encrypt_key, flags)
