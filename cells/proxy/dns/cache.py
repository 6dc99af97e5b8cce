"""Answers of DNS to an endpoint, and their expiry.

Pure:   times are given. Seconds since the epoch.
Source: Cilium 1.17, the DNS cache of an endpoint, and its zombies.

An address with an expired TTL becomes a *zombie*: it is valid while the endpoint has a connection to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from cells.base.addresses import IPAddress
from cells.endpoint import SavedLookup, SavedNames, SavedZombie
from cells.policy.labels import canonical_name


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """An answer: the addresses that a name had."""

    name: str
    addresses: tuple[IPAddress, ...]
    ttl: int
    at: float
    expires: float


class Zombie(msgspec.Struct):
    """An address past its TTL, and the names it had."""

    names: set[str]
    since: float
    idle: int = 0
    """How many passes in a row have found no connection to it."""


Pair = tuple[str, IPAddress]
"""A name and one of its addresses."""


class EndpointNames:
    """The names of one endpoint. Methods return the pairs that they have added or removed."""

    def __init__(self, most: int, most_zombies: int) -> None:
        self._most = most
        self._most_zombies = most_zombies
        self._names: dict[str, dict[IPAddress, Lookup]] = {}
        self.zombies: dict[IPAddress, Zombie] = {}

    def pairs(self) -> Iterator[Pair]:
        """All pairs of name and address, zombies too."""
        for name, addresses in self._names.items():
            yield from ((name, address) for address in addresses)
        for address, zombie in self.zombies.items():
            for name in zombie.names:
                if address not in self._names.get(name, ()):
                    yield name, address

    def lookups(self) -> Iterator[Lookup]:
        """The answers with a live TTL, each once, with the addresses that still belong to it."""
        for name, addresses in self._names.items():
            of: dict[Lookup, list[IPAddress]] = {}
            for address, lookup in addresses.items():
                of.setdefault(lookup, []).append(address)
            for lookup, held in of.items():
                yield msgspec.structs.replace(lookup, name=name, addresses=tuple(held))

    @property
    def names(self) -> int:
        """How many names have a live TTL."""
        return len(self._names)

    @property
    def addresses(self) -> int:
        """How many addresses have a live TTL."""
        return len({address for addresses in self._names.values() for address in addresses})

    def learn(self, lookup: Lookup) -> tuple[list[Pair], list[Pair]]:
        """Add an answer; the added pairs, and those removed to make room."""
        name = lookup.name
        known = self._names.setdefault(name, {})
        came = []
        for address in lookup.addresses:
            zombie = self.zombies.get(address)
            was_zombie = zombie is not None and name in zombie.names
            if address not in known and not was_zombie:
                came.append((name, address))
            if zombie is not None:
                self._revive(address, zombie, name)
            before = known.get(address)
            if before is None or before.expires < lookup.expires:
                known[address] = lookup
        if len(known) <= self._most:
            return came, []
        over = sorted(known, key=lambda address: known[address].expires)[: len(known) - self._most]
        went = self._expire(name, over, lookup.at)
        return [pair for pair in came if pair not in went], [pair for pair in went if pair not in came]

    def _revive(self, address: IPAddress, zombie: Zombie, name: str) -> None:
        zombie.names.discard(name)
        if not zombie.names:
            del self.zombies[address]

    def date_back(self, now: float) -> None:
        """Date answers and zombies from the future as of now: the clock was set back.

        Otherwise their addresses would stay open until it is that late again.
        """
        for addresses in self._names.values():
            for address, of in addresses.items():
                if of.at > now:
                    addresses[address] = msgspec.structs.replace(of, at=now, expires=now + of.ttl)
        for zombie in self.zombies.values():
            zombie.since = min(zombie.since, now)

    def expire(self, now: float) -> list[Pair]:
        """Make zombies of addresses with an expired TTL; the zombies removed to make room."""
        went: list[Pair] = []
        for name, addresses in list(self._names.items()):
            went += self._expire(name, [one for one, of in addresses.items() if of.expires <= now], now)
        return went

    def _expire(self, name: str, addresses: Iterable[IPAddress], now: float) -> list[Pair]:
        known = self._names[name]
        for address in addresses:
            ended = known.pop(address)
            zombie = self.zombies.setdefault(address, Zombie(set(), min(now, ended.expires)))
            zombie.names.add(name)
        if not known:
            del self._names[name]
        over = len(self.zombies) - self._most_zombies
        if over <= 0:
            return []
        oldest = sorted(self.zombies, key=lambda address: self.zombies[address].since)[:over]
        return [pair for address in oldest for pair in self._bury(address)]

    def _bury(self, address: IPAddress) -> Iterator[Pair]:
        zombie = self.zombies.pop(address)
        yield from ((name, address) for name in zombie.names)

    def collect(self, alive: Collection[IPAddress], now: float, grace: float) -> list[Pair]:
        """Forget zombies that two passes in a row found idle, after their grace time; returns them."""
        went: list[Pair] = []
        for address, zombie in list(self.zombies.items()):
            if address in alive:
                zombie.idle = 0
                continue
            zombie.idle += 1
            if zombie.idle >= PASSES and zombie.since + grace <= now:
                went += self._bury(address)
        return went

    def forget(self, names: Collection[str]) -> list[Pair]:
        """Remove these names, zombies too; the removed pairs."""
        went = [(name, one) for name in names if name in self._names for one in self._names.pop(name)]
        for address, zombie in list(self.zombies.items()):
            for name in zombie.names & set(names):
                if (name, address) not in went:
                    went.append((name, address))
                self._revive(address, zombie, name)
        return went

    def all_names(self) -> set[str]:
        """All names, those of zombies too."""
        return self._names.keys() | {name for zombie in self.zombies.values() for name in zombie.names}


PASSES = 2
"""Passes over conntrack that must find an address idle before it is removed."""


# Names of an endpoint in the form in which its saved state has them.


def saved_names(of: EndpointNames | None) -> SavedNames:
    """The names as SavedNames."""
    if of is None:
        return SavedNames()
    return SavedNames(
        tuple(SavedLookup(one.name, one.addresses, one.ttl, one.at, one.expires) for one in of.lookups()),
        tuple(
            SavedZombie(address, tuple(sorted(zombie.names)), zombie.since)
            for address, zombie in of.zombies.items()
        ),
    )


def zombies_of(saved: SavedNames) -> Iterator[tuple[str, IPAddress, float]]:
    """Each name of an address with an expired TTL, and since when."""
    for one in saved.zombies:
        yield from ((canonical_name(name), one.address, one.since) for name in one.names)
