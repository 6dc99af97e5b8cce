"""Labels of identities and what selects them: label selectors, CIDR containment, DNS names.

Pure values; no cell.
Gives: LabelSet, Requirement, Selector, FQDNSelector, cidr_label, except_prefixes, dns_pattern.
"""

from cells.policy.labels.cidr import (
    Prefix,
    PrefixSet,
    cidr_label,
    cidr_of_label,
    except_prefixes,
    world_label,
)
from cells.policy.labels.fqdn import FQDNSelector, canonical_name, dns_pattern
from cells.policy.labels.label import LabelSet
from cells.policy.labels.selector import ALL, NONE, PeerSelector, Requirement, Selector, SelectorError
from cells.policy.labels.selector_text import selector_text
from cells.policy.labels.world import address_labels, prefix_labels

__all__ = [
    "ALL",
    "NONE",
    "FQDNSelector",
    "LabelSet",
    "PeerSelector",
    "Prefix",
    "PrefixSet",
    "Requirement",
    "Selector",
    "SelectorError",
    "address_labels",
    "canonical_name",
    "cidr_label",
    "cidr_of_label",
    "dns_pattern",
    "except_prefixes",
    "prefix_labels",
    "selector_text",
    "world_label",
]
