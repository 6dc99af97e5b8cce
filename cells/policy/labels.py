"""Labels of identities and what selects them: label selectors, CIDR containment, DNS names.

Pure values; no cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from cells.base.labels import CIDR, Label, cidr_label, parse

__all__ = [
    "FQDNSelector",
    "LabelSet",
    "Prefix",
    "PrefixSet",
    "address_labels",
    "canonical_name",
    "cidr_of_label",
    "dns_pattern",
    "except_prefixes",
    "network_labels",
    "parse_prefix",
    "prefix_labels",
    "world_label",
]


# Prefixes as policy sees them: their label, the world they lie in, what remains without exceptions.

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


_LENGTH = re.compile("0|[1-9][0-9]{0,2}")


def parse_prefix(text: str) -> Prefix:
    """A network in CIDR notation, with or without bits of a host. Raises ValueError in Go's words.

    It takes no masks, as in ``10.0.0.0/255.0.0.0``, and no zones, which Python's ``ip_network`` does.
    """
    address, slash, length = text.rpartition("/")
    if not slash:
        raise ValueError(f"netip.ParsePrefix(\"{text}\"): no '/'")
    try:
        parsed = ip_address(address)
    except ValueError:
        wrong = f'ParseAddr("{address}"): unable to parse IP'
    else:
        if "%" in address:
            wrong = "IPv6 zones cannot be present in a prefix"
        elif not _LENGTH.fullmatch(length):
            wrong = f'bad bits after slash: "{length}"'
        elif int(length) > parsed.max_prefixlen:
            wrong = "prefix length out of range"
        else:
            return ip_network(text, strict=False)
    raise ValueError(f'netip.ParsePrefix("{text}"): {wrong}')


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


# The set of labels that makes an identity, looked up by key and source.

ANY = "any"
"""The source that a selector's key without one has: it matches the key from every source."""


FQDN = "fqdn"


class LabelSet:
    """The labels of one identity, looked up by key and source. Immutable and hashable."""

    def __init__(self, labels: Iterable[Label]) -> None:
        self._labels = tuple(sorted(set(labels)))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> LabelSet:
        """From texts, ``source:key[=value]``."""
        return cls(map(parse, texts))

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, texts: tuple[str, ...]) -> LabelSet:
        """As parse(), for labels that are asked about again and again: those of an identity."""
        return cls.parse(texts)

    def __iter__(self) -> Iterator[Label]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelSet) and self._labels == other._labels

    def __hash__(self) -> int:
        return hash(self._labels)

    def __repr__(self) -> str:
        return f"LabelSet({', '.join(map(str, self._labels))})"

    @cached_property
    def _by_key(self) -> dict[str, tuple[Label, ...]]:
        found: dict[str, tuple[Label, ...]] = {}
        for label in self._labels:
            found[label.key] = (*found.get(label.key, ()), label)
        return found

    @cached_property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The prefixes of the identity's ``cidr:`` labels: one, or those of all addresses of this node."""
        found = (cidr_of_label(label.key) for label in self._labels if label.source == CIDR)
        return tuple(prefix for prefix in found if prefix is not None)

    @cached_property
    def is_network(self) -> bool:
        """Whether it stands for the addresses in a network alone: rules by other labels say nothing of it."""
        return bool(self._labels) and all(label.source == CIDR for label in self._labels)

    def has_reserved(self, key: str) -> bool:
        """Whether the set has ``reserved:KEY``."""
        return any(label.source == "reserved" for label in self._by_key.get(key, ()))

    @cached_property
    def index_keys(self) -> tuple[tuple[str, str | None], ...]:
        """What selectors may be found by: every key with its value, and without; one for any CIDR label."""
        pairs = {(label.key, label.value) for label in self._labels}
        keys: set[tuple[str, str | None]] = {(key, None) for key in self._by_key}
        cidr: set[tuple[str, str | None]] = {(CIDR, None)} if self.prefixes else set()
        return tuple(pairs | keys | cidr)

    def value(self, source: str, key: str) -> str | None:
        """The value of a key from ``source``, or from any source for ``any``; None where there is none."""
        for label in self._by_key.get(key, ()):
            if source in (ANY, label.source):
                return label.value
        return None


# Names of ``toFQDNs`` and DNS rules: one form, and patterns as regular expressions.

_ANY_NAME = r"(^([-a-zA-Z0-9_]+[.])+$)|(^[.]$)"
_WITHIN_LABEL = r"[-a-zA-Z0-9_]*"


def canonical_name(name: str) -> str:
    """A DNS name as it is compared: lower case, without surrounding space, ending in a dot."""
    name = name.strip().lower()
    return name if name.endswith(".") else f"{name}."


def sanitised_pattern(pattern: str) -> str:
    """A pattern in the form of names; ``*`` alone stays, it matches every name."""
    pattern = pattern.strip().lower()
    return pattern if pattern == "*" else canonical_name(pattern)


@lru_cache(maxsize=4096)
def dns_pattern(pattern: str) -> re.Pattern[str]:
    """The expression of a ``matchPattern`` over canonical names.

    ``*`` stands for any characters of one name's label, none included, and never for a dot; alone it
    matches every name.
    """
    pattern = sanitised_pattern(pattern)
    if pattern == "*":
        return re.compile(_ANY_NAME)
    return re.compile(f"^{pattern.replace('.', '[.]').replace('*', _WITHIN_LABEL)}$")


class FQDNSelector(NamedTuple):
    """Selects identities of addresses that DNS answered for a name (``toFQDNs``); one of the two is set."""

    match_name: str = ""
    match_pattern: str = ""

    @property
    def text(self) -> str:
        """As written in the policy; the identity's ``fqdn:`` label carries it."""
        return self.match_name or self.match_pattern

    @property
    def expression(self) -> str:
        """The regular expression of the names that are meant."""
        if self.match_name:
            return f"^{canonical_name(self.match_name).replace('.', '[.]')}$"
        return dns_pattern(self.match_pattern).pattern

    def matches_name(self, name: str) -> bool:
        """Whether a name in canonical form is meant."""
        if self.match_name:
            return canonical_name(self.match_name) == name
        return dns_pattern(self.match_pattern).fullmatch(name) is not None

    def matches(self, labels: LabelSet) -> bool:
        """Whether an identity carries this selector's label."""
        return Label(FQDN, self.text) in tuple(labels)

    def index_keys(self) -> tuple[tuple[str, str | None], ...]:
        """The label that every selected identity has."""
        return ((self.text, ""),)


# The labels of what lies outside the cluster: prefixes that rules name, addresses that DNS answered.


def prefix_labels(prefix: Prefix, *, dual_stack: bool) -> LabelSet:
    """The labels of a prefix's identity; those of a whole family are the world's alone."""
    labels = [Label("reserved", world_label(prefix, dual_stack=dual_stack))]
    if prefix.prefixlen:
        labels.append(Label(CIDR, cidr_label(prefix)))
    return LabelSet(labels)


def network_labels(prefix: Prefix) -> LabelSet:
    """The labels of what has an address in a prefix and an identity of its own, as pods have."""
    return LabelSet([Label(CIDR, cidr_label(prefix))])


def address_labels(
    address: Prefix, selectors: Iterable[FQDNSelector], prefixes: Iterable[Prefix], *, dual_stack: bool
) -> LabelSet:
    """The labels of an address that DNS answered for names of ``selectors``.

    It has the CIDR label of the nearest prefix around it that has an identity, so that CIDR rules, denies
    above all, hold for it, too. Addresses with the same labels share an identity.
    """
    labels = [Label(FQDN, selector.text) for selector in selectors]
    labels.append(Label("reserved", world_label(address, dual_stack=dual_stack)))
    around = [prefix for prefix in prefixes if prefix.prefixlen and contains(prefix, address)]
    if around:
        nearest = max(around, key=lambda prefix: prefix.prefixlen)
        labels.append(Label(CIDR, cidr_label(nearest)))
    return LabelSet(labels)
