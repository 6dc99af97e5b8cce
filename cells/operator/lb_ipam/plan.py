"""Who gets which address: one pure function of everything there is.

Needs: AddressPool, Request.   Gives: Plan, Grant, plan().
Source: Cilium 1.17, operator/pkg/lbipam. Other than there, what a service has is its own before anybody else
        gets anything, also when the operator starts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from cells.kubernetes import Key
from cells.operator.lb_ipam.pools import Address, AddressPool
from cells.operator.lb_ipam.requests import Request, incompatible

NO_POOL = "There are no enabled CiliumLoadBalancerIPPools that match this service"
EXHAUSTED = "All enabled CiliumLoadBalancerIPPools that match this service ran out of allocatable IPs"


class Grant(msgspec.Struct, frozen=True):
    """What a service has, and what is said of its request."""

    addresses: tuple[Address, ...]
    reason: str = "satisfied"
    message: str = ""

    @property
    def satisfied(self) -> bool:
        """Whether it has all that it asked for."""
        return self.reason == "satisfied"


class Plan(msgspec.Struct, frozen=True):
    """What all services have, and how much of each pool is used."""

    grants: Mapping[Key, Grant]
    used: Mapping[str, int]


class _Allocation:
    """Addresses and whose they are, while a plan is made."""

    def __init__(self, pools: Sequence[AddressPool]) -> None:
        self.pools = pools
        self.holders: dict[Address, list[Request]] = {}
        self.held: dict[Key, list[Address]] = {}

    def give(self, request: Request, address: Address) -> None:
        self.holders.setdefault(address, []).append(request)
        self.held.setdefault(request.key, []).append(address)

    def obstacle(self, request: Request, address: Address) -> tuple[str, str] | None:
        """Why a service cannot have an address that others have; None when it can."""
        for other in self.holders.get(address, ()):
            if why := incompatible(request, other):
                if not request.sharing or not other.sharing:
                    return "already_allocated", f"The IP '{address}' is already allocated to another service"
                return (
                    "already_allocated_incompatible_service",
                    f"The IP '{address}' is already allocated to an incompatible service. Reason: {why}",
                )
        return None

    def keeps(self, request: Request, address: Address) -> bool:
        """Whether what a service has is still right: for it, in a pool for it, and nobody else's."""
        if address.version not in request.versions or (request.wanted and address not in request.wanted):
            return False
        inside = any(
            (found := pool.range_of(address)) is not None
            and address not in found.reserved
            and request.matches(pool)
            for pool in self.pools
        )
        return inside and self.obstacle(request, address) is None

    def request(self, request: Request, address: Address) -> tuple[str, str] | None:
        """Give an address that is asked for; else why not."""
        for pool in self.pools:
            found = pool.range_of(address)
            if found is None or address in found.reserved or not pool.gives or not request.matches(pool):
                continue
            if (why := self.obstacle(request, address)) is not None:
                return why
            self.give(request, address)
            return None
        return "no_pool", f"No pool exists with a CIDR containing '{address}'"

    def any(self, request: Request, version: int) -> tuple[str, str] | None:
        """Give an address of a family: one that it may share, else the lowest that is free; else why not."""
        pools = [
            pool
            for pool in self.pools
            if pool.gives
            and request.matches(pool)
            and any(one.first.version == version for one in pool.ranges)
        ]
        if not pools:
            return "no_pool", NO_POOL
        if request.sharing:
            for address in sorted(
                (one for one in self.holders if one.version == version), key=int
            ):  # the lowest that is shared under this key
                shared = all(other.sharing == request.sharing for other in self.holders[address])
                inside = any(pool.range_of(address) is not None for pool in pools)
                if shared and inside and self.obstacle(request, address) is None:
                    self.give(request, address)
                    return None
        for pool in pools:
            for one in pool.ranges:
                if one.first.version == version and (free := one.free(self.holders)) is not None:
                    self.give(request, free)
                    return None
        return "out_of_ips", EXHAUSTED

    def serve(self, request: Request) -> tuple[str, str] | None:
        """Give what is missing; what went wrong last."""
        wrong: tuple[str, str] | None = None
        held = self.held.get(request.key, [])
        if request.wanted:
            for address in request.wanted:
                if address not in held:
                    wrong = self.request(request, address) or wrong
            return wrong
        for version in request.versions:
            if all(one.version != version for one in held):
                wrong = self.any(request, version) or wrong
        return wrong


def plan(pools: Sequence[AddressPool], requests: Sequence[Request]) -> Plan:
    """The addresses of all services; of those that want the same, the first in the sequence gets it."""
    allocation = _Allocation(pools)
    for request in requests:
        for address in request.has:
            if allocation.keeps(request, address):
                allocation.give(request, address)
    grants: dict[Key, Grant] = {}
    for request in requests:
        wrong = allocation.serve(request)
        addresses = tuple(allocation.held.get(request.key, ()))
        if request.wanted:
            addresses = tuple(sorted(addresses, key=request.wanted.index))
        grants[request.key] = Grant(addresses, *(wrong or ("satisfied", "")))
    used = Counter(
        pool.name for address in allocation.holders for pool in pools if pool.range_of(address) is not None
    )
    return Plan(grants, used)
