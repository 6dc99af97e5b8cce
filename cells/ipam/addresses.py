"""The addresses of one range: which are taken.

For:    Ipam. Needs: bitarray. Gives: AddressRange.
A new address is looked for from a random offset on, so that a released one is not handed out again at once.
"""

import random
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network

from bitarray import bitarray


class RangeFull(Exception):  # noqa: N818  (named as what happened)
    """No address is left."""


class AddressRange:
    """A set of addresses out of a network.

    The first and the last address are never handed out, except in a /31 or /32, where all are. Networks of
    31 or more host bits hold none.
    """

    def __init__(self, network: IPv4Network, random_fraction: Callable[[], float] = random.random) -> None:
        host_bits = network.max_prefixlen - network.prefixlen
        total = network.num_addresses if host_bits < 31 else 0
        self.network = network
        self.size = total - 2 if total > 2 else total
        """How many addresses can be allocated."""
        self._base = int(network.network_address) + (1 if total > 2 else 0)
        self._taken = bitarray(self.size)  # zeros
        self._taken.setall(0)
        self._count = 0
        self._random_fraction = random_fraction

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ip: IPv4Address) -> bool:
        offset = int(ip) - self._base
        return 0 <= offset < self.size and bool(self._taken[offset])

    def __iter__(self) -> Iterator[IPv4Address]:
        base = self._base
        return (IPv4Address(base + offset) for offset in self._taken.search(bitarray("1")))

    def covers(self, ip: IPv4Address) -> bool:
        """Whether the address is one that can be allocated."""
        return 0 <= int(ip) - self._base < self.size

    def take_next(self) -> IPv4Address:
        """Take some free address; raises RangeFull."""
        if self._count >= self.size:
            raise RangeFull
        start = int(self._random_fraction() * self.size)
        offset = self._taken.find(0, start)
        if offset < 0:
            offset = self._taken.find(0, 0, start)
        self._taken[offset] = 1
        self._count += 1
        return IPv4Address(self._base + offset)

    def take(self, ip: IPv4Address) -> bool:
        """Take this address, which the range must cover; False if it is taken already."""
        offset = int(ip) - self._base
        if self._taken[offset]:
            return False
        self._taken[offset] = 1
        self._count += 1
        return True

    def give_back(self, ip: IPv4Address) -> bool:
        """Free this address; False if it was not taken."""
        if ip not in self:
            return False
        self._taken[int(ip) - self._base] = 0
        self._count -= 1
        return True
