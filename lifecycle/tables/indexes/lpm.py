"""An index by IP prefix: longest match, covering prefixes, prefixes within another.

A lookup tries the existing prefix lengths by hash, the longest first. A prefix is stored as (IP version,
network address, length), so that prefixes within it follow it in sorted order.
"""

from collections.abc import Callable, Hashable, Iterable
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_network,
)
from itertools import takewhile
from typing import TypeVar

from lifecycle.tables.indexes.hashed import RowSource
from lifecycle.tables.indexes.ordered import OrderedKeys

__all__ = ["LPMIndex", "Prefixes"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Prefixes = Callable[[Row], Iterable[Address | Network]]
Value = tuple[int, int, int]

BITS = {4: 32, 6: 128}


class LPMIndex(OrderedKeys[Key, Row]):
    """Finds rows by the IP prefixes of a function; an address is a prefix of full length."""

    single = (str, bytes, IPv4Network, IPv6Network, IPv4Address, IPv6Address)

    def __init__(self, source: RowSource[Key, Row], name: str, prefixes: Prefixes[Row]) -> None:
        super().__init__(source, name, prefixes)
        self._counts: dict[int, dict[int, int]] = {4: {}, 6: {}}  # version -> length -> prefixes
        self._lengths: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        """IP version -> existing prefix lengths with their masks, the longest first."""

    def longest(self, address: Address | str) -> Row | None:
        """Return the row with the longest prefix that contains the address, or None.

        Raises LookupError if several rows have that prefix, ValueError for an invalid address.
        """
        rows = self._source._current()  # noqa: SLF001  # the two are one mechanism
        version, number, _ = self._value(ip_address(address) if isinstance(address, str) else address)
        for length, mask in self._lengths[version]:
            if keys := self._keys.get((version, number & mask, length)):
                if len(keys) > 1:
                    raise LookupError(
                        f"table {self._source.name}: {len(keys)} rows have the {self.name} that holds "
                        f"{address} best, not one"
                    )
                return rows[next(iter(keys))][0]
        return None

    def covering(self, prefix: Address | Network | str) -> list[Row]:
        """Return all rows with a prefix that contains this address or prefix, the longest first."""
        self._source._current()  # noqa: SLF001
        version, number, length = self._value(_parsed(prefix))
        around = ((version, number & mask, bits) for bits, mask in self._lengths[version] if bits <= length)
        return self._rows_with(value for value in around if value in self._keys)

    def within(self, prefix: Address | Network | str) -> list[Row]:
        """Return all rows with a prefix that is within this one or equals it, by address."""
        self._source._current()  # noqa: SLF001
        version, number, length = self._value(_parsed(prefix))
        end = (version, number + (1 << BITS[version] - length))
        return self._rows_with(
            takewhile(lambda value: value < end, self._order.starting_at((version, number, length)))
        )

    def get(self, value: Hashable) -> list[Row]:
        """Return all rows with exactly this prefix."""
        return super().get(self._value(value))

    def keys(self, value: Hashable) -> list[Key]:
        """Return the keys of all rows with exactly this prefix."""
        return super().keys(self._value(value))

    def values(self) -> list[Hashable]:
        """Return all prefixes of rows, IPv4 first, by address."""
        self._source._current()  # noqa: SLF001
        return [_network(value) for value in self._order]

    def __contains__(self, value: Hashable) -> bool:
        return super().__contains__(self._value(value))

    def _note(self, added: Iterable[Value], removed: Iterable[Value]) -> None:
        for version, _, length in added:
            counts = self._counts[version]
            counts[length] = counts.get(length, 0) + 1
        for version, _, length in removed:
            counts = self._counts[version]
            counts[length] -= 1
            if not counts[length]:
                del counts[length]
        for version, counts in self._counts.items():
            if len(counts) != len(self._lengths[version]) or any(
                length not in counts for length, _ in self._lengths[version]
            ):
                bits = BITS[version]
                self._lengths[version] = [
                    (length, (1 << bits) - (1 << bits - length)) for length in sorted(counts, reverse=True)
                ]

    def _hashed(self, values: Iterable[Hashable]) -> frozenset[Hashable]:
        return frozenset(map(self._value, values))

    def _value(self, prefix: object) -> Value:
        if isinstance(prefix, Network):
            return prefix.version, int(prefix.network_address), prefix.prefixlen
        if isinstance(prefix, Address) and not isinstance(prefix, IPv4Interface | IPv6Interface):
            return prefix.version, int(prefix), BITS[prefix.version]
        raise TypeError(
            f"table {self._source.name}: index {self.name} holds addresses and networks of ipaddress, "
            f"not {prefix!r}"
        )


def _parsed(prefix: Address | Network | str) -> Address | Network:
    return ip_network(prefix) if isinstance(prefix, str) else prefix


def _network(value: Value) -> Network:
    version, number, length = value
    return IPv4Network((number, length)) if version == 4 else IPv6Network((number, length))
