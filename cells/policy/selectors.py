"""Label selectors in one canonical form, so that equal selectors share one entry of the selector cache.

As in Cilium, selectors are equal if their labels and their lists of expressions are.
Rules are translated to these; the selector cache matches them against the labels of identities. A key's
prefix names the label's source (``k8s:``, ``reserved:``, ``cidr:``); a key without a prefix matches labels
from any source. A ``cidr:`` key matches every identity with a prefix inside it.

Source: Kubernetes' LabelSelector; Cilium's pkg/policy/api/selector.go.
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
"""A label's key with its value, or with None for any value."""

CIDR_INDEX: IndexKey = (CIDR, None)


class Requirement(NamedTuple):
    """One condition on one label key. ``values`` is empty for Exists and DoesNotExist."""

    source: str
    key: str
    operator: str
    values: tuple[str, ...] = ()
    is_label: bool = False
    """Whether it is one of ``matchLabels``: IN with one value."""

    @classmethod
    def of(cls, key: str, operator: str, values: Iterable[str] = ()) -> Requirement:
        """Return a requirement for a key of a selector; the part before the first colon is the source."""
        source, colon, name = key.partition(":")
        return cls(*((source, name) if colon else (ANY, key)), operator, tuple(dict.fromkeys(values)))

    @classmethod
    def label(cls, key: str, value: str) -> Requirement:
        """Return the requirement of an entry of ``matchLabels``."""
        return cls.of(key, IN, (value,))._replace(is_label=True)

    @property
    def text_key(self) -> str:
        """The key with its source, ``SOURCE:KEY``."""
        return f"{self.source}:{self.key}"

    def matches(self, labels: LabelSet) -> bool:
        """Whether the labels meet the condition, by Kubernetes' definition of the four operators."""
        source, key, operator, values, _ = self
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
    """A conjunction of requirements; without requirements it selects every identity."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def of(cls, requirements: Iterable[Requirement]) -> Selector:
        """Return a selector with sorted labels, then the other requirements in order; no duplicates."""
        distinct = dict.fromkeys(requirements)
        labels = sorted(one for one in distinct if one.is_label)
        return cls((*labels, *(one for one in distinct if not one.is_label)))

    @classmethod
    def reserved(cls, name: str) -> Selector:
        """Return the selector of identities with the label ``reserved:NAME``."""
        return cls((Requirement("reserved", name, IN, ("",), is_label=True),))

    def with_requirements(self, *requirements: Requirement) -> Selector:
        """Return this selector with additional requirements."""
        return Selector.of((*self.requirements, *requirements))

    @property
    def is_wildcard(self) -> bool:
        """Whether it selects every identity, including identities without labels."""
        return not self.requirements

    def matches(self, labels: LabelSet) -> bool:
        """Whether the labels meet every requirement.

        Labels that are only CIDRs are matched only by selectors with a ``cidr:`` requirement: a requirement
        like NotIn would match them by accident.
        """
        for requirement in self.requirements:
            if not requirement.matches(labels):
                return False
        return not labels.has_only_cidr_labels or self.has_source(CIDR)

    def has_key(self, key: str, *sources: str) -> bool:
        """Whether a requirement, with any operator, names the key from one of the sources."""
        return any(one.key == key and one.source in sources for one in self.requirements)

    def has_key_prefix(self, prefix: str) -> bool:
        """Whether a requirement names a Kubernetes label with this prefix of the key."""
        return any(one.key.startswith(prefix) and one.source in (ANY, "k8s") for one in self.requirements)

    def has_source(self, source: str) -> bool:
        """Whether a requirement names a label of the source."""
        return any(one.source == source for one in self.requirements)

    def index_keys(self) -> Sequence[IndexKey]:
        """Return index keys of which every selected identity has at least one; empty if there are none.

        CIDR requirements match by containment, so ``("cidr", None)`` stands for any CIDR label.
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
        equal = {one.text_key: one.values[0] for one in self.requirements if one.is_label}
        other = [
            {"key": one.text_key, "operator": one.operator}
            | ({"values": list(one.values)} if one.values else {})
            for one in self.requirements
            if not one.is_label
        ]
        if equal:
            shown["matchLabels"] = equal
        if other:
            shown["matchExpressions"] = other
        return shown

    def as_object(self) -> object:
        """Return a LabelSelector with the source before each key, or ``*`` for the wildcard."""
        return self._object or "*"


PeerSelector = Selector | FQDNSelector

ALL = Selector()
"""Selects every identity, including identities without labels."""

NONE = Selector.reserved("none")
"""Selects no identity: none has this label."""


# Selectors as text, as in Cilium's API and ``cilium-dbg policy selectors``.
#
# Source: k8s.io/apimachinery, LabelSelector.String(), with ``SOURCE.KEY`` as keys; Cilium 1.17,
#         FQDNSelector.String().


def selector_text(selector: PeerSelector) -> str:
    """Format a selector like Go's ``LabelSelector.String()`` or Cilium's ``FQDNSelector.String()``."""
    if isinstance(selector, FQDNSelector):
        return f"MatchName: {selector.match_name}, MatchPattern: {selector.match_pattern}"
    equal = [one for one in selector.requirements if one.is_label]
    other = [one for one in selector.requirements if not one.is_label]
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
