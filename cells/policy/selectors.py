"""Label selectors in one canonical form, so that equal ones are one in the selector cache.

Source: Kubernetes' LabelSelector; a key's prefix names the label's source (``k8s:``, ``reserved:``,
        ``cidr:``), none means any source. A ``cidr:`` key matches every identity with a prefix inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from cells.base.labels import CIDR
from cells.policy.labels import ANY, FQDNSelector, LabelSet, cidr_of_label, contains

IN, NOT_IN, EXISTS = "In", "NotIn", "Exists"


IndexKey = tuple[str, str | None]
"""A label's key with its value, or with None for whatever value."""

CIDR_INDEX: IndexKey = (CIDR, None)


class Requirement(NamedTuple):
    """One condition on one key. ``values`` is sorted; empty for Exists and DoesNotExist."""

    source: str
    key: str
    operator: str
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str, operator: str, values: Iterable[str] = ()) -> Requirement:
        """From a selector's key; the part before the first colon is the source."""
        source, colon, name = key.partition(":")
        return cls(*((source, name) if colon else (ANY, key)), operator, tuple(sorted(set(values))))

    @property
    def text_key(self) -> str:
        """The key with its source."""
        return f"{self.source}:{self.key}"

    def matches(self, labels: LabelSet) -> bool:
        """Whether the labels meet the condition, as Kubernetes defines the four operators."""
        source, key, operator, values = self
        value = _cidr_value(labels, key) if source == CIDR else labels.value(source, key)
        if operator == IN:
            return value is not None and value in values
        if operator == NOT_IN:
            return value is None or value not in values
        return (value is not None) == (operator == EXISTS)


def _cidr_value(labels: LabelSet, key: str) -> str | None:
    wanted = cidr_of_label(key)
    if wanted is None:
        return None
    return "" if any(contains(wanted, own) for own in labels.prefixes) else None


class Selector(msgspec.Struct, frozen=True, order=True, dict=True):
    """All of some requirements; without any it selects everything."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def of(cls, requirements: Iterable[Requirement]) -> Selector:
        """Requirements in canonical order, each once."""
        return cls(tuple(sorted(set(requirements))))

    @classmethod
    def reserved(cls, name: str) -> Selector:
        """The identities with ``reserved:NAME``."""
        return cls((Requirement("reserved", name, IN, ("",)),))

    def also(self, *requirements: Requirement) -> Selector:
        """This selector with more requirements."""
        return Selector.of((*self.requirements, *requirements))

    @property
    def is_wildcard(self) -> bool:
        """Whether it selects everything, labelled or not."""
        return not self.requirements

    def matches(self, labels: LabelSet) -> bool:
        """Whether every requirement is met; of a network alone, one that names networks is among them."""
        for requirement in self.requirements:
            if not requirement.matches(labels):
                return False
        return not labels.is_network or self.has_source(CIDR)

    def has_key(self, key: str, *sources: str) -> bool:
        """Whether a requirement, of whatever operator, names the key from one of the sources."""
        return any(one.key == key and one.source in sources for one in self.requirements)

    def has_key_prefix(self, prefix: str) -> bool:
        """Whether a requirement names a key that starts so, from any Kubernetes source."""
        return any(one.key.startswith(prefix) and one.source in (ANY, "k8s") for one in self.requirements)

    def has_source(self, source: str) -> bool:
        """Whether a requirement names a key of the source."""
        return any(one.source == source for one in self.requirements)

    def index_keys(self) -> Sequence[IndexKey]:
        """What every selected identity has one of: a key with a value, or a key; empty when there is nothing.

        CIDR requirements match by containment: ``("cidr", None)`` stands for any CIDR label.
        """
        for one in self.requirements:
            if one.source == CIDR and one.operator in (IN, EXISTS):
                return (CIDR_INDEX,)
            if one.operator == IN:
                return tuple((one.key, value) for value in one.values)
        return next(
            (
                ((one.key, None),)
                for one in self.requirements
                if one.operator == EXISTS and one.source != CIDR
            ),
            (),
        )

    @cached_property
    def _object(self) -> dict[str, object]:
        shown: dict[str, object] = {}
        equal = {one.text_key: one.values[0] for one in self.requirements if _is_equality(one)}
        other = [
            {"key": one.text_key, "operator": one.operator}
            | ({"values": list(one.values)} if one.values else {})
            for one in self.requirements
            if not _is_equality(one)
        ]
        if equal:
            shown["matchLabels"] = equal
        if other:
            shown["matchExpressions"] = other
        return shown

    def as_object(self) -> object:
        """As a LabelSelector with the source before each key; ``*`` for the one that selects everything."""
        return self._object or "*"


def _is_equality(requirement: Requirement) -> bool:
    return requirement.operator == IN and len(requirement.values) == 1


PeerSelector = Selector | FQDNSelector

ALL = Selector()
"""Selects everything, what has no labels included."""

NONE = Selector.reserved("none")
"""Selects nothing: no identity has the label."""


# A selector as one line, the way Cilium's API and command write it.
#
# Source: k8s.io/apimachinery, LabelSelector.String(), over keys that start with their source; Cilium 1.17,
#         FQDNSelector.String().


def selector_text(selector: PeerSelector) -> str:
    """``&LabelSelector{MatchLabels:map[string]string{k8s.app: web,},...}``, or ``MatchName: ..., ...``."""
    if isinstance(selector, FQDNSelector):
        return f"MatchName: {selector.match_name}, MatchPattern: {selector.match_pattern}"
    equal = [one for one in selector.requirements if one.operator == IN and len(one.values) == 1]
    other = [one for one in selector.requirements if one not in equal]
    labels = "".join(f"{key}: {one.values[0]}," for key, one in sorted((_key(one), one) for one in equal))
    expressions = "".join(
        f"LabelSelectorRequirement{{Key:{_key(one)},Operator:{one.operator},"
        f"Values:[{' '.join(one.values)}],}},"
        for one in other
    )
    return (
        f"&LabelSelector{{MatchLabels:map[string]string{{{labels}}},"
        f"MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )


def _key(requirement: Requirement) -> str:
    return f"{requirement.source}.{requirement.key}"
