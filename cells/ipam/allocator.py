"""The allocator of pod addresses: who has which.

For:    Ipam, which is this with a life cycle. Needs: Clock. Gives: Allocator, Allocation, IpamError.
Texts of errors are Cilium's: its clients show them to people.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network

import msgspec

from cells.ipam.addresses import Family, IPAddress, IPNetwork, RangeFull, text_of
from cells.ipam.expiration import Clock, Expirations
from cells.ipam.ranges import AddressRanges, PodRange
from lifecycle import NotStartedError
from lifecycle.http import Refusal

NEXT_FAILED = 502
FAILED = 500

_ORDER = (Family.IPV6, Family.IPV4)  # of allocation, as in Cilium


class Allocation(msgspec.Struct, frozen=True):
    """An address somebody has."""

    ip: IPAddress
    pool: str
    owner: str
    """``namespace/pod``, or what else has it: ``router``, ``node-ip``."""
    expiration_uuid: str = ""
    """To be presented within 10 minutes; empty: the address does not expire."""


class IpamError(Refusal):
    """A request for an address that is refused; ``status`` is the HTTP status Cilium's API gives it."""


class Allocator:
    """Hands out the addresses of the ranges of each family, once it knows them.

    There is one pool, the default one. An address says by itself where it belongs: the pool it is named with
    must only be named, so that addresses outlive a change of the pool's name (in Cilium, too, the host-scope
    allocator does not look at it).
    """

    def __init__(self, pool: str, clock: Clock) -> None:
        self._pool = pool
        self._ranges: dict[Family, AddressRanges] = {}
        self._owners: dict[IPAddress, str] = {}
        self._shown: dict[Family, dict[str, str]] = {family: {} for family in Family}
        """The owners by the addresses' texts, which are asked for more often than they change."""
        self._excluded: dict[IPAddress, str] = {}
        self._expirations = Expirations(clock)
        self.allocated = dict.fromkeys(Family, 0)
        """How often an address was given to somebody."""
        self.released = dict.fromkeys(Family, 0)
        """How often one was given back."""

    def use(self, *networks: IPNetwork, retired: Sequence[IPNetwork] = ()) -> None:
        """Allocate from these networks, of which nothing is taken yet; the first of a family is primary.

        Of retired ones addresses may be claimed by those who have them, and none is handed out.
        """
        self._ranges = {
            family: AddressRanges(
                [network for network in networks if Family.of(network) is family],
                [network for network in retired if Family.of(network) is family],
            )
            for family in _ORDER
            if any(Family.of(network) is family for network in networks)
        }
        self._ranges_changed()

    def follow(self, family: Family, networks: Sequence[IPNetwork]) -> bool:
        """Allocate from these networks of a family from now on; whether that is a change.

        One that is not among them any more is retired while addresses of it are in use. No network at all
        changes nothing.
        """
        changed = family in self._ranges and self._ranges[family].follow(list(networks))
        if changed:
            self._ranges[family].forget_retired()
            self._ranges_changed()
        return changed

    def forget_retired(self) -> None:
        """Let go of retired networks without addresses in use: whoever has one has claimed it by now."""
        left = [each for each in self._known().values() if each.forget_retired()]
        if left:
            self._ranges_changed()

    def _ranges_changed(self) -> None:
        """The networks, or what they are, have changed."""

    def pod_ranges(self) -> list[PodRange]:
        """All networks, IPv6 first, the primary one of each family before others."""
        return [row for each in self._known().values() for row in each.rows()]

    @property
    def ranges(self) -> dict[Family, IPNetwork]:
        """The primary networks of this node's pods; a family that is off has none. IPv6 comes first."""
        return {family: addresses.network for family, addresses in self._known().items()}

    def covers(self, ip: IPAddress) -> bool:
        """Whether it is an address to hand out: its family is on, and it is in the range."""
        addresses = self._known().get(Family.of(ip))
        return addresses is not None and addresses.covers(ip)

    @property
    def range(self) -> IPv4Network:
        """The primary IPv4 network of this node's pods. IpamError: IPv4 is off; ``ranges`` tells."""
        found = self.ranges.get(Family.IPV4)
        if not isinstance(found, IPv4Network):
            raise IpamError(FAILED, "IPv4 allocation disabled")
        return found

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
        if pool and pool != self._pool:
            text = f'unknown IPAM pool "{pool}": this node has the pool "{self._pool}" only'
            raise IpamError(NEXT_FAILED, text)
        known = self._known()
        if family is not None and family not in known:
            raise IpamError(NEXT_FAILED, f"{family.text} allocator not available")
        got: list[Allocation] = []
        try:
            for each in known if family is None else (family,):
                got.append(self._next(known[each], owner))  # noqa: PERF401  (what was got is given back)
        except IpamError:
            for allocation in got:
                self.release(allocation.ip, allocation.pool)
            raise
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
        known = self._known()
        if (excluded_for := self._excluded.get(ip)) is not None:
            raise IpamError(FAILED, f"IP {ip} is excluded, owned by {excluded_for}")
        family = Family.of(ip)
        addresses = known.get(family)
        if addresses is None:
            raise IpamError(FAILED, f"{family.text} allocation disabled")
        if not addresses.covers(ip):
            valid = ", ".join(map(str, addresses.networks))
            text = f"provided IP is not in the valid range. The range of valid IPs is {valid}"
            raise IpamError(FAILED, text)
        if not addresses.take(ip):
            raise IpamError(FAILED, "provided IP is already allocated")
        self._own(ip, owner)
        self.allocated[family] += 1
        return Allocation(ip, self._pool, owner)

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give an address back, and stop its timer. One that is not allocated is no error."""
        if not pool:
            raise IpamError(FAILED, f"no IPAM pool provided for IP release of {ip}")
        known = self._known()
        self._expirations.stop(ip)
        if (addresses := known.get(Family.of(ip))) is not None:
            self.released[Family.of(ip)] += addresses.give_back(ip)
            if addresses.forget_retired():
                self._ranges_changed()
        if self._owners.pop(ip, None) is not None:
            del self._shown[Family.of(ip)][text_of(ip)]

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
        """Who has the address; None if nobody."""
        return self._owners.get(ip)

    def dump(self) -> dict[str, str]:
        """Who has what: owner by address, IPv4 first."""
        self._known()
        return self._shown[Family.IPV4] | self._shown[Family.IPV6]

    def usage(self) -> dict[Family, tuple[int, int]]:
        """For each family how many addresses are taken, and how many Cilium says there are."""
        return {family: (len(each), each.capacity) for family, each in self._known().items()}

    def status(self) -> str:
        """As `cilium-dbg status` prints it; of a family that is off only the comma is left."""
        known = self._known()
        return ", ".join(_status(family, known.get(family)) for family in Family)

    def next_expiration(self) -> float | None:
        """Seconds until the first timer is due; None if none runs."""
        return self._expirations.wait()

    def release_expired(self) -> list[Allocation]:
        """Release what is due; what it was."""
        expired = []
        for ip, token in self._expirations.pop_due():
            expired.append(Allocation(ip, self._pool, self._owners.get(ip, ""), token))
            self.release(ip, self._pool)
        return expired

    def _next(self, addresses: AddressRanges, owner: str) -> Allocation:
        while True:
            try:
                ip = addresses.take_next()
            except RangeFull:
                raise IpamError(NEXT_FAILED, "range is full") from None
            if (excluded_for := self._excluded.get(ip)) is None:
                self._own(ip, owner)
                self.allocated[Family.of(ip)] += 1
                return Allocation(ip, self._pool, owner)
            self._own(ip, f"{excluded_for} (excluded)")  # and stays taken, so it is met only once

    def _own(self, ip: IPAddress, owner: str) -> None:
        self._owners[ip] = owner
        self._shown[Family.of(ip)][text_of(ip)] = owner

    def _known(self) -> dict[Family, AddressRanges]:
        if not self._ranges:
            raise NotStartedError(
                "Ipam was used before the hook 'find the range of pod addresses' ran: depend on Ipam"
            )
        return self._ranges


def _status(family: Family, addresses: AddressRanges | None) -> str:
    if addresses is None:
        return ""
    taken, capacity = len(addresses), addresses.capacity
    networks = ", ".join(map(str, addresses.networks))
    return f"{family.text}: {taken}/{capacity} allocated from {networks}"
