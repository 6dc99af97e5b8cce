"""Which address the router has.

Needs: the address allocator (Addresses, a Protocol).   Gives: choose_address().
Source: Cilium 1.17, the router's address; the only memory of an earlier choice is the address on cilium_host.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Protocol

from cells.ipam import Allocation, IpamError
from lifecycle import HiveError, Logger

OWNER = "router"


class Addresses(Protocol):
    """The address allocator, as far as the router needs it. Methods raise IpamError."""

    @property
    def range(self) -> IPv4Network:
        """The network of this node's pods."""
        ...

    @property
    def default_pool(self) -> str:
        """The name of the pool."""
        ...

    def allocate(self, ip: IPv4Address, owner: str, pool: str) -> Allocation:
        """This address."""
        ...

    def allocate_next(self, owner: str, pool: str = "") -> Allocation:
        """A free address."""
        ...


def choose_address(found: Sequence[IPv4Interface], addresses: Addresses, log: Logger) -> IPv4Address:
    """Claim the router's address: the first of those found on cilium_host that can be had, else a free one.

    Raises HiveError when the range has none left.
    """
    for candidate in found:
        try:
            return addresses.allocate(candidate.ip, OWNER, addresses.default_pool).ip
        except IpamError as error:
            log.warning("Unable to restore router IP from filesystem", ip=str(candidate.ip), error=str(error))
    if found:
        log.warning("Router IP could not be re-allocated: a new one will cause brief network disruption")
    try:
        return addresses.allocate_next(OWNER).ip
    except IpamError as error:
        raise HiveError(
            f"Unable to allocate router IP for family ipv4: {error}; "
            f"every address of {addresses.range} is taken, choose a larger ipv4-range"
        ) from error
