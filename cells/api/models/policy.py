"""The wire types of policies.

Needs: Model.   Gives: Policy, SelectorIdentityMapping, SelectorLabel, DNSLookup, NameManager.
"""

from __future__ import annotations

from msgspec import field

from cells.api.models.v1 import Model


class Policy(Model, frozen=True, omit_defaults=False):
    """The policies in force, as JSON in a text."""

    policy: str = "[]"
    revision: int = 1


class SelectorLabel(Model, frozen=True, omit_defaults=False):
    """One label of a rule."""

    key: str
    value: str
    source: str


class SelectorIdentityMapping(Model, frozen=True, omit_defaults=False):
    """A selector in use, whom it selects, how many use it, and the labels of a rule that has it."""

    selector: str
    identities: list[int]
    users: int
    labels: list[SelectorLabel]


class DNSLookup(Model, frozen=True, omit_defaults=False):
    """An answer of DNS to an endpoint, or an address it is connected to after that has ended."""

    fqdn: str
    ips: list[str]
    ttl: int
    """Seconds."""
    lookup_time: str
    expiration_time: str
    endpoint_id: int
    source: str
    """``lookup`` or ``connection``."""


class FQDNSelectorEntry(Model, frozen=True, omit_defaults=False, rename=None):
    """A selector of names, and the expression that names must match."""

    selector_string: str = field(name="selectorString")
    regex_string: str = field(name="regexString")


class NameManager(Model, frozen=True, omit_defaults=False, rename=None):
    """The names that policies speak of."""

    poll_names: list[str] = field(default_factory=list, name="DNSPollNames")
    selectors: list[FQDNSelectorEntry] = field(default_factory=list, name="FQDNPolicySelectors")
