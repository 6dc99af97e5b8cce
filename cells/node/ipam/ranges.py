"""The ranges of one family, which come and go while their addresses are in use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from cells.base.addresses import AddressRange, Family, IPAddress, IPNetwork, RangeFull
from lifecycle.http import Refusal

__all__ = ["IpamError", "IpamLaterError", "PodRange"]


State = Literal["primary", "secondary", "retired"]


class PodRange(msgspec.Struct, frozen=True):
    """A range of this node's pods, a row of the table ``pod-ranges``."""

    network: IPNetwork
    state: State
    """``primary``: the first that was given; ``retired``: taken back while addresses of it are in use, and
    none is handed out any more."""
    pool: str = ""
    """The pool it is of."""

    @property
    def family(self) -> Family:
        """Its family."""
        return Family.of(self.network)


class AddressRanges:
    """Addresses out of several networks of one family; new ones from the first that has one.

    Networks may overlap: an address that is taken is taken in all of them.
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
        """The primary one; None when there is none to hand out from."""
        return self._active[0].network if self._active else None

    @property
    def networks(self) -> tuple[IPNetwork, ...]:
        """Those that addresses are handed out from."""
        return tuple(each.network for each in self._active)

    @property
    def capacity(self) -> int:
        """How many addresses to hand out Cilium counts."""
        return sum(each.capacity for each in self._active)

    @property
    def in_use(self) -> int:
        """How many addresses are taken of those that are handed out."""
        return sum(map(len, self._active))

    @property
    def free(self) -> int:
        """How many addresses are left to hand out."""
        return sum(each.size - len(each) for each in self._active)

    def rows(self, pool: str) -> Iterator[PodRange]:
        """All of them, as ranges of a pool."""
        for number, each in enumerate(self._active):
            yield PodRange(each.network, "secondary" if number else "primary", pool)
        for each in self._retired:
            yield PodRange(each.network, "retired", pool)

    def spare(self, needed: int) -> list[IPNetwork]:
        """Unused networks without which as many addresses as needed are free; the last ones first."""
        free, found = self.free, []
        for each in reversed(self._active):
            if not len(each) and free - each.size >= needed:
                free -= each.size
                found.append(each.network)
        return found

    def follow(self, networks: Sequence[IPNetwork], *, keep: bool = False) -> bool:
        """Hand out from these from now on; whether anything changed.

        A range that is missing there is retired while addresses of it are in use, or in any case (``keep``),
        and comes back as it was.
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
                    each.take(ip)
        return True

    def covers(self, ip: IPAddress) -> bool:
        """Whether one of the networks has the address, even a retired one."""
        return any(each.covers(ip) for each in self._all())

    def take_next(self) -> IPAddress:
        """Take some free address; raises RangeFull."""
        for each in self._active:
            try:
                ip = each.take_next()
            except RangeFull:
                continue
            for other in self._all():
                if other is not each and other.covers(ip):
                    other.take(ip)
            self._count += 1
            return ip
        raise RangeFull

    def take(self, ip: IPAddress) -> bool:
        """Take this address, which a network must cover; False if it is taken already."""
        if ip in self:
            return False
        for each in self._all():
            if each.covers(ip):
                each.take(ip)
        self._count += 1
        return True

    def give_back(self, ip: IPAddress) -> bool:
        """Free this address; False if it was not taken."""
        if ip not in self:
            return False
        for each in self._all():
            each.give_back(ip)
        self._count -= 1
        return True

    def forget_retired(self) -> bool:
        """Let go of retired networks without addresses in use; whether there was one."""
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


# Requests for addresses that are refused, with the status and the words of Cilium's API.

NEXT_FAILED: Final = 502
FAILED: Final = 500
NOT_YET: Final = "pool not (yet) available"
NOT_SUPPORTED: Final = "Operation not supported: addresses are given by the delegated IPAM plugin"


class IpamError(Refusal):
    """A request for an address that is refused; ``status`` is the HTTP status Cilium's API gives it."""


class IpamLaterError(IpamError):
    """A request that is refused now, and may be met later."""

    def __init__(self, text: str, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__(NEXT_FAILED, text)
        self.wait = wait
        """Comes back when it may be worth another try, or never."""
