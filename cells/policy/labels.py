"""Labels of identities, and the values that rules match them with: prefixes and DNS names.

Pure values; no cell. The selector cache, the translation of rules and the allocation of CIDR and FQDN
identities use them.
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


# Prefixes: their labels, containment, and exceptions.

Prefix = IPv4Network | IPv6Network


@lru_cache(maxsize=65536)
def cidr_of_label(key: str) -> Prefix | None:
    """Return the prefix that a ``cidr:`` label's key encodes, or None if it is invalid.

    IPv6 keys have ``-`` for ``:``, and a ``0`` before or after ``::``, because a label's key may not start or
    end with a hyphen.
    """
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
    """Parse a network in CIDR notation; host bits are allowed. Raises ValueError with Go's message.

    Unlike Python's ``ip_network`` it rejects netmasks (``10.0.0.0/255.0.0.0``) and zones.
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
    """Return the reserved label outside the cluster: ``world``, or one per family in dual stack."""
    return f"world-ipv{prefix.version}" if dual_stack else "world"


def except_prefixes(prefix: Prefix, exceptions: Iterable[Prefix]) -> list[Prefix]:
    """Return the fewest prefixes that cover a prefix without its exceptions.

    Exceptions outside the prefix have no effect.
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
    """An immutable set of prefixes with a longest-prefix match. Prefixes of length 0 are left out."""

    def __init__(self, prefixes: Iterable[Prefix] = ()) -> None:
        self._by_length: dict[tuple[int, int], dict[int, Prefix]] = {}
        for prefix in prefixes:
            if prefix.prefixlen:
                of_length = self._by_length.setdefault((prefix.version, -prefix.prefixlen), {})
                of_length[int(prefix.network_address)] = prefix
        self._lengths = sorted(self._by_length)

    def nearest(self, address: IPv4Address | IPv6Address) -> Prefix | None:
        """Return the longest prefix that contains the address, or None."""
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


# Label sets of identities.

ANY = "any"
"""The source of a selector's key without a prefix: it matches labels from every source."""


FQDN = "fqdn"


class LabelSet:
    """The labels of one identity, indexed by key and source. Immutable and hashable."""

    def __init__(self, labels: Iterable[Label]) -> None:
        self._labels = tuple(sorted(set(labels)))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> LabelSet:
        """Return the set of labels written as ``source:key[=value]``."""
        return cls(map(parse, texts))

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, texts: tuple[str, ...]) -> LabelSet:
        """Return what parse() does, cached: for labels of identities, which are looked up repeatedly."""
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
        """The prefixes of the ``cidr:`` labels: usually one; for the host, every address of the node."""
        found = (cidr_of_label(label.key) for label in self._labels if label.source == CIDR)
        return tuple(prefix for prefix in found if prefix is not None)

    @cached_property
    def has_only_cidr_labels(self) -> bool:
        """Whether all labels are CIDRs: the set of a pod's address, which only CIDR rules select."""
        return bool(self._labels) and all(label.source == CIDR for label in self._labels)

    def has_reserved(self, key: str) -> bool:
        """Whether the set has the label ``reserved:KEY``."""
        return any(label.source == "reserved" for label in self._by_key.get(key, ()))

    @cached_property
    def index_keys(self) -> tuple[tuple[str, str | None], ...]:
        """The index keys: each key with its value and with None, and ``("cidr", None)`` for CIDRs."""
        pairs = {(label.key, label.value) for label in self._labels}
        keys: set[tuple[str, str | None]] = {(key, None) for key in self._by_key}
        cidr: set[tuple[str, str | None]] = {(CIDR, None)} if self.prefixes else set()
        return tuple(pairs | keys | cidr)

    def value(self, source: str, key: str) -> str | None:
        """Return the value of a key from ``source``, or from any source for ``any``; None if it is absent."""
        for label in self._by_key.get(key, ()):
            if source in (ANY, label.source):
                return label.value
        return None


# Names and patterns of ``toFQDNs`` and DNS rules.

_ANY_NAME = r"(^([-a-zA-Z0-9_]+[.])+$)|(^[.]$)"
_WITHIN_LABEL = r"[-a-zA-Z0-9_]*"


def canonical_name(name: str) -> str:
    """Return a DNS name in canonical form: lower case, without surrounding space, ending in a dot."""
    name = name.strip().lower()
    return name if name.endswith(".") else f"{name}."


def sanitised_pattern(pattern: str) -> str:
    """Return a ``matchPattern`` in canonical form; ``*`` alone, which matches every name, is unchanged."""
    pattern = pattern.strip().lower()
    return pattern if pattern == "*" else canonical_name(pattern)


@lru_cache(maxsize=4096)
def dns_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a ``matchPattern``, for canonical names.

    ``*`` stands for any number of characters except a dot; alone it matches every name.
    """
    pattern = sanitised_pattern(pattern)
    if pattern == "*":
        return re.compile(_ANY_NAME)
    return re.compile(f"^{pattern.replace('.', '[.]').replace('*', _WITHIN_LABEL)}$")


class FQDNSelector(NamedTuple):
    """Selects identities of addresses that DNS returned for a name (``toFQDNs``); one field is set."""

    match_name: str = ""
    match_pattern: str = ""

    @property
    def text(self) -> str:
        """The name or pattern as written in the policy, which is the key of the ``fqdn:`` label."""
        return self.match_name or self.match_pattern

    @property
    def expression(self) -> str:
        """The regular expression of the selected names."""
        if self.match_name:
            return f"^{canonical_name(self.match_name).replace('.', '[.]')}$"
        return dns_pattern(self.match_pattern).pattern

    def matches_name(self, name: str) -> bool:
        """Whether the selector selects a name, given in canonical form."""
        if self.match_name:
            return canonical_name(self.match_name) == name
        return dns_pattern(self.match_pattern).fullmatch(name) is not None

    def matches(self, labels: LabelSet) -> bool:
        """Whether an identity has this selector's ``fqdn:`` label."""
        return Label(FQDN, self.text) in tuple(labels)

    def index_keys(self) -> tuple[tuple[str, str | None], ...]:
        """Return the label that every selected identity has."""
        return ((self.text, ""),)


# Labels of identities outside the cluster: prefixes in rules, and addresses that DNS returned.


def prefix_labels(prefix: Prefix, *, dual_stack: bool) -> LabelSet:
    """Return the labels of a prefix's identity: world and CIDR; only world for a prefix of length 0."""
    labels = [Label("reserved", world_label(prefix, dual_stack=dual_stack))]
    if prefix.prefixlen:
        labels.append(Label(CIDR, cidr_label(prefix)))
    return LabelSet(labels)


def network_labels(prefix: Prefix) -> LabelSet:
    """Return the labels of the identity of a prefix that contains addresses of pods.

    Rules match it next to the pod's own identity, if CIDR rules select pods (``cidr_matches_pods``).
    """
    return LabelSet([Label(CIDR, cidr_label(prefix))])


def address_labels(
    address: Prefix, selectors: Iterable[FQDNSelector], prefixes: Iterable[Prefix], *, dual_stack: bool
) -> LabelSet:
    """Return the labels of an address that DNS returned for names of ``selectors``.

    They include the CIDR label of the longest prefix that contains the address and has an identity, so that
    CIDR rules, in particular denies, apply to it. Addresses with equal labels share an identity.
    """
    labels = [Label(FQDN, selector.text) for selector in selectors]
    labels.append(Label("reserved", world_label(address, dual_stack=dual_stack)))
    around = [prefix for prefix in prefixes if prefix.prefixlen and contains(prefix, address)]
    if around:
        nearest = max(around, key=lambda prefix: prefix.prefixlen)
        labels.append(Label(CIDR, cidr_label(nearest)))
    return LabelSet(labels)
