"""The ranges of one family and pool: they are added and retired while their addresses are in use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from cells.base.addresses import AddressRange, Family, IPAddress, IPNetwork, RangeFull
from lifecycle.http import Refusal

__all__ = ["IpamError", "IpamLaterError", "PodRange"]


State = Literal["primary", "secondary", "retired"]


class PodRange(msgspec.Struct, frozen=True):
    """A row of the table ``pod-ranges``: a range of this node's pods."""

    network: IPNetwork
    state: State
    """``primary``: the first assigned range. ``retired``: withdrawn while its addresses are in use; none is
    allocated.
    """
    pool: str = ""
    """The pool of the range."""

    @property
    def family(self) -> Family:
        """The range's family."""
        return Family.of(self.network)


class AddressRanges:
    """Allocates addresses from several networks of one family, the first one with a free address.

    Networks may overlap: an allocated address is allocated in all of them.
    """

    def __init__(
        self,
        networks: Sequence[IPNetwork],
        retired: Sequence[IPNetwork] = (),
        make: Callable[[IPNetwork], AddressRange] = AddressRange,
    ) -> None:
        self._make = make
        self._active = [make(network) for network in networks]
        self._retired = [make(network) for network in retired if network not in networks]
        self._count = 0

    @property
    def network(self) -> IPNetwork | None:
        """The primary network; None if all are retired."""
        return self._active[0].network if self._active else None

    @property
    def networks(self) -> tuple[IPNetwork, ...]:
        """The networks to allocate from, without retired ones."""
        return tuple(each.network for each in self._active)

    @property
    def capacity(self) -> int:
        """The number of allocatable addresses, as Cilium counts them."""
        return sum(each.capacity for each in self._active)

    @property
    def in_use(self) -> int:
        """The number of allocated addresses, without retired networks."""
        return sum(map(len, self._active))

    @property
    def free(self) -> int:
        """The number of free addresses."""
        return sum(each.size - len(each) for each in self._active)

    def rows(self, pool: str) -> Iterator[PodRange]:
        """Yield all networks, as rows of a pool."""
        for number, each in enumerate(self._active):
            yield PodRange(each.network, "secondary" if number else "primary", pool)
        for each in self._retired:
            yield PodRange(each.network, "retired", pool)

    def spare(self, needed: int) -> list[IPNetwork]:
        """Return unused networks that can be released while ``needed`` addresses stay free.

        The last networks are released first.
        """
        free, found = self.free, []
        for each in reversed(self._active):
            if not len(each) and free - each.size >= needed:
                free -= each.size
                found.append(each.network)
        return found

    def follow(self, networks: Sequence[IPNetwork], *, keep: bool = False) -> bool:
        """Allocate from these networks from now on; return whether anything changed.

        A network that is not among them is retired while its addresses are in use, or in any case with
        ``keep``. When it is added again, its allocations are unchanged.
        """
        if networks == list(self.networks):
            return False
        before = {each.network: each for each in self._all()}
        taken = [ip for each in self._all() for ip in each]
        self._active = [before.get(network) or self._make(network) for network in networks]
        self._retired = [
            each for network, each in before.items() if network not in networks and (keep or len(each))
        ]
        for each in self._active:
            for ip in taken:
                if each.covers(ip):
                    each.allocate(ip)
        return True

    def covers(self, ip: IPAddress) -> bool:
        """Whether one of the networks contains the address, including retired ones."""
        return any(each.covers(ip) for each in self._all())

    def allocate_next(self) -> IPAddress:
        """Allocate a free address. Raises RangeFull."""
        for each in self._active:
            try:
                ip = each.allocate_next()
            except RangeFull:
                continue
            for other in self._all():
                if other is not each and other.covers(ip):
                    other.allocate(ip)
            self._count += 1
            return ip
        raise RangeFull

    def allocate(self, ip: IPAddress) -> bool:
        """Allocate this address, which a network must contain; return False if it is allocated already."""
        if ip in self:
            return False
        for each in self._all():
            if each.covers(ip):
                each.allocate(ip)
        self._count += 1
        return True

    def release(self, ip: IPAddress) -> bool:
        """Release this address; return False if it was not allocated."""
        if ip not in self:
            return False
        for each in self._all():
            each.release(ip)
        self._count -= 1
        return True

    def forget_retired(self) -> bool:
        """Drop retired networks without addresses in use; return whether there was one."""
        left = [each for each in self._retired if len(each)]
        changed = len(left) != len(self._retired)
        self._retired = left
        return changed

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ip: IPAddress) -> bool:
        return any(ip in each for each in self._all())

    def _all(self) -> list[AddressRange]:
        return [*self._active, *self._retired]


# Errors, with status codes and messages of Cilium's API.

NEXT_FAILED: Final = 502
FAILED: Final = 500
NOT_YET: Final = "pool not (yet) available"
NOT_SUPPORTED: Final = "Operation not supported: addresses are assigned by the delegated IPAM plugin"


class IpamError(Refusal):
    """A request for an address failed; ``status`` is the HTTP status in Cilium's API."""


class IpamLaterError(IpamError):
    """A request for an address failed, but may succeed later."""

    def __init__(self, text: str, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__(NEXT_FAILED, text)
        self.wait = wait
        """Waits until a retry may succeed, possibly forever."""
