"""What DNS has answered an endpoint, as its saved state has it: DNSHistory and DNSZombies.

For:    StateFiles, and cells that store endpoint names.   Needs: nothing.
Gives:  SavedNames, SavedLookup, SavedZombie, NamesJSON.
Source: Cilium 1.17, the DNS cache of an endpoint and its zombies, in ep_config.json.

``null`` is not written: Cilium's agent takes it for a cache that is not there, and ends by it.
"""

from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

_NEVER: Final = "0001-01-01T00:00:00Z"  # Go's zero time


class SavedLookup(msgspec.Struct, frozen=True, gc=False):
    """An answer: a name in any form and its addresses; times in seconds since the epoch."""

    name: str
    addresses: tuple[IPv4Address | IPv6Address, ...]
    ttl: int
    at: float
    expires: float


class SavedZombie(msgspec.Struct, frozen=True, gc=False):
    """An address whose TTLs are over since some time, in seconds since the epoch, and its names."""

    address: IPv4Address | IPv6Address
    names: tuple[str, ...]
    since: float


class SavedNames(msgspec.Struct, frozen=True, gc=False):
    """What is known of an endpoint's names."""

    lookups: tuple[SavedLookup, ...] = ()
    zombies: tuple[SavedZombie, ...] = ()


class _Lookup(msgspec.Struct, frozen=True, gc=False, rename="kebab", omit_defaults=True):
    fqdn: str = ""
    lookup_time: datetime | None = None
    expiration_time: datetime | None = None
    ttl: int = 0
    ips: list[str] | None = None


class _Zombie(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    names: list[str] | None = None
    ip: str = ""
    alive_at: str = _NEVER
    delete_pending_at: datetime | None = None


class _Zombies(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    deletes: dict[str, _Zombie] | None = None


class NamesJSON(msgspec.Struct, frozen=True, gc=False):
    """The values of both keys, as they are in the file."""

    history: bytes = b"[]"
    zombies: bytes = b"{}"

    @classmethod
    def found(cls, history: bytes, zombies: bytes) -> "NamesJSON":
        """As they were found in a file."""
        return cls(b"[]" if history == b"null" else history, b"{}" if zombies == b"null" else zombies)

    @classmethod
    def of(cls, names: SavedNames) -> "NamesJSON":
        """To be written."""
        lookups = [
            _Lookup(one.name, _time(one.at), _time(one.expires), one.ttl, list(map(str, one.addresses)))
            for one in names.lookups
        ]
        zombies = {
            str(one.address): _Zombie(list(one.names), str(one.address), delete_pending_at=_time(one.since))
            for one in names.zombies
        }
        return cls(msgspec.json.encode(lookups), msgspec.json.encode(_Zombies(zombies or None)))

    def read(self) -> SavedNames:
        """What they say; raises ValueError where that is nothing an agent writes."""
        try:
            history = msgspec.json.decode(self.history, type=list[_Lookup] | None) or []
            zombies = msgspec.json.decode(self.zombies, type=_Zombies | None) or _Zombies()
            return SavedNames(
                tuple(map(_lookup, history)),
                tuple(_zombie(address, one) for address, one in (zombies.deletes or {}).items()),
            )
        except (msgspec.DecodeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _lookup(one: _Lookup) -> SavedLookup:
    at = _seconds(one.lookup_time)
    expires = at + one.ttl if one.expiration_time is None else _seconds(one.expiration_time)
    return SavedLookup(one.fqdn, tuple(map(_address, one.ips or ())), one.ttl, at, expires)


def _zombie(address: str, one: _Zombie) -> SavedZombie:
    return SavedZombie(_address(one.ip or address), tuple(one.names or ()), _seconds(one.delete_pending_at))


def _address(text: str) -> IPv4Address | IPv6Address:
    if ":" not in text:
        return IPv4Address(text)
    found = IPv6Address(text)
    if found.scope_id is not None:
        raise ValueError(f'"{text}" is an address of one link')
    return found.ipv4_mapped or found  # Go has IPv4 so, too


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(max(0.0, seconds), UTC)


def _seconds(time: datetime | None) -> float:
    return max(0.0, time.timestamp()) if time is not None and time.tzinfo is not None else 0.0
