"""IP address types, a set of the allocated addresses of a range, and an index of spans of addresses.

AddressRange is used by IPAM. It searches a free address from a random offset, so that a released address is
not reused at once.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import accumulate
from operator import itemgetter
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Final, Generic, TypeVar

from bitarray import bitarray

__all__ = [
    "AddressRange",
    "Family",
    "IPAddress",
    "IPNetwork",
    "RangeFull",
    "SpanIndex",
    "address_of",
    "text_of",
]


IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

_CHUNK: Final = 4096
"""Addresses per bitmap (512 bytes); a bitmap exists while one of its addresses is allocated."""

_WIDEST_IPV6: Final = 65536
"""Maximum number of addresses of an IPv6 network that are used, from its start."""


class CachedIPv4(IPv4Address):
    """An IPv4 address with cached hash, packed bytes and text."""

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
        """The address in network byte order."""
        return self._packed


class CachedIPv6(IPv6Address):
    """An IPv6 address with cached hash, packed bytes and text."""

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
        """The address in network byte order."""
        return self._packed


_CACHED: Final = (CachedIPv4, CachedIPv6)


@lru_cache(maxsize=65536)
def address_of(packed: bytes) -> IPAddress:
    """Return the address for 4 or 16 bytes in network byte order; cached."""
    number = int.from_bytes(packed, "big")
    return CachedIPv4(number) if len(packed) == 4 else CachedIPv6(number)


class Family(StrEnum):
    """An address family; values are those of the API."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"

    @classmethod
    def of(cls, ip: IPAddress | IPNetwork) -> "Family":
        """Return the family of an address or network."""
        return cls.IPV4 if ip.version == 4 else cls.IPV6

    @property
    def text(self) -> str:
        """The family for messages: IPv4 or IPv6."""
        return "IPv4" if self is Family.IPV4 else "IPv6"


def text_of(ip: IPAddress) -> str:
    """Return ``str(ip)``, in a third of its time for IPv4 and a tenth for IPv6."""
    if isinstance(ip, _CACHED):
        return ip.text
    packed = ip.packed
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


class RangeFull(Exception):  # noqa: N818  (named as what happened)
    """Raised when no free address is left."""


class AddressRange:
    """The allocated addresses of a network.

    The first and last address are never allocated, except in a /31, /32, /127 or /128. IPv4 networks with 31
    or more host bits have no addresses, nor have IPv6 networks with 127 or more; of an IPv6 network with 16
    or more host bits 65534 addresses are used. Memory depends on the number of allocated addresses, not on
    the size of the network.
    """

    def __init__(self, network: IPNetwork, random_fraction: Callable[[], float] = random.random) -> None:
        host_bits = network.max_prefixlen - network.prefixlen
        total = network.num_addresses if host_bits < network.max_prefixlen - 1 else 0
        if network.version == 6:
            total = min(total, _WIDEST_IPV6)
        self._address = CachedIPv4 if network.version == 4 else CachedIPv6
        self.network = network
        self.size = total - 2 if total > 2 else total
        """Number of addresses that can be allocated."""
        self.capacity = max(network.num_addresses - 2, 0)
        """The capacity as Cilium computes it, from the prefix length alone."""
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
        """Yield the allocated addresses in order."""
        for number in sorted(self._chunks):
            first = self._base + number * _CHUNK
            for bit in self._chunks[number].search(bitarray("1")):
                yield self._address(first + bit)

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address can be allocated from this range."""
        return ip.version == self.network.version and 0 <= int(ip) - self._base < self.size

    def allocate_next(self) -> IPAddress:
        """Allocate a free address. Raises RangeFull."""
        if self._count >= self.size:
            raise RangeFull
        start, first_bit = divmod(int(self._random_fraction() * self.size), _CHUNK)
        chunks = -(-self.size // _CHUNK)
        number, bit = start, self._free_bit(start, first_bit)
        while bit < 0:  # terminates: some bit is free, if need be one before the first bit tried
            number = (number + 1) % chunks
            bit = self._free_bit(number, 0)
        self._chunk(number)[bit] = 1
        self._count += 1
        return self._address(self._base + number * _CHUNK + bit)

    def allocate(self, ip: IPAddress) -> bool:
        """Allocate this address, which the range must cover. Returns False if it is allocated already."""
        number, bit = divmod(int(ip) - self._base, _CHUNK)
        chunk = self._chunk(number)
        if chunk[bit]:
            return False
        chunk[bit] = 1
        self._count += 1
        return True

    def release(self, ip: IPAddress) -> bool:
        """Release this address. Returns False if it is not allocated."""
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
        """Return the first free bit of a chunk at or after ``start``; -1 if there is none."""
        chunk = self._chunks.get(number)
        return start if chunk is None else chunk.find(0, start)

    def _chunk(self, number: int) -> bitarray:
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = bitarray(min(_CHUNK, self.size - number * _CHUNK))
            chunk.setall(0)
            self._chunks[number] = chunk
        return chunk


T = TypeVar("T")


class SpanIndex(Generic[T]):
    """Finds the spans of addresses that overlap one, without a look at each. Spans may overlap."""

    def __init__(self, spans: Iterable[tuple[IPAddress, IPAddress, T]]) -> None:
        """``spans``: the first and the last address of each, of one family, and what it stands for."""
        self._rows: dict[int, list[tuple[int, int, int, T]]] = {4: [], 6: []}
        """Family -> first and last number, position among all, and what it stands for, in this order."""
        for at, (first, last, of) in enumerate(spans):
            self._rows[first.version].append((int(first), int(last), at, of))
        self._highest: dict[int, list[int]] = {}
        """Family -> the highest last number of each row and those before it."""
        for version, rows in self._rows.items():
            rows.sort(key=itemgetter(0, 1, 2))
            self._highest[version] = list(accumulate((row[1] for row in rows), max))

    def overlapping(self, first: IPAddress, last: IPAddress) -> list[T]:
        """What the spans stand for that have addresses from first to last, in the order they were given."""
        rows, highest, lowest = self._rows[first.version], self._highest[first.version], int(first)
        at = bisect_right(rows, int(last), key=itemgetter(0))
        found = []
        while at and highest[at - 1] >= lowest:
            at -= 1
            if rows[at][1] >= lowest:
                found.append(rows[at][2:])
        return [of for _, of in sorted(found, key=itemgetter(0))]
