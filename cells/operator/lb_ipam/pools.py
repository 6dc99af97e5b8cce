"""Pools of addresses: their ranges, and which of them contradict each other.

Needs: nothing.   Gives: AddressRange, AddressPool, address_pools().
Source: Cilium 1.17, CiliumLoadBalancerIPPool: blocks are networks or ranges; the newer of two that overlap is
        in conflict and gives nothing out, what it has given stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import msgspec

from cells.kubernetes import Selector
from cells.operator.lb_ipam.kinds import Block, LoadBalancerPool

Address = IPv4Address | IPv6Address


class AddressRange(msgspec.Struct, frozen=True):
    """Addresses from the first to the last."""

    first: Address
    last: Address
    reserved: frozenset[Address] = frozenset()
    """Those of it that are not given out: network and broadcast address, when the pool says so."""

    @property
    def size(self) -> int:
        """How many addresses it has."""
        return int(self.last) - int(self.first) + 1

    def __contains__(self, address: Address) -> bool:
        return address.version == self.first.version and self.first <= address <= self.last  # type: ignore[operator]  # one version

    def overlaps(self, other: AddressRange) -> bool:
        """Whether they have an address in common."""
        return other.first in self or self.first in other

    def free(self, taken: Iterable[Address]) -> Address | None:
        """The lowest address that nobody has; None when there is none."""
        used = {int(one) for one in (*taken, *self.reserved) if one in self}
        number = int(self.first)
        while number in used:
            number += 1
        return type(self.first)(number) if number <= int(self.last) else None

    def __str__(self) -> str:
        return f"{self.first} - {self.last}"


class AddressPool(msgspec.Struct, frozen=True):
    """A pool that can be read."""

    name: str
    ranges: tuple[AddressRange, ...]
    selector: Selector | None
    disabled: bool
    conflict: str = ""
    """Why it gives nothing out: the text of its condition."""

    @property
    def gives(self) -> bool:
        """Whether addresses are given out of it."""
        return not self.disabled and not self.conflict

    @property
    def size(self) -> int:
        """How many addresses it has."""
        return sum(one.size for one in self.ranges)

    def range_of(self, address: Address) -> AddressRange | None:
        """The range that an address is in."""
        return next((one for one in self.ranges if address in one), None)


def ranges_of(pool: LoadBalancerPool) -> tuple[AddressRange, ...]:
    """The ranges of a pool. Raises ValueError, which says which block cannot be read."""
    reserve = pool.spec.allow_first_last_ips == "No"
    return tuple(_range(block, reserve=reserve) for block in pool.spec.blocks or ())


def _range(block: Block, *, reserve: bool) -> AddressRange:
    if block.cidr:
        network = ip_network(block.cidr, strict=False)
        first, last = network.network_address, network.broadcast_address
        small = network.max_prefixlen - network.prefixlen < 2
        return AddressRange(first, last, frozenset({first, last}) if reserve and not small else frozenset())
    if not block.start:
        raise ValueError("block: expected cidr or start")
    first, last = ip_address(block.start), ip_address(block.stop or block.start)
    if first.version != last.version or int(first) > int(last):
        raise ValueError(f"block {first} - {last}: expected two addresses of one family, the lower one first")
    return AddressRange(first, last)


def address_pools(pools: Iterable[LoadBalancerPool]) -> tuple[list[AddressPool], dict[str, str]]:
    """All pools that can be read, oldest first, and what is wrong with each of the others."""
    found: list[AddressPool] = []
    broken: dict[str, str] = {}
    for pool in sorted(pools, key=lambda one: (one.metadata.creation_timestamp, one.name)):
        try:
            ranges = ranges_of(pool)
        except ValueError as error:
            broken[pool.name] = str(error)
            continue
        conflict = next(_conflicts(pool.name, ranges, found), "")
        found.append(AddressPool(pool.name, ranges, pool.spec.service_selector, pool.spec.disabled, conflict))
    return found, broken


def _conflicts(name: str, ranges: tuple[AddressRange, ...], older: list[AddressPool]) -> Iterator[str]:
    known = [(one, pool.name) for pool in older for one in pool.ranges]
    for number, one in enumerate(ranges):
        pairs = [(one, other, of) for other, of in known] + [(own, one, name) for own in ranges[:number]]
        for mine, other, of in pairs:
            if mine.overlaps(other):
                yield f"Pool conflicts since range '{mine}' overlaps range '{other}' from IP Pool '{of}'"
