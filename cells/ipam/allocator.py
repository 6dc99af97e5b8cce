"""The allocator of pod addresses: who has which.

For:    Ipam, which is this with a life cycle. Needs: Clock. Gives: Allocator, Allocation, IpamError.
Texts of errors are Cilium's: its clients show them to people.
"""

from ipaddress import IPv4Address, IPv4Network

import msgspec

from cells.ipam.addresses import AddressRange, RangeFull
from cells.ipam.expiration import Clock, Expirations
from lifecycle import NotStartedError

NEXT_FAILED = 502
FAILED = 500


class Allocation(msgspec.Struct, frozen=True):
    """An address somebody has."""

    ip: IPv4Address
    pool: str
    owner: str
    """``namespace/pod``, or what else has it: ``router``, ``node-ip``."""
    expiration_uuid: str = ""
    """To be presented within 10 minutes; empty: the address does not expire."""


class IpamError(Exception):
    """A request for an address that is refused; ``status`` is the HTTP status Cilium's API gives it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return self.text


class Allocator:
    """Hands out the addresses of one range, once it knows it. There is one pool, the default one."""

    def __init__(self, pool: str, clock: Clock) -> None:
        self._pool = pool
        self._addresses: AddressRange | None = None
        self._owners: dict[IPv4Address, str] = {}
        self._excluded: dict[IPv4Address, str] = {}
        self._expirations = Expirations(clock)

    def use(self, network: IPv4Network) -> None:
        """Allocate from this network, of which nothing is taken yet."""
        self._addresses = AddressRange(network)

    @property
    def range(self) -> IPv4Network:
        """The network of this node's pods."""
        return self._known().network

    @property
    def default_pool(self) -> str:
        """The name of the pool."""
        return self._pool

    def allocate_next(self, owner: str, pool: str = "") -> Allocation:
        """A free address for ``owner``. IpamError: no address left, no such pool."""
        self._check_pool(pool or self._pool, NEXT_FAILED)
        addresses = self._known()
        while True:
            try:
                ip = addresses.take_next()
            except RangeFull:
                raise IpamError(NEXT_FAILED, "range is full") from None
            if (excluded_for := self._excluded.get(ip)) is None:
                self._owners[ip] = owner
                return Allocation(ip, self._pool, owner)
            self._owners[ip] = f"{excluded_for} (excluded)"  # and stays taken, so it is met only once

    def allocate_next_expiring(self, owner: str, pool: str = "") -> Allocation:
        """Like allocate_next; the address is released in 10 minutes unless stop_expiration is called."""
        allocation = self.allocate_next(owner, pool)
        token = self.arm_expiration(allocation.ip, allocation.pool)
        return Allocation(allocation.ip, allocation.pool, owner, token)

    def allocate(self, ip: IPv4Address, owner: str, pool: str) -> Allocation:
        """This address for ``owner``. IpamError: no pool, excluded, taken, outside of the range."""
        if not pool:
            raise IpamError(FAILED, f'unable to restore IP {ip} for "{owner}": pool name must be provided')
        self._check_pool(pool, FAILED)
        if (excluded_for := self._excluded.get(ip)) is not None:
            raise IpamError(FAILED, f"IP {ip} is excluded, owned by {excluded_for}")
        addresses = self._known()
        if not addresses.covers(ip):
            text = f"provided IP is not in the valid range. The range of valid IPs is {addresses.network}"
            raise IpamError(FAILED, text)
        if not addresses.take(ip):
            raise IpamError(FAILED, "provided IP is already allocated")
        self._owners[ip] = owner
        return Allocation(ip, pool, owner)

    def release(self, ip: IPv4Address, pool: str) -> None:
        """Give an address back, and stop its timer. One that is not allocated is no error."""
        if not pool:
            raise IpamError(FAILED, f"no IPAM pool provided for IP release of {ip}")
        self._check_pool(pool, FAILED)
        self._expirations.stop((ip, pool))
        self._known().give_back(ip)
        self._owners.pop(ip, None)

    def exclude(self, ip: IPv4Address, owner: str, pool: str = "") -> None:
        """Never hand out this address, which ``owner`` has elsewhere. It need not be in the range."""
        self._check_pool(pool or self._pool, FAILED)
        self._excluded[ip] = owner

    def arm_expiration(self, ip: IPv4Address, pool: str) -> str:
        """Release the address in 10 minutes; the uuid that prevents it. IpamError: a timer runs already."""
        if (ip, pool) in self._expirations:
            raise IpamError(FAILED, "expiration timer already registered")
        return self._expirations.arm((ip, pool))

    def stop_expiration(self, ip: IPv4Address, pool: str, uuid: str) -> None:
        """The address is in use: keep it. IpamError: no timer runs, or the uuid is of another allocation."""
        running = self._expirations.uuid_of((ip, pool))
        if running is None:
            raise IpamError(FAILED, "no expiration timer registered")
        if running != uuid:
            raise IpamError(FAILED, "UUID mismatch, not stopping expiration timer")
        self._expirations.stop((ip, pool))

    def owner(self, ip: IPv4Address) -> str | None:
        """Who has the address; None if nobody."""
        return self._owners.get(ip)

    def dump(self) -> dict[str, str]:
        """Who has what: owner by address."""
        return {str(ip): self._owners.get(ip, "") for ip in self._known()}

    def status(self) -> str:
        """As `cilium-dbg status` prints it; the trailing comma stands before the IPv6 part there is not."""
        addresses = self._known()
        capacity = max(addresses.network.num_addresses - 2, 0)
        return f"IPv4: {len(addresses)}/{capacity} allocated from {addresses.network}, "

    def next_expiration(self) -> float | None:
        """Seconds until the first timer is due; None if none runs."""
        return self._expirations.wait()

    def release_expired(self) -> list[Allocation]:
        """Release what is due; what it was."""
        expired = []
        for (ip, pool), token in self._expirations.pop_due():
            expired.append(Allocation(ip, pool, self._owners.get(ip, ""), token))
            self.release(ip, pool)
        return expired

    def _known(self) -> AddressRange:
        if self._addresses is None:
            raise NotStartedError(
                "Ipam was used before the hook 'find the range of pod addresses' ran: depend on Ipam"
            )
        return self._addresses

    def _check_pool(self, pool: str, status: int) -> None:
        if pool != self._pool:
            raise IpamError(status, f'unknown IPAM pool "{pool}": this node has the pool "{self._pool}" only')
