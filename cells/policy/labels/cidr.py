"""Prefixes as policy sees them: their label, the world they lie in, what remains without exceptions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from cells.cluster.identity import cidr_label

__all__ = [
    "Prefix",
    "PrefixSet",
    "cidr_label",
    "cidr_of_label",
    "contains",
    "except_prefixes",
    "world_label",
]

Prefix = IPv4Network | IPv6Network


@lru_cache(maxsize=65536)
def cidr_of_label(key: str) -> Prefix | None:
    """The prefix of a ``cidr:`` label's key, None when it is none."""
    address, _, length = key.partition("/")
    if "-" in address:
        address = address.replace("-", ":")
        address = address.removeprefix("0") if address.startswith("0::") else address
        address = address.removesuffix("0") if address.endswith("::0") else address
    try:
        return ip_network(f"{address}/{length}" if length else address, strict=False)
    except ValueError:
        return None


def world_label(prefix: Prefix, *, dual_stack: bool) -> str:
    """The reserved label of what lies outside: ``world``, or one per family where both are in use."""
    return f"world-ipv{prefix.version}" if dual_stack else "world"


def except_prefixes(prefix: Prefix, exceptions: Iterable[Prefix]) -> list[Prefix]:
    """What remains of a prefix without others, as the fewest prefixes.

    Exceptions that do not touch it change nothing.
    """
    remaining: list[Prefix] = [prefix]
    for exception in exceptions:
        remaining = [left for one in remaining for left in _without(one, exception)]
    return remaining


def _without(prefix: Prefix, exception: Prefix) -> Iterable[Prefix]:
    if not _contains(prefix, exception):
        return [] if _contains(exception, prefix) else [prefix]
    if isinstance(prefix, IPv4Network) and isinstance(exception, IPv4Network):
        return prefix.address_exclude(exception)
    if isinstance(prefix, IPv6Network) and isinstance(exception, IPv6Network):
        return prefix.address_exclude(exception)
    return [prefix]


@lru_cache(maxsize=65536)
def _contains(outer: Prefix, inner: Prefix) -> bool:
    return (
        outer.version == inner.version
        and outer.prefixlen <= inner.prefixlen
        and int(outer.network_address) == int(inner.network_address) & int(outer.netmask)
    )


class PrefixSet:
    """Prefixes, asked for the nearest one around an address. Immutable; the whole of a family is left out."""

    def __init__(self, prefixes: Iterable[Prefix] = ()) -> None:
        self._by_length: dict[tuple[int, int], dict[int, Prefix]] = {}
        for prefix in prefixes:
            if prefix.prefixlen:
                of_length = self._by_length.setdefault((prefix.version, -prefix.prefixlen), {})
                of_length[int(prefix.network_address)] = prefix
        self._lengths = sorted(self._by_length)

    def nearest(self, address: IPv4Address | IPv6Address) -> Prefix | None:
        """The longest of the prefixes that has the address."""
        number, bits = int(address), address.max_prefixlen
        for version, length in self._lengths:
            if version == address.version:
                hidden = bits + length
                found = self._by_length[version, length].get(number >> hidden << hidden)
                if found is not None:
                    return found
        return None


def contains(outer: Prefix, inner: Prefix) -> bool:
    """Whether every address of ``inner`` lies in ``outer``."""
    return _contains(outer, inner)
