"""Which names an endpoint may ask a server for.

Needs:  RulePolicy.   Gives: NameRules, NameFilter, name_matches().
Source: Cilium 1.17, DNS rules of policies by port and peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from cells.policy.compute import DirectionPolicy, SelectorPolicy
from cells.policy.control.computer import RulePolicy
from cells.policy.labels import ALL, canonical_name, dns_pattern


class NameFilter(msgspec.Struct, frozen=True):
    """Names that may be asked for; ``patterns`` as in policies."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        """Whether a name in canonical form is among them."""
        return name in self.names or any(name_matches(one, name) for one in self.patterns)


EVERYTHING: Final = NameFilter(patterns=("*",))


class NameRules:
    """The filters that the rules in force make, remembered until an endpoint's rules change."""

    def __init__(self, policy: RulePolicy) -> None:
        self._policy = policy
        self._known: dict[int, tuple[DirectionPolicy, dict[tuple[int, int, int], NameFilter]]] = {}

    def changed(self, endpoint_id: int) -> bool:
        """Whether the endpoint's rules are known, and others than those of the last filter."""
        known, now = self._known.get(endpoint_id), self._policy.computed.direction(endpoint_id, "egress")
        return now is not None and (known is None or known[0] is not now)

    def of(self, endpoint_id: int, identity: int, protocol: int, port: int) -> NameFilter | None:
        """What the endpoint may ask a server of this identity for; None without a policy of the endpoint."""
        policy = self._policy.computed.direction(endpoint_id, "egress")
        if policy is None:
            return None
        known = self._known.get(endpoint_id)
        if known is None or known[0] is not policy:
            known = self._known[endpoint_id] = policy, {}
        found = known[1].get((identity, protocol, port))
        if found is None:
            found = self._filter(policy, identity, protocol, port)
            known[1][identity, protocol, port] = found
        return found

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is no more."""
        self._known.pop(endpoint_id, None)

    def _filter(self, policy: DirectionPolicy, identity: int, protocol: int, port: int) -> NameFilter:
        if not policy.enforced:
            return EVERYTHING
        selecting = self._policy.selector_cache.selecting(identity)
        said = [
            how
            for filter_ in policy.filters
            if any(
                key.bits and key.protocol == protocol and (key.port ^ port) >> (16 - key.bits) == 0
                for key in policy.port_keys(filter_.port)
            )
            for peer, how in filter_.selectors.items()
            if (peer == ALL or peer in selecting) and not how.deny
        ]
        return _merged(said) if said else NameFilter()


def name_matches(pattern: str, name: str) -> bool:
    """Whether a name in canonical form is meant by a pattern of rules; raises re.error for what is none."""
    return dns_pattern(pattern).fullmatch(name) is not None


def _merged(said: Iterable[SelectorPolicy]) -> NameFilter:
    names: set[str] = set()
    patterns: dict[str, None] = {}
    for how in said:
        if how.rules is None or not how.rules.dns:
            return EVERYTHING
        for rule in how.rules.dns:
            if rule.match_name:
                names.add(canonical_name(rule.match_name))
            if rule.match_pattern:
                patterns[rule.match_pattern] = None
    return NameFilter(frozenset(names), tuple(patterns))
