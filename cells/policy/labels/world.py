"""The labels of what lies outside the cluster: prefixes that rules name, addresses that DNS answered."""

from __future__ import annotations

from collections.abc import Iterable

from cells.cluster.identity import CIDR, Label
from cells.policy.labels.cidr import Prefix, cidr_label, contains, world_label
from cells.policy.labels.fqdn import FQDNSelector
from cells.policy.labels.label import FQDN, LabelSet


def prefix_labels(prefix: Prefix, *, dual_stack: bool) -> LabelSet:
    """The labels of a prefix's identity; those of a whole family are the world's alone."""
    labels = [Label("reserved", world_label(prefix, dual_stack=dual_stack))]
    if prefix.prefixlen:
        labels.append(Label(CIDR, cidr_label(prefix)))
    return LabelSet(labels)


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
