"""The DNS cache of an endpoint, with the expiry of its addresses.

An address with an expired TTL becomes a *zombie*, which stays valid while the endpoint has a connection to
it. Pure; callers pass the time in seconds since the epoch.

Source: Cilium 1.17, pkg/fqdn/cache.go (DNSCache, DNSZombieMappings).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from cells.base.addresses import IPAddress
from cells.endpoint import SavedLookup, SavedNames, SavedZombie
from cells.policy.labels import canonical_name


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """An answer: the addresses of a name at a time."""

    name: str
    addresses: tuple[IPAddress, ...]
    ttl: int
    at: float
    expires: float


class Zombie(msgspec.Struct):
    """An address with an expired TTL, and its names."""

    names: set[str]
    since: float
    idle: int = 0
    """Number of consecutive passes that found no connection to it."""


Pair = tuple[str, IPAddress]
"""A name and one of its addresses."""


class EndpointNames:
    """The DNS cache of one endpoint. Methods return the pairs that they add or remove."""

    def __init__(self, most: int, most_zombies: int) -> None:
        self._max_addresses = most
        self._max_zombies = most_zombies
        self._names: dict[str, dict[IPAddress, Lookup]] = {}
        self.zombies: dict[IPAddress, Zombie] = {}

    def pairs(self) -> Iterator[Pair]:
        """Yield all pairs of name and address, including zombies."""
        for name, addresses in self._names.items():
            yield from ((name, address) for address in addresses)
        for address, zombie in self.zombies.items():
            for name in zombie.names:
                if address not in self._names.get(name, ()):
                    yield name, address

    def lookups(self) -> Iterator[Lookup]:
        """Yield each unexpired answer once, with the addresses that no newer answer has replaced."""
        for name, addresses in self._names.items():
            of: dict[Lookup, list[IPAddress]] = {}
            for address, lookup in addresses.items():
                of.setdefault(lookup, []).append(address)
            for lookup, held in of.items():
                yield msgspec.structs.replace(lookup, name=name, addresses=tuple(held))

    @property
    def names(self) -> int:
        """Number of names with an unexpired TTL."""
        return len(self._names)

    @property
    def addresses(self) -> int:
        """Number of addresses with an unexpired TTL."""
        return len({address for addresses in self._names.values() for address in addresses})

    def learn(self, lookup: Lookup) -> tuple[list[Pair], list[Pair]]:
        """Add an answer; return the added pairs, and those evicted by the limits."""
        name = lookup.name
        known = self._names.setdefault(name, {})
        added = []
        for address in lookup.addresses:
            zombie = self.zombies.get(address)
            was_zombie = zombie is not None and name in zombie.names
            if address not in known and not was_zombie:
                added.append((name, address))
            if zombie is not None:
                self._remove_zombie_name(address, zombie, name)
            before = known.get(address)
            if before is None or before.expires < lookup.expires:
                known[address] = lookup
        if len(known) <= self._max_addresses:
            return added, []
        excess = sorted(known, key=lambda address: known[address].expires)[: len(known) - self._max_addresses]
        removed = self._expire(name, excess, lookup.at)
        return [pair for pair in added if pair not in removed], [
            pair for pair in removed if pair not in added
        ]

    def _remove_zombie_name(self, address: IPAddress, zombie: Zombie, name: str) -> None:
        zombie.names.discard(name)
        if not zombie.names:
            del self.zombies[address]

    def clamp_future_times(self, now: float) -> None:
        """Date answers and zombies from the future as of now, after the clock was set back.

        Otherwise their addresses would stay allowed until that time.
        """
        for addresses in self._names.values():
            for address, of in addresses.items():
                if of.at > now:
                    addresses[address] = msgspec.structs.replace(of, at=now, expires=now + of.ttl)
        for zombie in self.zombies.values():
            zombie.since = min(zombie.since, now)

    def expire(self, now: float) -> list[Pair]:
        """Turn addresses with an expired TTL into zombies; return the pairs evicted by the limit."""
        removed: list[Pair] = []
        for name, addresses in list(self._names.items()):
            removed += self._expire(name, [one for one, of in addresses.items() if of.expires <= now], now)
        return removed

    def _expire(self, name: str, addresses: Iterable[IPAddress], now: float) -> list[Pair]:
        known = self._names[name]
        for address in addresses:
            ended = known.pop(address)
            zombie = self.zombies.setdefault(address, Zombie(set(), min(now, ended.expires)))
            zombie.names.add(name)
        if not known:
            del self._names[name]
        excess = len(self.zombies) - self._max_zombies
        if excess <= 0:
            return []
        oldest = sorted(self.zombies, key=lambda address: self.zombies[address].since)[:excess]
        return [pair for address in oldest for pair in self._delete_zombie(address)]

    def _delete_zombie(self, address: IPAddress) -> Iterator[Pair]:
        zombie = self.zombies.pop(address)
        yield from ((name, address) for name in zombie.names)

    def collect(self, alive: Collection[IPAddress], now: float, grace: float) -> list[Pair]:
        """Delete zombies without connections in PASSES passes and after the grace period; return them."""
        removed: list[Pair] = []
        for address, zombie in list(self.zombies.items()):
            if address in alive:
                zombie.idle = 0
                continue
            zombie.idle += 1
            if zombie.idle >= PASSES and zombie.since + grace <= now:
                removed += self._delete_zombie(address)
        return removed

    def forget(self, names: Collection[str]) -> list[Pair]:
        """Remove names, including zombies; return the removed pairs."""
        removed = [(name, one) for name in names if name in self._names for one in self._names.pop(name)]
        for address, zombie in list(self.zombies.items()):
            for name in zombie.names & set(names):
                if (name, address) not in removed:
                    removed.append((name, address))
                self._remove_zombie_name(address, zombie, name)
        return removed

    def all_names(self) -> set[str]:
        """Return all names, including those of zombies."""
        return self._names.keys() | {name for zombie in self.zombies.values() for name in zombie.names}


PASSES = 2
"""Consecutive passes over conntrack without a connection before an address is removed."""


# The form of names in an endpoint's saved state.


def saved_names(of: EndpointNames | None) -> SavedNames:
    """Return the cache as SavedNames."""
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
    """Yield name, address and expiry of each saved zombie."""
    for one in saved.zombies:
        yield from ((canonical_name(name), one.address, one.since) for name in one.names)
