"""Which address the router has.

Needs: the address allocator (Addresses, a Protocol).   Gives: choose_address().
Source: Cilium 1.17, the router's address; what it was before is in past.py.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from cells.ipam import Allocation, Family, IPAddress, IpamError, IPNetwork
from lifecycle import HiveError, Logger

OWNER = "router"


class Addresses(Protocol):
    """The address allocator, as far as the router needs it. Methods raise IpamError."""

    @property
    def ranges(self) -> Mapping[Family, IPNetwork]:
        """The networks of this node's pods."""
        ...

    @property
    def default_pool(self) -> str:
        """The name of the pool."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        """This address."""
        ...

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """A free address of this family."""
        ...


def choose_address(
    family: Family, found: Iterable[IPAddress], addresses: Addresses, log: Logger
) -> IPAddress:
    """Claim the router's address of a family: the first it had before that can be had, else a free one.

    Raises HiveError when the range has none left.
    """
    lost = False
    for candidate in (ip for ip in found if Family.of(ip) is family):
        try:
            return addresses.allocate(candidate, OWNER, addresses.default_pool).ip
        except IpamError as error:
            log.warning("Unable to restore router IP from filesystem", ip=str(candidate), error=str(error))
            lost = True
    if lost:
        log.warning("Router IP could not be re-allocated: a new one will cause brief network disruption")
    try:
        return addresses.allocate_next(OWNER, family=family)[0].ip
    except IpamError as error:
        raise HiveError(
            f"Unable to allocate router IP for family {family}: {error}; "
            f"every address of {addresses.ranges[family]} is taken, choose a larger {family}-range"
        ) from error
