"""What more policies would have done with recorded flows: the engine of ``hive policy try``.

Rules are computed as those in force are - the same repository, selectors, entries and lookup - for the ends
that flows name. Where a flow does not show what decides (names of an address, requests, ports of a pod that
is deleted), the answer is that it is not known, and why.

Pure values; no cell.
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
from cells.policy.selectors import PeerSelector

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
"""``cut``: allowed by the rules in force, and would not be. ``denied``: these deny it already."""

_WORLD: Final = (WORLD, WORLD_IPV4, WORLD_IPV6)
_KINDS: Final[Mapping[Any, type[Object]]] = {
    "NetworkPolicy": NetworkPolicy,
    "CiliumNetworkPolicy": CiliumNetworkPolicy,
    "CiliumClusterwideNetworkPolicy": CiliumClusterwideNetworkPolicy,
    "CiliumCIDRGroup": CiliumCIDRGroup,
}
_RESERVED: Final = {LabelSet.parse(labels): number for number, labels in RESERVED_IDENTITIES.items()}
_FIRST: Final = 256
"""Of the numbers that ends have here, where they are no reserved ones: not those of the agent."""


class TriedFlow(msgspec.Struct, frozen=True):
    """What a flow shows of a new connection of an endpoint, as the endpoint's node decides on it."""

    node: Annotated[str, msgspec.Meta(min_length=1)]
    """The node's name, with its cluster's before it unless that is ``default``."""
    direction: Direction
    endpoint: int
    """The endpoint's number; another one may have it now."""
    identity: int
    labels: tuple[str, ...]
    peer: int
    """The identity of the other side."""
    peer_labels: tuple[str, ...]
    address: str
    """Of the other side."""
    names: tuple[str, ...]
    """Those that DNS gave the address, as far as the node knew."""
    protocol: int
    port: int
    """Of the destination; of ICMP the type."""

    def __post_init__(self) -> None:
        ip_address(self.address)


class TrialRule(msgspec.Struct, frozen=True):
    """A rule in words, and where it is written: the path in an object."""

    text: str
    source: str
    path: str


class Tried(msgspec.Struct, frozen=True):
    """What would have become of a flow, and by which rules."""

    fate: Fate
    verdict: str = ""
    """``allow``, ``redirect``, ``deny``, or ``drop`` where no rule allows it; empty where it is not known."""
    why: str = ""
    """Why it is not known."""
    rules: tuple[TrialRule, ...] = ()
    """The rules that deny it; where none allows it, those that have the direction denied by default."""
    near: tuple[tuple[TrialRule, str], ...] = ()
    """Rules that almost allow it, and what is missing."""


class TrialRequest(msgspec.Struct, frozen=True):
    """Policies and CIDR groups as manifests, and flows to try them on."""

    objects: list[dict[str, Any]]
    flows: list[TriedFlow]


class TrialOutcome(msgspec.Struct, frozen=True):
    """What would have become of the flows."""

    audited: bool
    """Whether policies of pods drop nothing on the node, and only report it."""
    fates: list[Tried]
    of: list[int]
    """The place of each flow's fate."""


class KnownEnds(msgspec.Struct, frozen=True):
    """What a node knows of the ends of flows now."""

    node: str
    identities: Mapping[int, LabelSet]
    named_ports: Callable[[int, int], frozenset[NamedPodPort] | None]
    """The ports that an endpoint, by its number and identity, has names for; None when it is deleted."""
    cluster_ports: frozenset[NamedPodPort]
    names: Callable[[IPAddress], Iterable[str]]
    """The names, in canonical form, that DNS has given to an address."""
    proxies: Proxies
    unread: str
    """Why HTTP rules drop what they select; empty while a proxy reads that."""

    def labels(self, number: int, shown: Iterable[str]) -> LabelSet:
        """Those of an identity: its number may stand for others than when a flow was seen."""
        if scope_of(number) is not Scope.RESERVED and (seen := tuple(shown)):
            return LabelSet.of(seen)
        known = self.identities.get(number)
        return known if known is not None else LabelSet.of(RESERVED_IDENTITIES.get(number, ()))


def with_objects(in_force: Repository, objects: Iterable[Mapping[str, Any]]) -> Repository:
    """The rules in force and these policies and CIDR groups, each in place of the one of its name.

    Raises UnanswerableError for one that would be refused.
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
        _, failed = found.follow(replace(found.world, groups={**found.world.groups, **groups}))
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
        raise UnanswerableError(f"{given.get('kind')} is not tried: expected {', '.join(_KINDS)}")
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
    """Raised for what a flow does not show: one line."""


class Trial:
    """Compares what rules in force and rules that are tried say of flows."""

    def __init__(self, in_force: Repository, tried: Repository, known: KnownEnds) -> None:
        self._known = known
        self._before = _Rules(in_force, known)
        self._after = _Rules(tried, known)

    def of(self, flow: TriedFlow) -> Tried:
        """What would have become of a flow that has passed."""
        if flow.node != self._known.node:
            return Tried("unknown", why=f"seen on node {flow.node}, which decides about it: try it there")
        try:
            reason, read = self._after.reason(flow)
        except UnknownFateError as unknown:
            return Tried("unknown", why=str(unknown))
        try:
            before, read_before = self._before.reason(flow)
        except UnknownFateError:
            before, read_before = None, None
        verdict = reason.match.verdict
        if not reason.allowed:
            fate: Fate = "denied" if before is not None and not before.allowed else "cut"
            near = tuple((_rule(one.origin), one.missing) for one in reason.near)
            return Tried(fate, verdict, rules=self._after.denying(flow, reason), near=near)
        if verdict == "auth-required" and (before is None or before.match.verdict != verdict):
            return Tried("unknown", verdict, "allowed once both sides have authenticated")
        if verdict == "redirect" and read != read_before:
            some = "; ".join(reason.requests[:3])
            more = " and more" if len(reason.requests) > 3 else ""
            what = f"only these requests: {some}{more}" if some else "what the proxy lets through of it"
            return Tried("unknown", verdict, f"the connection is allowed, and {what}")
        return Tried("passes", verdict)


class _Rules:
    """Policies by the rules of one repository, computed for the ends of flows."""

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
        """Why a flow fares as it does, and what proxies would ask of it. Raises UnknownFateError."""
        address = ip_address(flow.address)
        names = {canonical_name(name) for name in flow.names} | set(self._known.names(address))
        policy = self._policy(flow)
        peer = self._peer(flow, address, names)
        found = decide(policy, peer, flow.protocol, flow.port, self._known.unread)
        there = _there(policy, PortKey(flow.protocol, flow.port, FULL_PORT))
        if found.match.entry is None and not names and any(map(_is_by_name, there)):
            raise UnknownFateError(
                f"toFQDNs rules allow names there, and which names {address} has is not known"
            )
        if found.allowed and names and not any(one.parser == "dns" for one in policy.filters):
            unnamed = decide(policy, self._peer(flow, address, ()), flow.protocol, flow.port)
            if not unnamed.allowed:
                raise UnknownFateError(
                    "allowed by a name, but no rule lets the DNS proxy see the pod's lookups"
                )
        asked = {
            repr(how.rules)
            for filter_ in there
            for selector, how in filter_.selectors.items()
            if not how.deny and peer.is_selected(selector)
        }
        return found, frozenset(asked)

    def denying(self, flow: TriedFlow, reason: Reason) -> tuple[TrialRule, ...]:
        """The rules that deny a flow, or those that have its direction denied where none allows it."""
        if reason.origins:
            return tuple(map(_rule, reason.origins))
        labels = self._known.labels(flow.identity, flow.labels)
        speaking = self._repository.speaking(labels, flow.direction, self._repository.selecting(labels))
        return tuple(
            _rule(RuleOrigin(rule.labels, str(rule.source), rule.path))
            for rule in speaking.rules
            if rule.default_deny(flow.direction)
        )

    def _policy(self, flow: TriedFlow) -> DirectionPolicy:
        labels = self._known.labels(flow.identity, flow.labels)
        if not labels:
            raise UnknownFateError(f"the labels of identity {flow.identity} are not known any more")
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
            raise UnknownFateError(f"these rules cannot all hold: {found}")
        named = [one.port.name for one in found.filters if one.port.name]
        if ports is None and flow.direction == "ingress" and named:
            raise UnknownFateError(
                f"the pod is deleted, and rules name its ports ({', '.join(sorted(set(named)))})"
            )
        return found

    def _computed(
        self, direction: Direction, labels: LabelSet, ports: frozenset[NamedPodPort]
    ) -> DirectionPolicy:
        """Raises PolicyConflictError."""
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
        """The other side, by the identity that its address would have by these rules."""
        scope = scope_of(flow.peer)
        labels = self._known.labels(flow.peer, flow.peer_labels)
        if not labels:
            raise UnknownFateError(f"the identity of {address} ({flow.peer}) is not known")
        if flow.peer in _WORLD or scope is Scope.LOCAL:
            labels = self._outside(labels, address, names)
            return OtherSide(self._number(labels, _RESERVED.get(labels, 0)), labels)
        number = self._number(labels, flow.peer if scope is Scope.RESERVED else 0)
        near = None
        if is_endpoint(flow.peer) and self._repository.options.cidr_matches_pods:
            near = self._prefixes.nearest(address) or self._families.get(address.version)
        if near is None:
            return OtherSide(number, labels)
        network = network_labels(near)
        return OtherSide(number, labels, self._number(network, 0), network)

    def _outside(self, labels: LabelSet, address: IPAddress, names: Iterable[str]) -> LabelSet:
        """The labels that an address outside would have: of the nearest network, and of selected names."""
        found = [label for label in labels if label.source not in (CIDR, FQDN)]
        selecting = (
            one for one in self._repository.name_selectors if any(one.matches_name(name) for name in names)
        )
        found += [Label(FQDN, one.text) for one in selecting]
        nearest = self._prefixes.nearest(address)
        if nearest is not None:
            found.append(Label(CIDR, cidr_label(nearest)))
        return LabelSet(found)

    def _number(self, labels: LabelSet, reserved: int) -> int:
        """What entries of policies know these labels by."""
        number = reserved or self._numbers.setdefault(labels, _FIRST + len(self._numbers))
        if number not in self._cache.identities:
            self._cache.add_identity(number, labels)
        return number


def _there(policy: DirectionPolicy, packet: PortKey) -> list[Filter]:
    """What rules say of a packet's port."""
    return [one for one in policy.filters if any(key.covers(packet) for key in policy.port_keys(one.port))]


def _is_by_name(filter_: Filter) -> bool:
    return any(_is_name(peer) for peer in filter_.selectors)


def _is_name(peer: PeerSelector) -> bool:
    return isinstance(peer, FQDNSelector)


def _numbers(ports: frozenset[NamedPodPort], name: str, protocol: int) -> set[int]:
    return {one.port for one in ports if one.name == name and one.protocol == protocol}


def _rule(origin: RuleOrigin) -> TrialRule:
    return TrialRule(origin.text, origin.source, origin.path)
