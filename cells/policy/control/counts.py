"""Policy objects, rules and selectors as Cilium's metrics.

For:    Metrics. Needs: RulePolicy. Gives: PolicyCounts, families().
Source: Cilium 1.17, cilium_policy, cilium_policy_change_total, cilium_policy_implementation_delay,
        cilium_policy_selector_match_count_max.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from cells.observe.metrics import Family, Histogram, counter, gauge, histogram
from cells.policy.control.computer import RulePolicy
from cells.policy.labels import FQDNSelector, PeerSelector
from cells.policy.rules import CLUSTER

SOURCES: Final = {"NetworkPolicy": "k8s"}
"""By kind, where a change comes from in Cilium's words; other kinds are custom resources."""
CLASSES: Final = ("fqdn", "cluster", "world", "other")


class PolicyCounts:
    """What is counted of changes of policy objects."""

    def __init__(self) -> None:
        self.outcomes = Counter({"success": 0, "fail": 0, "failure": 0})
        """Cilium declares ``failure`` and counts under ``fail``: both are there."""
        self.delays = {source: Histogram() for source in ("k8s", "custom-resource", "api")}

    def changed(self, *, valid: bool) -> None:
        """An object came or went (valid), or was refused."""
        self.outcomes["success" if valid else "fail"] += 1

    def realized(self, kind: str, seconds: float) -> None:
        """A change of an object of this kind took so long until the maps had it."""
        self.delays[SOURCES.get(kind, "custom-resource")].observe(seconds)


def families(policy: RulePolicy, counts: PolicyCounts) -> Iterator[Family]:
    """How many rules there are, what became of changes, and the largest selectors."""
    yield gauge(
        "cilium_policy", "Number of policies currently loaded", sum(1 for _ in policy.repository.rules)
    )
    yield counter(
        "cilium_policy_change_total", "Number of policy changes by outcome", counts.outcomes, "outcome"
    )
    yield histogram(
        "cilium_policy_implementation_delay",
        "Time between a policy change and it being fully deployed into the datapath",
        counts.delays,
        "source",
    )
    rules, known = policy.repository.rules, policy.repository.world.groups.keys()
    yield gauge(
        "cilium_cidrgroups_referenced",
        "Number of CNPs and CCNPs referencing at least one CiliumCIDRGroup. CNPs with empty or non-existing"
        " CIDRGroupRefs are not considered",
        len({rule.source for rule in rules if rule.groups & known}),
    )
    cache = policy.selector_cache
    most = dict.fromkeys(CLASSES, 0)
    for selector in cache.selectors:
        kind = _class(selector)
        most[kind] = max(most[kind], len(cache.selections(selector)))
    yield gauge(
        "cilium_policy_selector_match_count_max",
        "The maximum number of identities selected by a network policy peer selector",
        most,
        "class",
        fixed=True,
    )


def _class(selector: PeerSelector) -> str:
    if isinstance(selector, FQDNSelector):
        return "fqdn"
    if selector.has_key(CLUSTER, "k8s"):
        return "cluster"
    worlds = {"world", "world-ipv4", "world-ipv6"}
    reserved = any(one.source == "reserved" and one.key in worlds for one in selector.requirements)
    return "world" if reserved else "other"
