"""Who gets which address: pools, requests of services, and one pure function of everything there is.

Source: Cilium 1.17, custom resource of group cilium.io, version v2alpha1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.kubernetes.objects.cilium_pools import CILIUM_LOAD_BALANCER_IP_POOLS
from cells.kubernetes.objects.kind import Condition, DatedMeta, Key, Kind, LabelSelector, Object
from cells.operator.objects import ClusterService


class _PoolPart(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object."""


class PoolMeta(DatedMeta, frozen=True, gc=False):
    """With its generation."""

    generation: int = 0


class PoolBlock(_PoolPart, frozen=True, gc=False):
    """A network, or a range from ``start`` to ``stop``."""

    cidr: str = ""
    start: str = ""
    stop: str = ""


class PoolSpec(_PoolPart, frozen=True, gc=False):
    """The addresses of a pool, and their owners."""

    blocks: tuple[PoolBlock, ...] | None = None
    service_selector: LabelSelector | None = None
    disabled: bool = False
    allow_first_last_ips: str = msgspec.field(name="allowFirstLastIPs", default="")


class PoolStatus(_PoolPart, frozen=True, gc=False):
    """A pool's conditions."""

    conditions: tuple[Condition, ...] | None = None


class LoadBalancerPool(Object, frozen=True, gc=False):
    """Addresses for services."""

    metadata: PoolMeta
    spec: PoolSpec = PoolSpec()
    status: PoolStatus = PoolStatus()


LOAD_BALANCER_POOLS: Final = Kind(
    LoadBalancerPool,
    CILIUM_LOAD_BALANCER_IP_POOLS.api_version,
    CILIUM_LOAD_BALANCER_IP_POOLS.plural,
    kind=CILIUM_LOAD_BALANCER_IP_POOLS.kind,
    namespaced=False,
    status=True,
)


# Pools of addresses: their ranges, and which of them contradict each other.
#
# Source: Cilium 1.17, CiliumLoadBalancerIPPool: blocks are networks or ranges; the newer of two that overlap
#         is in conflict and gives nothing out, what it has given stays.

Address = IPv4Address | IPv6Address


class PoolRange(msgspec.Struct, frozen=True):
    """Addresses from the first to the last."""

    first: Address
    last: Address
    reserved: frozenset[Address] = frozenset()
    """Those of it that are not given out: network and broadcast address, when the pool asks for it."""

    @property
    def size(self) -> int:
        """How many addresses it has."""
        return int(self.last) - int(self.first) + 1

    def __contains__(self, address: Address) -> bool:
        return address.version == self.first.version and self.first <= address <= self.last  # type: ignore[operator]  # one version

    def overlaps(self, other: PoolRange) -> bool:
        """Whether they have an address in common."""
        return other.first in self or self.first in other

    def __str__(self) -> str:
        return f"{self.first} - {self.last}"


class AddressPool(msgspec.Struct, frozen=True):
    """A pool that can be read."""

    name: str
    ranges: tuple[PoolRange, ...]
    selector: LabelSelector | None
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

    def range_of(self, address: Address) -> PoolRange | None:
        """The range that an address is in."""
        return next((one for one in self.ranges if address in one), None)


def ranges_of(pool: LoadBalancerPool) -> tuple[PoolRange, ...]:
    """The ranges of a pool. Raises ValueError, which names the block that cannot be read."""
    reserve = pool.spec.allow_first_last_ips == "No"
    return tuple(_range(block, reserve=reserve) for block in pool.spec.blocks or ())


def _range(block: PoolBlock, *, reserve: bool) -> PoolRange:
    if block.cidr:
        network = ip_network(block.cidr, strict=False)
        first, last = network.network_address, network.broadcast_address
        small = network.max_prefixlen - network.prefixlen < 2
        return PoolRange(first, last, frozenset({first, last}) if reserve and not small else frozenset())
    if not block.start:
        raise ValueError("block: expected cidr or start")
    first, last = ip_address(block.start), ip_address(block.stop or block.start)
    if first.version != last.version or int(first) > int(last):
        raise ValueError(f"block {first} - {last}: expected two addresses of one family, the lower one first")
    return PoolRange(first, last)


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


def _conflicts(name: str, ranges: tuple[PoolRange, ...], older: list[AddressPool]) -> Iterator[str]:
    known = [(one, pool.name) for pool in older for one in pool.ranges]
    for number, one in enumerate(ranges):
        pairs = [(one, other, of) for other, of in known] + [(own, one, name) for own in ranges[:number]]
        for mine, other, of in pairs:
            if mine.overlaps(other):
                yield f"Pool conflicts since range '{mine}' overlaps range '{other}' from IP Pool '{of}'"


# What a service asks of LB-IPAM, and whether two services may have one address.
#
# Source: Cilium 1.17: annotations lbipam.cilium.io/…, with their older names; the first that is there counts.

IPS: Final = ("lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips")
SHARING: Final = ("lbipam.cilium.io/sharing-key", "io.cilium/lb-ipam-sharing-key")
ACROSS: Final = (
    "lbipam.cilium.io/sharing-cross-namespace",
    "io.cilium/lb-ipam-sharing-cross-namespace",
)
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
SATISFIED: Final = "cilium.io/IPAMRequestSatisfied"


class AllocationRequest(msgspec.Struct, frozen=True):
    """A service that addresses are given to."""

    key: Key
    uid: str
    labels: dict[str, str]
    versions: tuple[int, ...]
    """The families it wants an address of."""
    wanted: tuple[Address, ...]
    """The addresses it asks for; any will do when there is none."""
    sharing: str
    across: frozenset[str]
    """Namespaces it shares with, besides its own; ``*`` for all."""
    ports: frozenset[tuple[int, str]]
    """Numbers and protocols, which are empty where agents do not distinguish them."""
    policy: str
    selector: tuple[tuple[str, str], ...]
    has: tuple[Address, ...]
    """The addresses it has, by its status."""

    def matches(self, pool: AddressPool) -> bool:
        """Whether a pool is for it."""
        return pool.selector is None or pool.selector.matches(self.labels)


def request_of(
    service: ClusterService, versions: Collection[int], *, proto_diff: bool = True
) -> AllocationRequest:
    """What a service asks for, of the families that there are.

    Without ``proto_diff`` a port number is taken in every protocol, as agents serve it.
    """
    spec = service.spec
    ports = ((one.port, one.protocol or "TCP") for one in spec.ports or ())
    families = {"IPv4": 4, "IPv6": 6}
    asked = {families[one] for one in spec.ip_families or ("IPv4",) if one in families}
    return AllocationRequest(
        key=service.key,
        uid=service.metadata.uid,
        labels={**service.labels, NAME: service.name, NAMESPACE: service.namespace},
        versions=tuple(sorted(asked & set(versions))),
        wanted=_wanted(service),
        sharing=_annotation(service, SHARING),
        across=frozenset(one for one in _annotation(service, ACROSS).split(",") if one),
        ports=frozenset((number, protocol if proto_diff else "") for number, protocol in ports),
        policy=spec.external_traffic_policy or "Cluster",
        selector=tuple(sorted((spec.selector or {}).items())),
        has=_addresses(service.addresses),
    )


def incompatible(one: AllocationRequest, other: AllocationRequest) -> str:
    """Why two services cannot have one address; nothing when they can. No key, no sharing."""
    if not one.sharing or one.sharing != other.sharing:
        return "different sharing key"
    if one.key[0] != other.key[0] and not (_lets_in(one, other) and _lets_in(other, one)):
        return "different namespace"
    if one.ports & other.ports:
        return "same port"
    if one.policy != other.policy:
        return "different externalTrafficPolicy"
    if one.policy == "Local" and one.selector != other.selector:
        return "different selector"
    return ""


def _lets_in(one: AllocationRequest, other: AllocationRequest) -> bool:
    return "*" in one.across or other.key[0] in one.across


def _annotation(service: ClusterService, names: tuple[str, ...]) -> str:
    return next((service.annotations[name] for name in names if name in service.annotations), "")


def _wanted(service: ClusterService) -> tuple[Address, ...]:
    texts = [service.spec.load_balancer_ip, *_annotation(service, IPS).split(",")]
    return tuple(dict.fromkeys(_addresses(texts)))


def _addresses(texts: Collection[str]) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in texts:
        with suppress(ValueError):  # what is not an address asks for nothing
            found.append(ip_address(text.strip()))
    return tuple(found)


# Who gets which address: one pure function of everything there is.
#
# Source: Cilium 1.17, operator/pkg/lbipam. Other than there, what a service has is its own before anybody
#         else gets anything, also when the operator starts anew.

NO_POOL = "There are no enabled CiliumLoadBalancerIPPools that match this service"
EXHAUSTED = "All enabled CiliumLoadBalancerIPPools that match this service ran out of allocatable IPs"


class Grant(msgspec.Struct, frozen=True):
    """A service's addresses, and the condition of its request."""

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


class _Holders:
    """The services that have an address, any two of them compatible."""

    def __init__(self) -> None:
        self.services: list[AllocationRequest] = []
        self._ports: set[tuple[int, str]] = set()
        self._sides: dict[tuple[str, frozenset[str]], AllocationRequest] = {}
        """One service, without ports, of each namespace and list of others that it shares with."""

    def add(self, request: AllocationRequest) -> None:
        self.services.append(request)
        self._ports |= request.ports
        if (side := (request.key[0], request.across)) not in self._sides:
            self._sides[side] = replace(request, ports=frozenset())

    def admit(self, request: AllocationRequest) -> bool:
        """Whether a service is compatible with all, without a look at each."""
        return request.ports.isdisjoint(self._ports) and not any(
            incompatible(request, one) for one in self._sides.values()
        )


class _SharedAddresses:
    """The addresses of a range that services with one sharing key have, as they were given."""

    def __init__(self) -> None:
        self._addresses: list[tuple[int, Address]] = []
        """With how many other addresses were held before."""
        self._rejected: dict[Hashable, int] = {}
        """Kind of request -> how many of the first addresses it cannot have: none comes free in a plan."""

    def add(self, order: int, address: Address) -> None:
        self._addresses.append((order, address))

    def first(
        self, request: AllocationRequest, holders: Mapping[Address, _Holders]
    ) -> tuple[int, Address] | None:
        """The first address that a service may share."""
        kind = (request.ports, request.policy, request.selector, request.key[0], request.across)
        start = self._rejected.get(kind, 0)
        for at in range(start, len(self._addresses)):
            if holders[self._addresses[at][1]].admit(request):
                self._rejected[kind] = at
                return self._addresses[at]
        self._rejected[kind] = len(self._addresses)
        return None


class _Allocation:
    """Addresses and their owners, while a plan is made."""

    def __init__(self, pools: Sequence[AddressPool]) -> None:
        self.pools = pools
        self.holders: dict[Address, _Holders] = {}
        self.held: dict[Key, list[Address]] = {}
        self._shared: dict[tuple[str, PoolRange], _SharedAddresses] = {}
        """By sharing key and range of a pool that gives."""
        self._lowest: dict[PoolRange, int] = {}
        """Below it a range has no free address: none comes free while a plan is made."""

    def give(self, request: AllocationRequest, address: Address) -> None:
        if address not in self.holders:
            self.holders[address] = _Holders()
            if request.sharing and (within := self._range(address)) is not None:
                self._shared.setdefault((request.sharing, within), _SharedAddresses()).add(
                    len(self.holders), address
                )
        self.holders[address].add(request)
        self.held.setdefault(request.key, []).append(address)

    def _range(self, address: Address) -> PoolRange | None:
        """The range that an address is given out of: those of two pools that give do not overlap."""
        found = (pool.range_of(address) for pool in self.pools if pool.gives)
        return next((one for one in found if one is not None), None)

    def free(self, within: PoolRange) -> Address | None:
        """The lowest free address of a range; None when there is none."""
        last, kind = int(within.last), type(within.first)
        for number in range(self._lowest.get(within, int(within.first)), last + 1):
            address = kind(number)
            if address not in self.holders and address not in within.reserved:
                self._lowest[within] = number
                return address
        self._lowest[within] = last + 1
        return None

    def obstacle(self, request: AllocationRequest, address: Address) -> tuple[str, str] | None:
        """Why a service cannot have an address that others have; None when it can."""
        if (holders := self.holders.get(address)) is None or holders.admit(request):
            return None
        for other in holders.services:
            if why := incompatible(request, other):
                if not request.sharing or not other.sharing:
                    return "already_allocated", f"The IP '{address}' is already allocated to another service"
                return (
                    "already_allocated_incompatible_service",
                    f"The IP '{address}' is already allocated to an incompatible service. Reason: {why}",
                )
        return None

    def keeps(self, request: AllocationRequest, address: Address) -> bool:
        """Whether a service's addresses are still right: for it, in a pool for it, and used by no other."""
        if address.version not in request.versions or (request.wanted and address not in request.wanted):
            return False
        inside = any(
            (found := pool.range_of(address)) is not None
            and address not in found.reserved
            and request.matches(pool)
            for pool in self.pools
        )
        return inside and self.obstacle(request, address) is None

    def request(self, request: AllocationRequest, address: Address) -> tuple[str, str] | None:
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

    def any(self, request: AllocationRequest, version: int) -> tuple[str, str] | None:
        """Give an address of a family: the first that it may share, else the lowest free; else why not."""
        ranges = [
            one
            for pool in self.pools
            if pool.gives and request.matches(pool)
            for one in pool.ranges
            if one.first.version == version
        ]
        if not ranges:
            return "no_pool", NO_POOL
        if request.sharing:
            shared = [found for one in ranges if (found := self._shared.get((request.sharing, one)))]
            known = [found.first(request, self.holders) for found in shared]
            if addresses := [one for one in known if one is not None]:
                self.give(request, min(addresses, key=lambda one: one[0])[1])
                return None
        for one in ranges:
            if (free := self.free(one)) is not None:
                self.give(request, free)
                return None
        return "out_of_ips", EXHAUSTED

    def serve(self, request: AllocationRequest) -> tuple[str, str] | None:
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


def plan(pools: Sequence[AddressPool], requests: Sequence[AllocationRequest]) -> Plan:
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
