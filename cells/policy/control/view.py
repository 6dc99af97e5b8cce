"""What policies are in force and what follows from them, for those who show it.

For:    the API.   Needs: RulePolicy.   Gives: PolicyView, SelectorUse, PortUse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from cells.cluster.identity import Label, parse
from cells.policy.compute import DirectionPolicy, Filter, Match, SelectorPolicy, lookup
from cells.policy.control.computer import RulePolicy
from cells.policy.labels import PeerSelector, selector_text
from cells.policy.rules import PROTOCOLS, Direction, Source, rule_objects

ANY_SOURCES = frozenset({"any", "unspec"})
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}


class SelectorUse(msgspec.Struct, frozen=True):
    """A selector in use: whom it selects, how many policies of endpoints use it, and a rule that has it."""

    selector: str
    identities: tuple[int, ...]
    users: int
    labels: tuple[Label, ...]


class PortUse(msgspec.Struct, frozen=True):
    """What an endpoint's rules say of one port: by selector, with the labels of the rules that say so."""

    port: int
    port_name: str
    protocol: str
    says: Mapping[str, dict[str, Any] | None]
    """What holds beside being allowed, in Cilium's JSON; None for nothing."""
    origins: Mapping[str, tuple[tuple[str, ...], ...]]


class PolicyView:
    """Reads, never changes; the loop's state of one moment."""

    def __init__(self, policy: RulePolicy) -> None:
        self._policy = policy

    @property
    def revision(self) -> int:
        """Of the rules in force."""
        return self._policy.revision

    def rules(self, labels: Collection[str] = ()) -> list[dict[str, Any]]:
        """The rules in force that have all of these labels, in Cilium's JSON form."""
        wanted = [parse(text) for text in labels]
        repository = self._policy.repository
        found = []
        for source in repository.sources():
            rules = repository.rules_of(source)
            objects = rule_objects(repository.object_of(source), rules)
            found += [
                object_
                for rule, object_ in zip(rules, objects, strict=True)
                if _has(map(parse, rule.labels), wanted)
            ]
        return found

    def labels_of(self, kind: str, namespace: str, name: str) -> list[tuple[str, ...]]:
        """The labels of each rule in force that comes from an object."""
        repository = self._policy.repository
        return [tuple(rule.labels) for rule in repository.rules_of(Source(kind, namespace, name))]

    def selectors(self) -> list[SelectorUse]:
        """The selectors that policies of this node's endpoints use, by their text."""
        cache, policies = self._policy.selector_cache, self._policy.computed
        named: dict[PeerSelector, tuple[str, ...]] = {}
        for filter_ in policies.filters():
            for selector, how in filter_.selectors.items():
                if how.origins:
                    named.setdefault(selector, how.origins[0].labels)
        found = [
            SelectorUse(
                selector=selector_text(selector),
                identities=tuple(sorted(cache.selections(selector))),
                users=cache.users(selector),
                labels=tuple(map(parse, named.get(selector, ()))),
            )
            for selector in cache.selectors
        ]
        return sorted(found, key=lambda one: one.selector)

    def ports(self, endpoint_id: int, direction: Direction) -> list[PortUse]:
        """What the rules say of a direction of an endpoint; nothing where none is enforced."""
        policy = self._policy.computed.direction(endpoint_id, direction)
        if policy is None or not policy.enforced:
            return []
        return [_port_use(filter_) for filter_ in policy.filters]

    def policy(self, endpoint_id: int, direction: Direction) -> DirectionPolicy | None:
        """What holds for a direction of an endpoint; not to be changed. None without a policy."""
        return self._policy.computed.direction(endpoint_id, direction)

    @property
    def unread(self) -> str:
        """Why connections that HTTP rules select are dropped; empty while a proxy reads them."""
        proxy = self._policy.http_proxy
        return "" if proxy.runs else proxy.message

    def knows(self, endpoint_id: int) -> bool:
        """Whether the endpoint has a policy by rules."""
        return self._policy.computed.key(endpoint_id) is not None

    def decide(self, endpoint_id: int, direction: Direction, peer: int, protocol: int, port: int) -> Match:
        """Which entry decides on a packet, and by its origins which rules; for ICMP the port is the type.

        ``drop`` for an endpoint that has no policy yet.
        """
        match = lookup(self._policy.computed.by_identity(endpoint_id, direction), peer, protocol, port)
        return match._replace(verdict="drop") if match.is_read and self.unread else match


def _port_use(filter_: Filter) -> PortUse:
    texts = {selector: selector_text(selector) for selector in filter_.selectors}
    return PortUse(
        port=filter_.port.port,
        port_name=filter_.port.name,
        protocol=_PROTOCOL_NAMES[filter_.port.protocol],
        says={texts[selector]: _above(how) for selector, how in filter_.selectors.items()},
        origins={
            texts[selector]: tuple(sorted({origin.labels for origin in how.origins}))
            for selector, how in filter_.selectors.items()
        },
    )


def _above(how: SelectorPolicy) -> dict[str, Any] | None:
    """What holds for a selector beside being allowed; None for nothing."""
    said: dict[str, Any] = {}
    if how.deny:
        said["IsDeny"] = True
    if how.auth is not None:
        said["auth"] = {"mode": how.auth}
    if how.rules is not None:
        said |= msgspec.to_builtins(how.rules)
    return said or None


def _has(labels: Iterator[Label], wanted: Collection[Label]) -> bool:
    """Whether all are there; a wanted label without source is one of any source."""
    have = list(labels)
    return all(
        any(
            one.key == label.key
            and one.value == label.value
            and (one.source == label.source or one.source in ANY_SOURCES)
            for label in have
        )
        for one in wanted
    )
