"""LB-IPAM's allocation: requests of services, and plan(), a pure function of pools and requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from operator import itemgetter
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.kubernetes.objects.kind import Key, LabelSelector
from cells.operator.lb_ipam.pools import Address, AddressPool, Grant, Plan, PoolRange, index_of
from cells.operator.objects import BalancedServiceSpec, ClusterService

# What a service requests of LB-IPAM, and whether two services may share an address.
#
# Source: Cilium 1.17: annotations lbipam.cilium.io/… and their older names; the first one found applies.

IPS: Final = ("lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips")
SHARING: Final = ("lbipam.cilium.io/sharing-key", "io.cilium/lb-ipam-sharing-key")
ACROSS: Final = (
    "lbipam.cilium.io/sharing-cross-namespace",
    "io.cilium/lb-ipam-sharing-cross-namespace",
)
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"


class AllocationRequest(msgspec.Struct, frozen=True):
    """A service's request for addresses."""

    key: Key
    uid: str
    labels: dict[str, str]
    versions: tuple[int, ...]
    """The IP families."""
    wanted: tuple[Address, ...]
    """The requested addresses; empty for any."""
    sharing: str
    across: frozenset[str]
    """Other namespaces that may share the address; ``*`` for all."""
    ports: frozenset[tuple[int, str]]
    """Port numbers and protocols; protocols are empty if agents do not distinguish them."""
    policy: str
    selector: tuple[tuple[str, str], ...]
    has: tuple[Address, ...]
    """The current addresses, from the service's status."""

    def matches(self, pool: AddressPool) -> bool:
        """Whether the pool selects the service."""
        return pool.selector is None or pool.selector.matches(self.labels)


def request_of(
    service: ClusterService, versions: Collection[int], *, proto_diff: bool = True
) -> AllocationRequest:
    """Return a service's request in a cluster with these IP families.

    Without ``proto_diff`` a port conflicts with the same number of every protocol.
    """
    spec = service.spec
    ports = ((one.port, one.protocol or "TCP") for one in spec.ports or ())
    return AllocationRequest(
        key=service.key,
        uid=service.metadata.uid,
        labels={**service.labels, NAME: service.name, NAMESPACE: service.namespace},
        versions=tuple(_versions(spec, versions)),
        wanted=_wanted(service),
        sharing=_annotation(service, SHARING),
        across=frozenset(one for one in _annotation(service, ACROSS).split(",") if one),
        ports=frozenset((number, protocol if proto_diff else "") for number, protocol in ports),
        policy=spec.external_traffic_policy or "Cluster",
        selector=tuple(sorted((spec.selector or {}).items())),
        has=_addresses(service.addresses),
    )


def _versions(spec: BalancedServiceSpec, cluster: Collection[int]) -> list[int]:
    """Return the requested IP families; a single one is requested even if the cluster does not have it."""
    families = {"IPv4": 4, "IPv6": 6}
    asked = [families[one] for one in spec.ip_families or () if one in families] or sorted(cluster)
    if spec.ip_family_policy == "RequireDualStack":
        return sorted(cluster)
    if spec.ip_family_policy == "PreferDualStack":
        return sorted(set(asked) & set(cluster))
    return asked[:1]


def incompatible(one: AllocationRequest, other: AllocationRequest) -> str:
    """Return why two services cannot share an address, or an empty string.

    Services without a sharing key never share.
    """
    if not one.sharing or one.sharing != other.sharing:
        return "different sharing key"
    if one.key[0] != other.key[0] and not (_shares_with(one, other) and _shares_with(other, one)):
        return "different and not permitted namespace"
    if one.ports & other.ports:
        return "same port"
    if one.policy != other.policy:
        return "different ExternalTrafficPolicy"
    if one.policy == "Local" and (one.selector != other.selector or not one.selector):
        return "compatible ExternalTrafficPolicy local but selecting different set of pods"
    return ""


def _shares_with(one: AllocationRequest, other: AllocationRequest) -> bool:
    return "*" in one.across or other.key[0] in one.across


def _annotation(service: ClusterService, names: tuple[str, ...]) -> str:
    return next((service.annotations[name] for name in names if name in service.annotations), "")


def _wanted(service: ClusterService) -> tuple[Address, ...]:
    texts = [service.spec.load_balancer_ip, *_annotation(service, IPS).split(",")]
    return tuple(dict.fromkeys(_addresses(texts)))


def _addresses(texts: Collection[str]) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in texts:
        with suppress(ValueError):  # an invalid address is ignored
            found.append(ip_address(text.strip()))
    return tuple(found)


# Allocates addresses, as a pure function of pools and requests.
#
# Source: Cilium 1.17, operator/pkg/lbipam. Unlike Cilium, services keep their addresses before new ones are
#         allocated, also when the operator restarts.

NO_POOL = "There are no enabled CiliumLoadBalancerIPPools that match this service"
EXHAUSTED = "All enabled CiliumLoadBalancerIPPools that match this service ran out of allocatable IPs"


class _Holders:
    """The services that share an address."""

    def __init__(self) -> None:
        self.services: list[AllocationRequest] = []
        self._ports: set[tuple[int, str]] = set()
        self._sides: dict[tuple[str, frozenset[str]], AllocationRequest] = {}
        """(namespace, other namespaces) -> one of its services, without ports."""

    def add(self, request: AllocationRequest) -> None:
        self.services.append(request)
        self._ports |= request.ports
        if (side := (request.key[0], request.across)) not in self._sides:
            self._sides[side] = replace(request, ports=frozenset())

    def admit(self, request: AllocationRequest) -> bool:
        """Whether a service is compatible with all holders; independent of their number."""
        return request.ports.isdisjoint(self._ports) and not any(
            incompatible(request, one) for one in self._sides.values()
        )


class _SharedAddresses:
    """The allocated addresses of a range that have one sharing key, in order of allocation."""

    def __init__(self) -> None:
        self._addresses: list[tuple[int, Address]] = []
        """Addresses with their order of allocation."""
        self._rejected: dict[Hashable, int] = {}
        """Kind of request -> number of leading addresses it cannot share; addresses are not freed in a plan.
        """

    def add(self, order: int, address: Address) -> None:
        self._addresses.append((order, address))

    def first(
        self, request: AllocationRequest, holders: Mapping[Address, _Holders]
    ) -> tuple[int, Address] | None:
        """Return the first address that a service may share, with its order, or None."""
        kind = (request.ports, request.policy, request.selector, request.key[0], request.across)
        start = self._rejected.get(kind, 0)
        for at in range(start, len(self._addresses)):
            if holders[self._addresses[at][1]].admit(request):
                self._rejected[kind] = at
                return self._addresses[at]
        self._rejected[kind] = len(self._addresses)
        return None


class _Selected:
    """Pools with one selector that allocate addresses."""

    def __init__(self, selector: LabelSelector | None) -> None:
        self.selector = selector
        self.ranges: dict[int, list[tuple[tuple[int, int], PoolRange]]] = {4: [], 6: []}
        """Family -> ranges with their order, sorted by it."""
        self.exhausted = {4: 0, 6: 0}
        """Family -> number of leading ranges without a free address; addresses are not freed in a plan."""

    def selects(self, request: AllocationRequest) -> bool:
        return self.selector is None or self.selector.matches(request.labels)


class _Allocation:
    """The allocated addresses and their holders while a plan is computed."""

    def __init__(self, pools: Sequence[AddressPool]) -> None:
        self.pools = pools
        self._index = index_of(pool.ranges for pool in pools)
        self.holders: dict[Address, _Holders] = {}
        self.held: dict[Key, list[Address]] = {}
        self._shared: dict[str, dict[PoolRange, _SharedAddresses]] = {}
        """Shared addresses, by sharing key and allocatable range."""
        self._lowest: dict[PoolRange, int] = {}
        """Range -> number below which no address is free; addresses are not freed in a plan."""
        self._selected: dict[tuple[str, str] | None, list[_Selected]] = {}
        """One of the labels that selectors require, or None, -> the pools with such selectors."""
        self._selecting: dict[PoolRange, _Selected] = {}
        """Allocatable range -> the pools with its selector; such ranges do not overlap."""
        groups: dict[bytes, _Selected] = {}
        for number, pool in enumerate(pools):
            if not pool.allocatable:
                continue
            key = msgspec.json.encode(pool.selector, order="deterministic")
            if (group := groups.get(key)) is None:
                group = groups[key] = _Selected(pool.selector)
                required = (pool.selector.match_labels if pool.selector is not None else None) or {}
                self._selected.setdefault(next(iter(required.items()), None), []).append(group)
            for at, one in enumerate(pool.ranges):
                order = (pool.order[at], 0) if pool.order else (number, at)
                group.ranges[one.first.version].append((order, one))
                self._selecting[one] = group
        for group in groups.values():
            for ranges in group.ranges.values():
                ranges.sort(key=itemgetter(0))

    def _matching(self, request: AllocationRequest, version: int) -> list[_Selected]:
        """The pools that select a service and have addresses of a family."""
        candidates = chain(
            self._selected.get(None, ()), *(self._selected.get(label, ()) for label in request.labels.items())
        )
        return [one for one in candidates if one.ranges[version] and one.selects(request)]

    def assign(self, request: AllocationRequest, address: Address) -> None:
        if address not in self.holders:
            self.holders[address] = _Holders()
            if request.sharing and (within := self._range(address)) is not None:
                shared = self._shared.setdefault(request.sharing, {})
                shared.setdefault(within, _SharedAddresses()).add(len(self.holders), address)
        self.holders[address].add(request)
        self.held.setdefault(request.key, []).append(address)

    def containing(self, address: Address) -> list[tuple[AddressPool, PoolRange]]:
        """The pools that contain an address, with the first such range of each."""
        found: dict[int, PoolRange] = {}
        for number, _, one in self._index.overlapping(address, address):
            found.setdefault(number, one)
        return [(self.pools[number], one) for number, one in found.items()]

    def _range(self, address: Address) -> PoolRange | None:
        """Return the allocatable range that contains an address; such ranges do not overlap."""
        return next((one for pool, one in self.containing(address) if pool.allocatable), None)

    def _free(self, groups: Sequence[_Selected], version: int) -> Address | None:
        """Return the first free address of these pools, or None."""
        while True:
            left = [
                (*one.ranges[version][one.exhausted[version]], one)
                for one in groups
                if one.exhausted[version] < len(one.ranges[version])
            ]
            if not left:
                return None
            _, within, group = min(left, key=itemgetter(0))
            if (free := self.lowest_free(within)) is not None:
                return free
            group.exhausted[version] += 1

    def lowest_free(self, within: PoolRange) -> Address | None:
        """Return the lowest free address of a range, or None."""
        last, kind = int(within.last), type(within.first)
        for number in range(self._lowest.get(within, int(within.first)), last + 1):
            address = kind(number)
            if address not in self.holders and address not in within.reserved:
                self._lowest[within] = number
                return address
        self._lowest[within] = last + 1
        return None

    def obstacle(self, request: AllocationRequest, address: Address) -> tuple[str, str] | None:
        """Return reason and message if other holders prevent a service from having an address."""
        if (holders := self.holders.get(address)) is None or holders.admit(request):
            return None
        for other in holders.services:
            if why := incompatible(request, other):
                if not request.sharing:
                    return _taken(address)
                return (
                    "already_allocated_incompatible_service",
                    f"The IP '{address}' is already allocated to an incompatible service. Reason: {why}",
                )
        return None

    def may_keep(self, request: AllocationRequest, address: Address) -> bool:
        """Whether a service may keep an address: requested, in a matching pool, without a conflict.

        It keeps an address that has been reserved since.
        """
        if address.version not in request.versions or (request.wanted and address not in request.wanted):
            return False
        inside = any(request.matches(pool) for pool, _ in self.containing(address))
        return inside and self.obstacle(request, address) is None

    def allocate_requested(self, request: AllocationRequest, address: Address) -> tuple[str, str] | None:
        """Allocate a requested address; return reason and message on failure."""
        inside = False
        for pool, within in self.containing(address):
            if not pool.allocatable:
                continue
            inside = True
            if not request.matches(pool):
                continue
            if address in within.reserved and address not in self.holders:
                return _taken(address)
            if (why := self.obstacle(request, address)) is not None:
                return why
            self.assign(request, address)
            return None
        if inside:
            what = f"The pool with the CIDR containing '{address}', doesn't select this service"
            return "pool_selector_mismatch", what
        return "no_pool", f"No pool exists with a CIDR containing '{address}'"

    def allocate_any(self, request: AllocationRequest, version: int) -> tuple[str, str] | None:
        """Allocate an address of a family: one to share, else the lowest free one.

        Returns reason and message on failure.
        """
        groups = self._matching(request, version)
        if not groups:
            return "no_pool", NO_POOL
        if request.sharing:
            shared = self._shared.get(request.sharing, {}).items()
            known = [
                found.first(request, self.holders)
                for within, found in shared
                if within.first.version == version and self._selecting[within].selects(request)
            ]
            if addresses := [one for one in known if one is not None]:
                self.assign(request, min(addresses, key=itemgetter(0))[1])
                return None
        if (free := self._free(groups, version)) is not None:
            self.assign(request, free)
            return None
        return "out_of_ips", EXHAUSTED

    def allocate(self, request: AllocationRequest) -> tuple[str, str] | None:
        """Allocate the missing addresses; return reason and message of the last failure."""
        wrong: tuple[str, str] | None = None
        held = self.held.get(request.key, [])
        if request.wanted:
            for address in request.wanted:
                if address not in held:
                    wrong = self.allocate_requested(request, address) or wrong
            return wrong
        for version in request.versions:
            if all(one.version != version for one in held):
                wrong = self.allocate_any(request, version) or wrong
        return wrong


def _taken(address: Address) -> tuple[str, str]:
    return "already_allocated", f"The IP '{address}' is already allocated to another service"


def plan(
    pools: Sequence[AddressPool], requests: Sequence[AllocationRequest], changed: Collection[Key] = ()
) -> Plan:
    """Allocate the addresses of all services; of conflicting requests the first in the sequence wins.

    A service with a changed request keeps an address only if the other services that have it allow it.
    """
    allocation = _Allocation(pools)
    for request in sorted(requests, key=lambda one: one.key in changed):
        for address in request.has:
            if allocation.may_keep(request, address):
                allocation.assign(request, address)
    grants: dict[Key, Grant] = {}
    for request in requests:
        wrong = allocation.allocate(request)
        addresses = tuple(allocation.held.get(request.key, ()))  # retained ones first, as of Cilium
        grants[request.key] = Grant(addresses, *(wrong or ("satisfied", "")))
    used = Counter(pool.name for address in allocation.holders for pool, _ in allocation.containing(address))
    reserved = {
        pool.name: sum(one not in allocation.holders for each in pool.ranges for one in each.reserved)
        for pool in pools
    }
    return Plan(grants, used, reserved)
