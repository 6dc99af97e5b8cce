"""The allocator of pod addresses: who has which."""

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


# Addresses that are released unless their use is confirmed in time.

EXPIRATION: Final = 600.0
"""Seconds an address waits for its endpoint (Cilium's defaults.IPAMExpiration)."""


class Clock:
    """Time that only goes forward, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await anyio.sleep(seconds)


class Expirations:
    """Timers by address. All run equally long, so the oldest is the first due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[IPAddress, tuple[str, float]] = {}

    def __contains__(self, ip: IPAddress) -> bool:
        return ip in self._timers

    def arm(self, ip: IPAddress) -> str:
        """Start a timer and return its uuid. The address must have none."""
        token = str(uuid.uuid4())
        self._timers[ip] = token, self._clock.now() + EXPIRATION
        return token

    def uuid_of(self, ip: IPAddress) -> str | None:
        """The uuid of the timer that runs for the address."""
        timer = self._timers.get(ip)
        return timer[0] if timer else None

    def stop(self, ip: IPAddress) -> None:
        """Forget the timer, if there is one."""
        self._timers.pop(ip, None)

    def wait(self) -> float | None:
        """Seconds until the first timer is due (0 if it is); None if none runs."""
        for _, deadline in self._timers.values():
            return max(deadline - self._clock.now(), 0.0)
        return None

    def pop_due(self) -> list[tuple[IPAddress, str]]:
        """The timers that are due, which then are no more, with their uuids."""
        now = self._clock.now()
        due = []
        for ip, (token, deadline) in self._timers.items():
            if deadline > now:
                break
            due.append((ip, token))
        for ip, _ in due:
            del self._timers[ip]
        return due


_ORDER = (Family.IPV6, Family.IPV4)  # of allocation, as in Cilium
_STATES = ("primary", "secondary", "retired")


class Allocation(msgspec.Struct, frozen=True):
    """An allocated address."""

    ip: IPAddress
    pool: str
    owner: str
    """``namespace/pod``, or what else has it: ``router``, ``node-ip``."""
    expiration_uuid: str = ""
    """To be presented within 10 minutes; empty: the address does not expire."""


class Allocator:
    """Hands out the addresses of the ranges of each family, once it knows them.

    Host scope has one pool, the default one: what a pool is named in a request must only be named, so that
    addresses outlive a change of the pool's name (in Cilium, too, the host-scope allocator does not look at
    it). In mode multi-pool (``several``) there are any number, which come and go. Either way an address has
    by itself where it belongs.
    """

    def __init__(self, pool: str, clock: Clock, *, several: bool = False) -> None:
        self._pool = pool
        self._several = several
        self._pools: dict[str, dict[Family, AddressRanges]] = {}
        self._families: tuple[Family, ...] = ()
        self.delegated = False
        """Whether another plugin gives pods their addresses."""
        self._owners: dict[IPAddress, str] = {}
        self._keys: dict[IPAddress, str] = {}
        """How an address is shown: with its pool, if that is not the default one."""
        self._shown: dict[Family, dict[str, str]] = {family: {} for family in Family}
        """The owners by the addresses' texts, which are asked for more often than they change."""
        self._excluded: dict[IPAddress, str] = {}
        self._held: dict[IPAddress, str] = {}
        """Addresses in use that no range had when they were claimed; one that has them may come."""
        self._expirations = Expirations(clock)
        self.allocated = dict.fromkeys(Family, 0)
        """Number of allocations."""
        self.released = dict.fromkeys(Family, 0)
        """Number of releases."""

    def use(self, *networks: IPNetwork, retired: Sequence[IPNetwork] = ()) -> None:
        """Allocate from these networks, of which nothing is taken yet; the first of a family is primary.

        Of retired ones addresses may be claimed by those who have them, and none is handed out.
        """
        self._families = tuple(
            family for family in _ORDER if any(Family.of(network) is family for network in networks)
        )
        ranges = {one: AddressRanges(_of(one, networks), _of(one, retired)) for one in self._families}
        self._pools = {self._pool: ranges}
        self._ranges_changed()

    def use_pools(self, families: Collection[Family], retired: Mapping[str, Sequence[IPNetwork]]) -> None:
        """Allocate from pools that follow_pools() will set; of these ranges addresses may be claimed."""
        self._families = tuple(family for family in _ORDER if family in families)
        self._pools = {}
        for pool, networks in retired.items():
            for family in self._families:
                if of := _of(family, networks):
                    self._pools.setdefault(pool, {})[family] = AddressRanges([], of)
        self._ranges_changed()

    def delegate(self, families: Collection[Family]) -> None:
        """Allocate nothing: another plugin gives pods their addresses."""
        self.delegated = True
        self._families = tuple(family for family in _ORDER if family in families)
        self._ranges_changed()

    def follow(self, family: Family, networks: Sequence[IPNetwork]) -> bool:
        """Allocate from these networks of a family from now on; whether that is a change.

        One that is not among them any more is retired while addresses of it are in use. No network at all
        changes nothing.
        """
        ranges = self._pools.get(self._pool, {}).get(family)
        if ranges is None or not networks or not ranges.follow(list(networks)):
            return False
        ranges.forget_retired()
        self._ranges_changed()
        return True

    def follow_pools(self, pools: Mapping[str, Sequence[IPNetwork]], *, forget: bool) -> bool:
        """Allocate from these networks of these pools, and of no others; whether that is a change.

        What is not among them any more is retired while addresses of it are in use; until ``forget`` also
        while none is, as those who have them may not have claimed them yet.
        """
        changed = False
        for pool in {*pools, *self._pools}:
            for family in self._families:
                networks = _of(family, pools.get(pool, ()))
                ranges = self._pools.get(pool, {}).get(family)
                if ranges is None:
                    if not networks:
                        continue
                    ranges = self._pools.setdefault(pool, {})[family] = AddressRanges([])
                changed |= ranges.follow(networks, keep=not forget)
                if forget:
                    changed |= ranges.forget_retired()
        self._tidy()
        if changed:
            self._ranges_changed()
        return changed

    def forget_retired(self) -> None:
        """Forget retired networks without addresses in use: all claims have been made by now."""
        left = [each for _, _, each in self._all() if each.forget_retired()]
        if left:
            self._tidy()
            self._ranges_changed()

    def _tidy(self) -> None:
        """Forget pools of which nothing is left."""
        if self._several:
            self._pools = {
                pool: left
                for pool, ranges in self._pools.items()
                if (left := {family: each for family, each in ranges.items() if any(each.rows(pool))})
            }

    def _ranges_changed(self) -> None:
        """The networks, or what they are, have changed."""

    def _use_changed(self) -> None:
        """Addresses have been taken or given back."""

    def _pool_for(self, owner: str, family: Family) -> str:
        """The pool to allocate from for an owner. Raises IpamError."""
        del owner, family
        return self._pool

    def _unavailable(self, text: str, pool: str, family: Family, owner: str) -> IpamError:
        """What to say of a pool that has no address at the moment."""
        del pool, family, owner
        return IpamError(NEXT_FAILED, text)

    def pod_ranges(self) -> list[PodRange]:
        """All networks, IPv6 first, the primary one of each family before others."""
        rows: list[PodRange] = []
        for family in self._families:
            for pool in sorted(self._pools, key=lambda name: (name != self._pool, name)):
                if (each := self._pools[pool].get(family)) is not None:
                    rows += each.rows(pool)
        return [_secondary(row) if row.pool != self._pool else row for row in rows]

    @property
    def ranges(self) -> dict[Family, IPNetwork]:
        """The primary networks of this node's pods; a family that is off has none. IPv6 comes first."""
        self._started()
        found: dict[Family, IPNetwork] = {}
        for row in sorted(self.pod_ranges(), key=lambda row: _STATES.index(row.state)):
            found.setdefault(row.family, row.network)
        return {family: found[family] for family in self._families if family in found}

    @property
    def families(self) -> tuple[Family, ...]:
        """Those that pods have addresses of, IPv6 first."""
        self._started()
        return self._families

    def covers(self, ip: IPAddress) -> bool:
        """Whether it is an address to hand out: its family is on, and it is in the range."""
        self._started()
        family = Family.of(ip)
        return any(family in ranges and ranges[family].covers(ip) for ranges in self._pools.values())

    @property
    def default_pool(self) -> str:
        """The name of the pool."""
        return self._pool

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """A free address of each family, or of the one asked for, for ``owner``: IPv6 first; all or none.

        IpamError: no address left, no such pool, the family is off.
        """
        self._started()
        if self.delegated:
            raise IpamError(NEXT_FAILED, NOT_SUPPORTED)
        if family is not None and family not in self._families:
            raise IpamError(NEXT_FAILED, f"{family.text} allocator not available")
        got: list[Allocation] = []
        try:
            for each in self._families if family is None else (family,):
                name = (self._several and pool) or self._pool_for(owner, each)
                got.append(self._next(name, each, owner))
        except IpamError:
            for allocation in got:
                self.release(allocation.ip, allocation.pool)
            raise
        finally:
            self._use_changed()
        return tuple(got)

    def allocate_next_expiring(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """Like allocate_next; each is released in 10 minutes unless stop_expiration is called for it."""
        return tuple(
            Allocation(got.ip, got.pool, owner, self.arm_expiration(got.ip, got.pool))
            for got in self.allocate_next(owner, pool, family)
        )

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        """This address for ``owner``. IpamError: no pool, excluded, family off, taken, out of range."""
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
        if ip in self._owners or ip in self._held or not addresses.take(ip):
            raise IpamError(FAILED, "provided IP is already allocated")
        self._own(ip, owner, name)
        self.allocated[family] += 1
        self._use_changed()
        return Allocation(ip, name, owner)

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give an address back, and stop its timer. A free one is not an error."""
        if not pool:
            raise IpamError(FAILED, f"no IPAM pool provided for IP release of {ip}")
        self._started()
        self._expirations.stop(ip)
        self._held.pop(ip, None)
        family = Family.of(ip)
        given = [each for _, of, each in self._all() if of is family and each.give_back(ip)]
        self.released[family] += bool(given)
        if [each for each in given if each.forget_retired()]:
            self._tidy()
            self._ranges_changed()
        if self._owners.pop(ip, None) is not None:
            del self._shown[family][self._keys.pop(ip)]
        self._use_changed()

    def hold(self, ip: IPAddress, owner: str) -> None:
        """``owner`` has this address, though no range has it: no range that comes hands it out, until its
        release()."""
        self._held[ip] = owner

    def exclude(self, ip: IPAddress, owner: str) -> None:
        """Never hand out this address, which ``owner`` has elsewhere. It need not be in a range."""
        self._excluded[ip] = owner

    def arm_expiration(self, ip: IPAddress, pool: str) -> str:
        """Release the address in 10 minutes; the uuid that prevents it. IpamError: a timer runs already."""
        del pool  # an address has one timer
        if ip in self._expirations:
            raise IpamError(FAILED, "expiration timer already registered")
        return self._expirations.arm(ip)

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """The address is in use: keep it. IpamError: no timer runs, or the uuid is of another allocation."""
        del pool
        running = self._expirations.uuid_of(ip)
        if running is None:
            raise IpamError(FAILED, "no expiration timer registered")
        if running != uuid:
            raise IpamError(FAILED, "UUID mismatch, not stopping expiration timer")
        self._expirations.stop(ip)

    def owner(self, ip: IPAddress) -> str | None:
        """The owner of the address, or None."""
        return self._owners.get(ip)

    def dump(self) -> dict[str, str]:
        """Who has what: owner by address, IPv4 first; before one of another pool stands ``pool/``."""
        self._started()
        return self._shown[Family.IPV4] | self._shown[Family.IPV6]

    def usage(self) -> dict[Family, tuple[int, int]]:
        """For each family how many addresses are taken, and how many Cilium counts."""
        self._started()
        of = {family: [each for _, one, each in self._all() if one is family] for family in self._families}
        return {
            family: (sum(map(len, ranges)), sum(each.capacity for each in ranges))
            for family, ranges in of.items()
        }

    def status(self) -> str:
        """As `cilium-dbg status` prints it; of a family that is off only the comma is left."""
        self._started()
        return ", ".join(self._status(family) if family in self._families else "" for family in Family)

    def next_expiration(self) -> float | None:
        """Seconds until the first timer is due; None if none runs."""
        return self._expirations.wait()

    def release_expired(self) -> list[Allocation]:
        """Release what is due; what it was."""
        expired = []
        for ip, token in self._expirations.pop_due():
            found = self._ranges_of(ip)
            pool = found[0] if found is not None else self._pool
            expired.append(Allocation(ip, pool, self._owners.get(ip, ""), token))
            self.release(ip, pool)
        return expired

    def in_use(self) -> dict[tuple[str, Family], int]:
        """How many addresses of each pool are taken, of ranges that are handed out from."""
        return {(pool, family): each.in_use for pool, family, each in self._all()}

    def has_free(self, pool: str, family: Family) -> bool:
        """Whether a pool has an address to hand out."""
        found = self._pools.get(pool, {}).get(family)
        return found is not None and found.free > 0

    def spare(self, pool: str, family: Family, needed: int) -> list[IPNetwork]:
        """Unused ranges of a pool without which as many addresses as needed are free."""
        found = self._pools.get(pool, {}).get(family)
        return found.spare(needed) if found is not None else []

    def _next(self, pool: str, family: Family, owner: str) -> Allocation:
        addresses = self._pools.get(pool, {}).get(family)
        if addresses is None or not addresses.networks:
            text = f'unable to allocate from pool "{pool}" (family {family}): {NOT_YET}'
            raise self._unavailable(text, pool, family, owner)
        while True:
            try:
                ip = addresses.take_next()
            except RangeFull:
                text = "all pod CIDR ranges are exhausted" if self._several else "range is full"
                raise self._unavailable(text, pool, family, owner) from None
            if ip in self._owners or ip in self._held:
                continue  # by a range of another pool, or none: taken here too, it is met only once
            if (excluded_for := self._excluded.get(ip)) is None:
                self._own(ip, owner, pool)
                self.allocated[family] += 1
                return Allocation(ip, pool, owner)
            self._own(ip, f"{excluded_for} (excluded)", pool)  # and stays taken, so it is met only once

    def _own(self, ip: IPAddress, owner: str, pool: str) -> None:
        text = text_of(ip)
        self._owners[ip] = owner
        self._keys[ip] = key = text if pool == self._pool else f"{pool}/{text}"
        self._shown[Family.of(ip)][key] = owner

    def _ranges_of(self, ip: IPAddress) -> tuple[str, AddressRanges] | None:
        """The pool and the ranges that have an address; of several those where it is taken."""
        self._started()
        family = Family.of(ip)
        found = [
            (pool, ranges[family])
            for pool, ranges in self._pools.items()
            if family in ranges and ranges[family].covers(ip)
        ]
        if len(found) <= 1:  # as nearly always
            return found[0] if found else None
        return next((one for one in found if ip in one[1]), found[0])

    def _all(self) -> list[tuple[str, Family, AddressRanges]]:
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


def _of(family: Family, networks: Iterable[IPNetwork]) -> list[IPNetwork]:
    return [network for network in networks if Family.of(network) is family]


def _secondary(row: PodRange) -> PodRange:
    return row if row.state == "retired" else PodRange(row.network, "secondary", row.pool)
