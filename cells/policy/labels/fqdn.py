"""Names of ``toFQDNs`` and DNS rules: one form, and patterns as regular expressions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from cells.cluster.identity import Label
from cells.policy.labels.label import FQDN, LabelSet

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
    def is_wildcard(self) -> bool:
        """An FQDN selector never selects everything: only what DNS has answered."""
        return False

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

    def as_object(self) -> object:
        """As it is written in a policy."""
        return {"matchName": self.match_name} if self.match_name else {"matchPattern": self.match_pattern}
