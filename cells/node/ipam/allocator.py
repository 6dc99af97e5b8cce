"""The allocator of pod addresses: their owners, pools and expiration timers."""

import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import anyio
import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork, RangeFull, text_of
from cells.node.ipam.ranges import (
    FAILED,
    NEXT_FAILED,
    NOT_SUPPORTED,
    NOT_YET,
    AddressRanges,
    IpamError,
    PodRange,
)
from lifecycle import NotStartedError

__all__ = ["EXPIRATION", "Allocation", "Allocator", "Clock"]


# Timers that release addresses unless their use is confirmed.

EXPIRATION: Final = 600.0
"""Seconds until an unconfirmed address is released (Cilium's defaults.IPAMExpiration)."""


class Clock:
    """A monotonic clock, in seconds."""

    def now(self) -> float:
        """Return the seconds since a fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep for some seconds."""
        await anyio.sleep(seconds)


class Expirations:
    """Timers by address. All have the same duration, so the oldest expires first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[IPAddress, tuple[str, float]] = {}

    def __contains__(self, ip: IPAddress) -> bool:
        return ip in self._timers

    def arm(self, ip: IPAddress) -> str:
        """Start a timer and return its uuid. The address must not have one."""
        token = str(uuid.uuid4())
        self._timers[ip] = token, self._clock.now() + EXPIRATION
        return token

    def uuid_of(self, ip: IPAddress) -> str | None:
        """Return the uuid of the address's timer, or None."""
        timer = self._timers.get(ip)
        return timer[0] if timer else None

    def stop(self, ip: IPAddress) -> None:
        """Stop the address's timer, if there is one."""
        self._timers.pop(ip, None)

    def wait(self) -> float | None:
        """Return the seconds until the first timer expires (0 if it has); None without timers."""
        for _, deadline in self._timers.values():
            return max(deadline - self._clock.now(), 0.0)
        return None

    def pop_due(self) -> list[tuple[IPAddress, str]]:
        """Remove the expired timers; return their addresses and uuids."""
        now = self._clock.now()
        due = []
        for ip, (token, deadline) in self._timers.items():
            if deadline > now:
                break
            due.append((ip, token))
        for ip, _ in due:
            del self._timers[ip]
        return due


_ORDER = (Family.IPV6, Family.IPV4)  # order of allocation, as in Cilium
_STATES = ("primary", "secondary", "retired")


class Allocation(msgspec.Struct, frozen=True):
    """An allocated address."""

    ip: IPAddress
    pool: str
    owner: str
    """``namespace/pod``, or another owner: ``router``, ``node-ip``."""
    expiration_uuid: str = ""
    """The uuid that stops the expiration timer; empty without a timer."""


class Allocator:
    """Allocates addresses from the ranges of each family.

    In host scope there is one pool, the default one. Requests may name any pool, as in Cilium, so that
    addresses survive a change of its name. In mode multi-pool (``several``) pools are added and removed. In
    both modes, the pool of an address is found by its ranges.
    """

    def __init__(self, pool: str, clock: Clock, *, several: bool = False) -> None:
        self._pool = pool
        self._several = several
        self._pools: dict[str, dict[Family, AddressRanges]] = {}
        self._families: tuple[Family, ...] = ()
        self.delegated = False
        """Whether another IPAM plugin assigns pods' addresses."""
        self._owners: dict[IPAddress, str] = {}
        self._keys: dict[IPAddress, str] = {}
        """The key of each address in dump(): with the pool's name if it is not the default pool."""
        self._owner_texts: dict[Family, dict[str, str]] = {family: {} for family in Family}
        """Owners by the keys of addresses, cached because dump() is called more often than addresses change.
        """
        self._excluded: dict[IPAddress, str] = {}
        self._reserved: dict[IPAddress, str] = {}
        """Addresses in use that were outside all ranges when they were claimed; a later range may contain
        them.
        """
        self._expirations = Expirations(clock)
        self.allocated = dict.fromkeys(Family, 0)
        """Number of allocations."""
        self.released = dict.fromkeys(Family, 0)
        """Number of releases."""

    def use(self, *networks: IPNetwork, retired: Sequence[IPNetwork] = ()) -> None:
        """Allocate from these networks; the first of a family is primary.

        Addresses of retired networks can be claimed by their owners, but are not allocated.
        """
        self._families = tuple(
            family for family in _ORDER if any(Family.of(network) is family for network in networks)
        )
        ranges = {
            one: AddressRanges(_of_family(one, networks), _of_family(one, retired)) for one in self._families
        }
        self._pools = {self._pool: ranges}
        self._ranges_changed()

    def use_pools(self, families: Collection[Family], retired: Mapping[str, Sequence[IPNetwork]]) -> None:
        """Allocate from pools that follow_pools() sets. Addresses of the retired ranges can be claimed."""
        self._families = tuple(family for family in _ORDER if family in families)
        self._pools = {}
        for pool, networks in retired.items():
            for family in self._families:
                if of := _of_family(family, networks):
                    self._pools.setdefault(pool, {})[family] = AddressRanges([], of)
        self._ranges_changed()

    def delegate(self, families: Collection[Family]) -> None:
        """Allocate nothing: another IPAM plugin assigns pods' addresses."""
        self.delegated = True
        self._families = tuple(family for family in _ORDER if family in families)
        self._ranges_changed()

    def follow(self, family: Family, networks: Sequence[IPNetwork]) -> bool:
        """Allocate from these networks of a family from now on; return whether that is a change.

        A network that is no longer among them is retired while its addresses are in use. An empty list
        changes nothing.
        """
        ranges = self._pools.get(self._pool, {}).get(family)
        if ranges is None or not networks or not ranges.follow(list(networks)):
            return False
        ranges.forget_retired()
        self._ranges_changed()
        return True

    def follow_pools(self, pools: Mapping[str, Sequence[IPNetwork]], *, forget: bool) -> bool:
        """Allocate only from these networks of these pools; return whether that is a change.

        A network that is no longer among them is retired while its addresses are in use. Without ``forget``
        it is retired in any case, because owners may not have claimed its addresses yet.
        """
        changed = False
        for pool in {*pools, *self._pools}:
            for family in self._families:
                networks = _of_family(family, pools.get(pool, ()))
                ranges = self._pools.get(pool, {}).get(family)
                if ranges is None:
                    if not networks:
                        continue
                    ranges = self._pools.setdefault(pool, {})[family] = AddressRanges([])
                changed |= ranges.follow(networks, keep=not forget)
                if forget:
                    changed |= ranges.forget_retired()
        self._drop_empty_pools()
        if changed:
            self._ranges_changed()
        return changed

    def forget_retired(self) -> None:
        """Drop retired networks without addresses in use. Call it once all claims are made."""
        left = [each for _, _, each in self._all_ranges() if each.forget_retired()]
        if left:
            self._drop_empty_pools()
            self._ranges_changed()

    def _drop_empty_pools(self) -> None:
        """Drop pools without networks."""
        if self._several:
            self._pools = {
                pool: left
                for pool, ranges in self._pools.items()
                if (left := {family: each for family, each in ranges.items() if any(each.rows(pool))})
            }

    def _ranges_changed(self) -> None:
        """Called after a change of networks or their states."""

    def _use_changed(self) -> None:
        """Called after addresses were allocated or released."""

    def _pool_for(self, owner: str, family: Family) -> str:
        """Return the pool to allocate from for an owner. Raises IpamError."""
        del owner, family
        return self._pool

    def _unavailable(self, text: str, pool: str, family: Family, owner: str) -> IpamError:
        """Return the error of a pool without free addresses."""
        del pool, family, owner
        return IpamError(NEXT_FAILED, text)

    def pod_ranges(self) -> list[PodRange]:
        """Return all networks: IPv6 first, and the primary one of each family before others."""
        rows: list[PodRange] = []
        for family in self._families:
            for pool in sorted(self._pools, key=lambda name: (name != self._pool, name)):
                if (each := self._pools[pool].get(family)) is not None:
                    rows += each.rows(pool)
        return [_secondary(row) if row.pool != self._pool else row for row in rows]

    @property
    def ranges(self) -> dict[Family, IPNetwork]:
        """The primary networks of this node's pods, by enabled family; IPv6 first."""
        self._started()
        found: dict[Family, IPNetwork] = {}
        for row in sorted(self.pod_ranges(), key=lambda row: _STATES.index(row.state)):
            found.setdefault(row.family, row.network)
        return {family: found[family] for family in self._families if family in found}

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of pods' addresses, IPv6 first."""
        self._started()
        return self._families

    def covers(self, ip: IPAddress) -> bool:
        """Whether the address is in a range of an enabled family."""
        self._started()
        family = Family.of(ip)
        return any(family in ranges and ranges[family].covers(ip) for ranges in self._pools.values())

    @property
    def default_pool(self) -> str:
        """The name of the default pool."""
        return self._pool

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """Allocate a free address of each family (IPv6 first), or of the given one; all or none.

        Raises IpamError if no address is free, the pool is unknown, or the family is disabled.
        """
        self._started()
        if self.delegated:
            raise IpamError(NEXT_FAILED, NOT_SUPPORTED)
        if family is not None and family not in self._families:
            raise IpamError(NEXT_FAILED, f"{family.text} allocator not available")
        allocations: list[Allocation] = []
        try:
            for each in self._families if family is None else (family,):
                name = (self._several and pool) or self._pool_for(owner, each)
                allocations.append(self._next(name, each, owner))
        except IpamError:
            for allocation in allocations:
                self.release(allocation.ip, allocation.pool)
            raise
        finally:
            self._use_changed()
        return tuple(allocations)

    def allocate_next_expiring(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """Do allocate_next(), and release each address in 10 minutes unless stop_expiration() is called."""
        return tuple(
            Allocation(one.ip, one.pool, owner, self.arm_expiration(one.ip, one.pool))
            for one in self.allocate_next(owner, pool, family)
        )

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        """Allocate this address. Raises IpamError."""
        if not pool:
            raise IpamError(FAILED, f'unable to restore IP {ip} for "{owner}": pool name must be provided')
        self._started()
        if (excluded_for := self._excluded.get(ip)) is not None:
            raise IpamError(FAILED, f"IP {ip} is excluded, owned by {excluded_for}")
        if self.delegated:
            raise IpamError(FAILED, NOT_SUPPORTED)
        family = Family.of(ip)
        if family not in self._families:
            raise IpamError(FAILED, f"{family.text} allocation disabled")
        name = pool if self._several else self._pool
        if (found := self._ranges_of(ip)) is not None:
            name = found[0]
        addresses = self._pools.get(name, {}).get(family)
        if addresses is None:
            text = f'unable to reserve IP {ip} from pool "{pool}" (family {family}): {NOT_YET}'
            raise IpamError(FAILED, self._unavailable(text, pool, family, owner).text)
        if not addresses.covers(ip):
            valid = ", ".join(map(str, addresses.networks))
            text = f"provided IP is not in the valid range. The range of valid IPs is {valid}"
            raise IpamError(FAILED, text)
        if ip in self._owners or ip in self._reserved or not addresses.allocate(ip):
            raise IpamError(FAILED, "provided IP is already allocated")
        self._record(ip, owner, name)
        self.allocated[family] += 1
        self._use_changed()
        return Allocation(ip, name, owner)

    def release(self, ip: IPAddress, pool: str) -> None:
        """Release an address, and stop its timer. An unallocated address is not an error."""
        if not pool:
            raise IpamError(FAILED, f"no IPAM pool provided for IP release of {ip}")
        self._started()
        self._expirations.stop(ip)
        self._reserved.pop(ip, None)
        family = Family.of(ip)
        changed = [each for _, of, each in self._all_ranges() if of is family and each.release(ip)]
        self.released[family] += bool(changed)
        if [each for each in changed if each.forget_retired()]:
            self._drop_empty_pools()
            self._ranges_changed()
        if self._owners.pop(ip, None) is not None:
            del self._owner_texts[family][self._keys.pop(ip)]
        self._use_changed()

    def hold(self, ip: IPAddress, owner: str) -> None:
        """Reserve an address outside all ranges for its owner, also in later ranges, until release()."""
        self._reserved[ip] = owner

    def exclude(self, ip: IPAddress, owner: str) -> None:
        """Never allocate this address, which has another use. It may be outside all ranges."""
        self._excluded[ip] = owner

    def arm_expiration(self, ip: IPAddress, pool: str) -> str:
        """Release the address in 10 minutes; return the timer's uuid. Raises IpamError if one runs."""
        del pool  # a timer belongs to an address
        if ip in self._expirations:
            raise IpamError(FAILED, "expiration timer already registered")
        return self._expirations.arm(ip)

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """Stop the timer of an address. Raises IpamError without a timer, or with another uuid."""
        del pool
        running = self._expirations.uuid_of(ip)
        if running is None:
            raise IpamError(FAILED, "no expiration timer registered")
        if running != uuid:
            raise IpamError(FAILED, "UUID mismatch, not stopping expiration timer")
        self._expirations.stop(ip)

    def owner(self, ip: IPAddress) -> str | None:
        """Return the owner of the address, or None."""
        return self._owners.get(ip)

    def dump(self) -> dict[str, str]:
        """Return owners by address, IPv4 first; ``POOL/`` precedes addresses not of the default pool."""
        self._started()
        return self._owner_texts[Family.IPV4] | self._owner_texts[Family.IPV6]

    def usage(self) -> dict[Family, tuple[int, int]]:
        """Return allocated addresses and Cilium's capacity, by family."""
        self._started()
        of = {
            family: [each for _, one, each in self._all_ranges() if one is family]
            for family in self._families
        }
        return {
            family: (sum(map(len, ranges)), sum(each.capacity for each in ranges))
            for family, ranges in of.items()
        }

    def status(self) -> str:
        """Return the text of ``cilium-dbg status``. For a disabled family, only the comma remains."""
        self._started()
        return ", ".join(self._status(family) if family in self._families else "" for family in Family)

    def next_expiration(self) -> float | None:
        """Return the seconds until the first timer expires; None without timers."""
        return self._expirations.wait()

    def release_expired(self) -> list[Allocation]:
        """Release the addresses of expired timers; return them."""
        expired = []
        for ip, token in self._expirations.pop_due():
            found = self._ranges_of(ip)
            pool = found[0] if found is not None else self._pool
            expired.append(Allocation(ip, pool, self._owners.get(ip, ""), token))
            self.release(ip, pool)
        return expired

    def in_use(self) -> dict[tuple[str, Family], int]:
        """Return the number of allocated addresses by pool and family, without retired ranges."""
        return {(pool, family): each.in_use for pool, family, each in self._all_ranges()}

    def has_free(self, pool: str, family: Family) -> bool:
        """Whether a pool has a free address of the family."""
        found = self._pools.get(pool, {}).get(family)
        return found is not None and found.free > 0

    def spare(self, pool: str, family: Family, needed: int) -> list[IPNetwork]:
        """Return unused ranges of a pool that can be released while ``needed`` addresses stay free."""
        found = self._pools.get(pool, {}).get(family)
        return found.spare(needed) if found is not None else []

    def _next(self, pool: str, family: Family, owner: str) -> Allocation:
        addresses = self._pools.get(pool, {}).get(family)
        if addresses is None or not addresses.networks:
            text = f'unable to allocate from pool "{pool}" (family {family}): {NOT_YET}'
            raise self._unavailable(text, pool, family, owner)
        while True:
            try:
                ip = addresses.allocate_next()
            except RangeFull:
                text = "all pod CIDR ranges are exhausted" if self._several else "range is full"
                raise self._unavailable(text, pool, family, owner) from None
            if ip in self._owners or ip in self._reserved:
                continue  # in use elsewhere; stays allocated here, too, so that it is skipped only once
            if (excluded_for := self._excluded.get(ip)) is None:
                self._record(ip, owner, pool)
                self.allocated[family] += 1
                return Allocation(ip, pool, owner)
            self._record(ip, f"{excluded_for} (excluded)", pool)  # stays allocated: skipped only once

    def _record(self, ip: IPAddress, owner: str, pool: str) -> None:
        text = text_of(ip)
        self._owners[ip] = owner
        self._keys[ip] = key = text if pool == self._pool else f"{pool}/{text}"
        self._owner_texts[Family.of(ip)][key] = owner

    def _ranges_of(self, ip: IPAddress) -> tuple[str, AddressRanges] | None:
        """Return pool and ranges that contain an address; of several, those in which it is allocated."""
        self._started()
        family = Family.of(ip)
        found = [
            (pool, ranges[family])
            for pool, ranges in self._pools.items()
            if family in ranges and ranges[family].covers(ip)
        ]
        if len(found) <= 1:  # the usual case
            return found[0] if found else None
        return next((one for one in found if ip in one[1]), found[0])

    def _all_ranges(self) -> list[tuple[str, Family, AddressRanges]]:
        return [
            (pool, family, each) for pool, ranges in self._pools.items() for family, each in ranges.items()
        ]

    def _started(self) -> None:
        if not self._families:
            raise NotStartedError(
                "Ipam was used before the hook 'find the range of pod addresses' ran: depend on Ipam"
            )

    def _status(self, family: Family) -> str:
        if self.delegated:
            return f"{family.text}: delegated to plugin"
        if self._several:
            return f"{family.text}: {len(self._pools)} IPAM pool(s) available"
        addresses = self._pools[self._pool][family]
        taken, capacity = len(addresses), addresses.capacity
        networks = ", ".join(map(str, addresses.networks))
        return f"{family.text}: {taken}/{capacity} allocated from {networks}"


def _of_family(family: Family, networks: Iterable[IPNetwork]) -> list[IPNetwork]:
    return [network for network in networks if Family.of(network) is family]


def _secondary(row: PodRange) -> PodRange:
    return row if row.state == "retired" else PodRange(row.network, "secondary", row.pool)
