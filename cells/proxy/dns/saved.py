"""Names of an endpoint in the form in which its saved state has them.

For:    NameStore. Needs: nothing. Gives: saved_names(), zombies_of().
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.endpoint import SavedLookup, SavedNames, SavedZombie
from cells.ipam import IPAddress
from cells.policy.control import canonical_name
from cells.proxy.dns.cache import EndpointNames


def saved_names(of: EndpointNames | None) -> SavedNames:
    """What is to be saved."""
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
    """Each name of an address whose TTL was over, and since when."""
    for one in saved.zombies:
        yield from ((canonical_name(name), one.address, one.since) for name in one.names)
