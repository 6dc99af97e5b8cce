"""The addresses of one range: which are taken.

A new address is looked for from a random offset on, so that a released one is not handed out again at once.
"""

import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Final

from bitarray import bitarray

__all__ = ["AddressRange", "Family", "IPAddress", "IPNetwork", "RangeFull", "address_of", "text_of"]


IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

_CHUNK: Final = 4096
"""Addresses with bits stored together, 512 bytes; made once one of them is taken."""

_WIDEST_IPV6: Final = 65536
"""Of a wider IPv6 network only so many addresses, the first, are used."""


class CachedIPv4(IPv4Address):
    """An address that is used often, with its hash, bytes and text computed once."""

    __slots__ = ("_hashed", "_packed", "text")

    def __init__(self, address: int | str) -> None:
        super().__init__(address)
        self._packed = super().packed
        self._hashed = super().__hash__()
        self.text = inet_ntop(AF_INET, self._packed)

    def __hash__(self) -> int:
        return self._hashed

    @property
    def packed(self) -> bytes:
        """In network order."""
        return self._packed


class CachedIPv6(IPv6Address):
    """As CachedIPv4."""

    __slots__ = ("_hashed", "_packed", "text")

    def __init__(self, address: int | str) -> None:
        super().__init__(address)
        self._packed = super().packed
        self._hashed = super().__hash__()
        self.text = inet_ntop(AF_INET6, self._packed)

    def __hash__(self) -> int:
        return self._hashed

    @property
    def packed(self) -> bytes:
        """In network order."""
        return self._packed


_CACHED: Final = (CachedIPv4, CachedIPv6)


@lru_cache(maxsize=65536)
def address_of(packed: bytes) -> IPAddress:
    """The address with these 4 or 16 bytes in network order."""
    number = int.from_bytes(packed, "big")
    return CachedIPv4(number) if len(packed) == 4 else CachedIPv6(number)


class Family(StrEnum):
    """An address family, named as the API names it."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"

    @classmethod
    def of(cls, ip: IPAddress | IPNetwork) -> "Family":
        """The family of an address or a network."""
        return cls.IPV4 if ip.version == 4 else cls.IPV6

    @property
    def text(self) -> str:
        """As people write it."""
        return "IPv4" if self is Family.IPV4 else "IPv6"


def text_of(ip: IPAddress) -> str:
    """As ``str(ip)`` in a third of the time, and of IPv6 in a tenth."""
    if isinstance(ip, _CACHED):
        return ip.text
    packed = ip.packed
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


class RangeFull(Exception):  # noqa: N818  (named as what happened)
    """No address is left."""


class AddressRange:
    """A set of addresses out of a network.

    The first and the last address are never handed out, except in a /31, /32, /127 or /128, where all are.
    IPv4 networks of 31 or more host bits hold none, nor do IPv6 networks of 127 or more; an IPv6 network of
    16 host bits or more holds 65534. A wide range costs no more than a narrow one: memory follows what is
    taken.
    """

    def __init__(self, network: IPNetwork, random_fraction: Callable[[], float] = random.random) -> None:
        host_bits = network.max_prefixlen - network.prefixlen
        total = network.num_addresses if host_bits < network.max_prefixlen - 1 else 0
        if network.version == 6:
            total = min(total, _WIDEST_IPV6)
        self._address = CachedIPv4 if network.version == 4 else CachedIPv6
        self.network = network
        self.size = total - 2 if total > 2 else total
        """How many addresses can be allocated."""
        self.capacity = max(network.num_addresses - 2, 0)
        """How many Cilium counts: by the prefix alone."""
        self._base = int(network.network_address) + (1 if total > 2 else 0)
        self._chunks: dict[int, bitarray] = {}
        self._count = 0
        self._random_fraction = random_fraction

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ip: IPAddress) -> bool:
        if not self.covers(ip):
            return False
        chunk, bit = divmod(int(ip) - self._base, _CHUNK)
        return chunk in self._chunks and bool(self._chunks[chunk][bit])

    def __iter__(self) -> Iterator[IPAddress]:
        """What is taken, in order."""
        for number in sorted(self._chunks):
            first = self._base + number * _CHUNK
            for bit in self._chunks[number].search(bitarray("1")):
                yield self._address(first + bit)

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address is one that can be allocated."""
        return ip.version == self.network.version and 0 <= int(ip) - self._base < self.size

    def take_next(self) -> IPAddress:
        """Take some free address; raises RangeFull."""
        if self._count >= self.size:
            raise RangeFull
        start, first_bit = divmod(int(self._random_fraction() * self.size), _CHUNK)
        chunks = -(-self.size // _CHUNK)
        number, bit = start, self._free_bit(start, first_bit)
        while bit < 0:  # ends: a bit is free somewhere, at last before the first one looked at
            number = (number + 1) % chunks
            bit = self._free_bit(number, 0)
        self._chunk(number)[bit] = 1
        self._count += 1
        return self._address(self._base + number * _CHUNK + bit)

    def take(self, ip: IPAddress) -> bool:
        """Take this address, which the range must cover; False if it is taken already."""
        number, bit = divmod(int(ip) - self._base, _CHUNK)
        chunk = self._chunk(number)
        if chunk[bit]:
            return False
        chunk[bit] = 1
        self._count += 1
        return True

    def give_back(self, ip: IPAddress) -> bool:
        """Free this address; False if it was not taken."""
        if ip not in self:
            return False
        number, bit = divmod(int(ip) - self._base, _CHUNK)
        chunk = self._chunks[number]
        chunk[bit] = 0
        self._count -= 1
        if not chunk.any():
            del self._chunks[number]
        return True

    def _free_bit(self, number: int, start: int) -> int:
        """The first free bit of a chunk from ``start`` on, -1 if there is none."""
        chunk = self._chunks.get(number)
        return start if chunk is None else chunk.find(0, start)

    def _chunk(self, number: int) -> bitarray:
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = bitarray(min(_CHUNK, self.size - number * _CHUNK))
            chunk.setall(0)
            self._chunks[number] = chunk
        return chunk
