"""The set of labels that makes an identity, looked up by key and source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache

from cells.cluster.identity import CIDR, Label, parse
from cells.policy.labels.cidr import Prefix, cidr_of_label

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
