"""Evaluate recorded flows against additional policies: the engine of ``hive policy try``.

Policies are computed as those in force are (same repository, selectors, entries and lookup), for the
identities in flows. If a flow lacks the deciding data (DNS names of an address, requests, named ports of a
deleted pod), the outcome is ``unknown``, with the reason. Pure values; no cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from cells.base.addresses import IPAddress
from cells.base.labels import CIDR, Label, cidr_label
from cells.cluster.identity.numbers import (
    RESERVED_IDENTITIES,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
    Scope,
    is_endpoint,
    scope_of,
)
from cells.kubernetes.objects.cilium_policy import (
    CiliumCIDRGroup,
    CiliumClusterwideNetworkPolicy,
    CiliumNetworkPolicy,
)
from cells.kubernetes.objects.core import NetworkPolicy
from cells.kubernetes.objects.kind import Object
from cells.policy.compute import FULL_PORT, PolicyConflictError, PortKey, RuleOrigin
from cells.policy.compute.endpoint_policy import DirectionPolicy, Filter, Proxies
from cells.policy.compute.policies import NamedPodPort
from cells.policy.compute.repository import Repository
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.explain import UnanswerableError
from cells.policy.explain.reasons import OtherSide, Reason, decide
from cells.policy.labels import (
    FQDN,
    FQDNSelector,
    LabelSet,
    Prefix,
    PrefixSet,
    canonical_name,
    network_labels,
    parse_prefix,
)
from cells.policy.rules import Direction, PolicyError

__all__ = [
    "Fate",
    "KnownEnds",
    "Trial",
    "TrialOutcome",
    "TrialRequest",
    "TrialRule",
    "Tried",
    "TriedFlow",
    "with_objects",
]

Fate = Literal["passes", "cut", "denied", "unknown"]
"""``cut``: allowed by the rules in force, but denied by the tried ones. ``denied``: denied by both."""

_WORLD: Final = (WORLD, WORLD_IPV4, WORLD_IPV6)
_KINDS: Final[Mapping[Any, type[Object]]] = {
    "NetworkPolicy": NetworkPolicy,
    "CiliumNetworkPolicy": CiliumNetworkPolicy,
    "CiliumClusterwideNetworkPolicy": CiliumClusterwideNetworkPolicy,
    "CiliumCIDRGroup": CiliumCIDRGroup,
}
_RESERVED: Final = {LabelSet.parse(labels): number for number, labels in RESERVED_IDENTITIES.items()}
_FIRST_IDENTITY: Final = 256
"""The first number of identities without a reserved number; numbers are local to the trial."""


class TriedFlow(msgspec.Struct, frozen=True):
    """A new connection from a flow, as seen by the node that enforces the endpoint's policy."""

    node: Annotated[str, msgspec.Meta(min_length=1)]
    """The node's name, after ``CLUSTER/`` unless the cluster is ``default``."""
    direction: Direction
    endpoint: int
    """The endpoint id; it may have been reused since."""
    identity: int
    labels: tuple[str, ...]
    peer: int
    """The identity of the peer."""
    peer_labels: tuple[str, ...]
    address: str
    """The address of the peer."""
    names: tuple[str, ...]
    """DNS names of the address, if the node has observed them."""
    protocol: int
    port: int
    """The destination port; for ICMP, the type."""

    def __post_init__(self) -> None:
        ip_address(self.address)


class TrialRule(msgspec.Struct, frozen=True):
    """A rule as text, and its object and path."""

    text: str
    source: str
    path: str


class Tried(msgspec.Struct, frozen=True):
    """The outcome of a flow, and the deciding rules."""

    fate: Fate
    verdict: str = ""
    """``allow``, ``redirect``, ``deny``, or ``drop`` if no rule allows it; empty if unknown."""
    why: str = ""
    """Why the outcome is unknown."""
    rules: tuple[TrialRule, ...] = ()
    """The rules that deny the flow; if none allows it, the rules with default deny."""
    near: tuple[tuple[TrialRule, str], ...] = ()
    """Rules that almost allow the flow, and what they lack."""


class TrialRequest(msgspec.Struct, frozen=True):
    """Policies and CIDR groups as manifests, and the flows to evaluate."""

    objects: list[dict[str, Any]]
    flows: list[TriedFlow]


class TrialOutcome(msgspec.Struct, frozen=True):
    """The outcomes of the flows."""

    audited: bool
    """Whether the node only reports traffic that policies deny."""
    fates: list[Tried]
    of: list[int]
    """The index of each flow's outcome in ``fates``."""


class KnownEnds(msgspec.Struct, frozen=True):
    """The node's current data about the ends of flows."""

    node: str
    identities: Mapping[int, LabelSet]
    named_ports: Callable[[int, int], frozenset[NamedPodPort] | None]
    """Returns the named ports of an endpoint, by its id and identity; None if it is deleted."""
    cluster_ports: frozenset[NamedPodPort]
    names: Callable[[IPAddress], Iterable[str]]
    """Returns the DNS names, in canonical form, of an address."""
    proxies: Proxies
    no_http_proxy: str
    """Why traffic with HTTP rules is dropped; empty if the HTTP proxy runs."""

    def labels(self, number: int, shown: Iterable[str]) -> LabelSet:
        """Return the labels of an identity; those in the flow take precedence, as numbers are reused."""
        if scope_of(number) is not Scope.RESERVED and (seen := tuple(shown)):
            return LabelSet.of(seen)
        known = self.identities.get(number)
        return known if known is not None else LabelSet.of(RESERVED_IDENTITIES.get(number, ()))


def with_objects(in_force: Repository, objects: Iterable[Mapping[str, Any]]) -> Repository:
    """Return a copy of the rules in force with policies and CIDR groups added or replaced.

    Raises UnanswerableError for an object that would be rejected.
    """
    found, policies = in_force.copy(), []
    groups: dict[str, tuple[Prefix, ...]] = {}
    for one in objects:
        read = _read(one)
        if isinstance(read, CiliumCIDRGroup):
            groups[read.name] = _networks(read)
        else:
            policies.append((read.name, one))
    refused: dict[str, PolicyError] = {}
    if groups:
        _, failed = found.follow(replace(found.context, groups={**found.context.groups, **groups}))
        refused = {str(source): error for source, error in failed.items()}
    for name, one in policies:
        try:
            found.apply(one)
        except PolicyError as error:
            refused[f"{one['kind']} {name}"] = error
    for name, reason in refused.items():
        path = f"{reason.path}: " if reason.path else ""
        raise UnanswerableError(f"{name} is refused: {path}{reason}")
    return found


def _read(given: Mapping[str, Any]) -> Object:
    kind = _KINDS.get(given.get("kind"))
    if kind is None:
        raise UnanswerableError(f"{given.get('kind')} is not supported: expected {', '.join(_KINDS)}")
    try:
        read = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise UnanswerableError(f"a {given['kind']} is refused: {error}") from None
    if not read.name:
        raise UnanswerableError(f"a {given['kind']} is refused: it has no name")
    return read


def _networks(group: CiliumCIDRGroup) -> tuple[Prefix, ...]:
    try:
        return tuple(map(parse_prefix, group.spec.external_cidrs or ()))
    except ValueError as error:
        raise UnanswerableError(f"CiliumCIDRGroup {group.name} is refused: {error}") from None


class UnknownFateError(Exception):
    """A flow lacks data that the outcome depends on; the message is one line."""


class Trial:
    """Compares the decisions of the rules in force and of the tried rules on flows."""

    def __init__(self, in_force: Repository, tried: Repository, known: KnownEnds) -> None:
        self._known = known
        self._before = _Rules(in_force, known)
        self._after = _Rules(tried, known)

    def of(self, flow: TriedFlow) -> Tried:
        """Return the outcome of a flow that has passed."""
        if flow.node != self._known.node:
            return Tried("unknown", why=f"seen on node {flow.node}, which enforces its policy: try it there")
        try:
            reason, l7_rules = self._after.reason(flow)
        except UnknownFateError as unknown:
            return Tried("unknown", why=str(unknown))
        try:
            before, l7_rules_before = self._before.reason(flow)
        except UnknownFateError:
            before, l7_rules_before = None, None
        verdict = reason.match.verdict
        if not reason.allowed:
            fate: Fate = "denied" if before is not None and not before.allowed else "cut"
            near = tuple((_rule(one.origin), one.missing) for one in reason.near)
            return Tried(fate, verdict, rules=self._after.denying(flow, reason), near=near)
        if verdict == "auth-required" and (before is None or before.match.verdict != verdict):
            return Tried("unknown", verdict, "allowed once both sides have authenticated")
        if verdict == "redirect" and l7_rules != l7_rules_before:
            some = "; ".join(reason.requests[:3])
            more = " and more" if len(reason.requests) > 3 else ""
            what = f"only these requests: {some}{more}" if some else "its requests are decided by the proxy"
            return Tried("unknown", verdict, f"the connection is allowed, and {what}")
        return Tried("passes", verdict)


class _Rules:
    """Policies of one repository's rules, computed for the identities in flows."""

    def __init__(self, repository: Repository, known: KnownEnds) -> None:
        self._repository = repository
        self._known = known
        self._cache = SelectorCache()
        self._numbers: dict[LabelSet, int] = {}
        self._policies: dict[tuple[object, ...], DirectionPolicy | PolicyConflictError] = {}
        prefixes = repository.prefixes()
        self._prefixes = PrefixSet(prefixes)
        self._families: dict[int, Prefix] = {one.version: one for one in prefixes if not one.prefixlen}

    def reason(self, flow: TriedFlow) -> tuple[Reason, frozenset[str]]:
        """Return the decision on a flow, and the L7 rules that apply to it. Raises UnknownFateError."""
        address = ip_address(flow.address)
        names = {canonical_name(name) for name in flow.names} | set(self._known.names(address))
        policy = self._policy(flow)
        peer = self._peer(flow, address, names)
        found = decide(policy, peer, flow.protocol, flow.port, self._known.no_http_proxy)
        filters = _filters_of_port(policy, PortKey(flow.protocol, flow.port, FULL_PORT))
        if found.match.entry is None and not names and any(map(_has_fqdn_selector, filters)):
            raise UnknownFateError(
                f"toFQDNs rules allow names on this port, but the names of {address} are unknown"
            )
        if found.allowed and names and not any(one.parser == "dns" for one in policy.filters):
            unnamed = decide(policy, self._peer(flow, address, ()), flow.protocol, flow.port)
            if not unnamed.allowed:
                raise UnknownFateError(
                    "allowed by a name, but no rule lets the DNS proxy see the pod's lookups"
                )
        rules = {
            repr(selector_policy.rules)
            for filter_ in filters
            for selector, selector_policy in filter_.selectors.items()
            if not selector_policy.deny and peer.is_selected(selector)
        }
        return found, frozenset(rules)

    def denying(self, flow: TriedFlow, reason: Reason) -> tuple[TrialRule, ...]:
        """Return the rules that deny a flow; if none allows it, the rules with default deny."""
        if reason.origins:
            return tuple(map(_rule, reason.origins))
        labels = self._known.labels(flow.identity, flow.labels)
        applied = self._repository.direction_rules(labels, flow.direction, self._repository.selecting(labels))
        return tuple(
            _rule(RuleOrigin(rule.labels, str(rule.source), rule.path))
            for rule in applied.rules
            if rule.default_deny(flow.direction)
        )

    def _policy(self, flow: TriedFlow) -> DirectionPolicy:
        labels = self._known.labels(flow.identity, flow.labels)
        if not labels:
            raise UnknownFateError(f"the labels of identity {flow.identity} are unknown")
        ports = self._known.named_ports(flow.endpoint, flow.identity)
        key = flow.direction, labels, ports
        found = self._policies.get(key)
        if found is None:
            try:
                found = self._computed(flow.direction, labels, ports or frozenset())
            except PolicyConflictError as conflict:
                found = conflict
            self._policies[key] = found
        if isinstance(found, PolicyConflictError):
            raise UnknownFateError(f"these rules contradict each other: {found}")
        named = [one.port.name for one in found.filters if one.port.name]
        if ports is None and flow.direction == "ingress" and named:
            raise UnknownFateError(
                f"the pod is deleted, and rules name its ports ({', '.join(sorted(set(named)))})"
            )
        return found

    def _computed(
        self, direction: Direction, labels: LabelSet, ports: frozenset[NamedPodPort]
    ) -> DirectionPolicy:
        """Compute a policy. Raises PolicyConflictError."""
        options = self._repository.options
        resolved = self._repository.resolve(labels, direction)
        named = ports | self._known.cluster_ports if direction == "egress" else ports
        policy = DirectionPolicy(
            direction,
            resolved.filters,
            self._cache,
            enforced=resolved.enforced,
            named_ports=partial(_numbers, named),
            proxies=self._known.proxies,
            dual_stack=options.dual_stack,
            localhost=direction == "ingress" and options.always_allows_localhost,
        )
        for peer in policy.peers:
            self._cache.add_selector(peer)
        return policy

    def _peer(self, flow: TriedFlow, address: IPAddress, names: Iterable[str]) -> OtherSide:
        """Return the peer with the identity that its address would have by these rules."""
        scope = scope_of(flow.peer)
        labels = self._known.labels(flow.peer, flow.peer_labels)
        if not labels:
            raise UnknownFateError(f"the labels of {address} (identity {flow.peer}) are unknown")
        if flow.peer in _WORLD or scope is Scope.LOCAL:
            labels = self._outside(labels, address, names)
            return OtherSide(self._identity_number(labels, _RESERVED.get(labels, 0)), labels)
        number = self._identity_number(labels, flow.peer if scope is Scope.RESERVED else 0)
        near = None
        if is_endpoint(flow.peer) and self._repository.options.cidr_matches_pods:
            near = self._prefixes.nearest(address) or self._families.get(address.version)
        if near is None:
            return OtherSide(number, labels)
        network = network_labels(near)
        return OtherSide(number, labels, self._identity_number(network, 0), network)

    def _outside(self, labels: LabelSet, address: IPAddress, names: Iterable[str]) -> LabelSet:
        """Return the labels of an address outside: the longest prefix's CIDR, and selected DNS names."""
        found = [label for label in labels if label.source not in (CIDR, FQDN)]
        selecting = (
            one for one in self._repository.name_selectors if any(one.matches_name(name) for name in names)
        )
        found += [Label(FQDN, one.text) for one in selecting]
        nearest = self._prefixes.nearest(address)
        if nearest is not None:
            found.append(Label(CIDR, cidr_label(nearest)))
        return LabelSet(found)

    def _identity_number(self, labels: LabelSet, reserved: int) -> int:
        """Return the identity of labels; add it to the selector cache if it is new."""
        number = reserved or self._numbers.setdefault(labels, _FIRST_IDENTITY + len(self._numbers))
        if number not in self._cache.identities:
            self._cache.add_identity(number, labels)
        return number


def _filters_of_port(policy: DirectionPolicy, packet: PortKey) -> list[Filter]:
    """Return the filters that match a packet's port."""
    return [one for one in policy.filters if any(key.covers(packet) for key in policy.port_keys(one.port))]


def _has_fqdn_selector(filter_: Filter) -> bool:
    return any(isinstance(peer, FQDNSelector) for peer in filter_.selectors)


def _numbers(ports: frozenset[NamedPodPort], name: str, protocol: int) -> set[int]:
    return {one.port for one in ports if one.name == name and one.protocol == protocol}


def _rule(origin: RuleOrigin) -> TrialRule:
    return TrialRule(origin.text, origin.source, origin.path)
