"""A selector as one line, the way Cilium's API and command write it.

Source: k8s.io/apimachinery, LabelSelector.String(), over keys that start with their source; Cilium 1.17,
FQDNSelector.String().
"""

from __future__ import annotations

from cells.policy.labels.fqdn import FQDNSelector
from cells.policy.labels.selector import IN, PeerSelector, Requirement


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
