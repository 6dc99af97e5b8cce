"""Compare the desired and actual configuration of a gobgpd, and build the messages that change it.

Input:  rows of instances, peers, policies and paths (desired); answers of gobgpd's API (actual).
Output: SpeakerFacts of either, which compare equal; messages for policies, sets, routes and peers.
Why:    gobgpd evaluates policies one by one, so one per service and peer would be too many. Statements with
        the same peers and attributes become one rule with a set of all their prefixes. An added service
        adds a prefix to the set in place, without sending other routes again.
Source: gobgp 3.10, internal/pkg/table/policy.go, pkg/config; RFC 4271, 4760.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Set
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple, Self

import msgspec

from cells.base.addresses import IPAddress, IPNetwork
from cells.bgp import gobgp_messages as api
from cells.bgp.gobgpd import Gobgp
from cells.bgp.speaker_state import (
    AfiSafi,
    AnnouncedPath,
    BGPInstance,
    BGPPeer,
    PolicyDirection,
    PolicyStatement,
    PrefixMatch,
    RoutePolicy,
    without_zone,
)
from cells.hubble.codec import WireMessage, encode

AFI: Final = {"ipv4": 1, "ipv6": 2, "l2vpn": 25, "ls": 16388, "opaque": 16397}
SAFI: Final = {
    "unicast": 1,
    "multicast": 2,
    "mpls_label": 4,
    "encapsulation": 7,
    "vpls": 65,
    "evpn": 70,
    "ls": 71,
    "sr_policy": 73,
    "mup": 85,
    "mpls_vpn": 128,
    "mpls_vpn_multicast": 129,
    "route_target_constraints": 132,
    "flowspec_unicast": 133,
    "flowspec_vpn": 134,
    "key_value": 241,
}
"""SAFI numbers (IANA) by the names of Cilium's resources."""
_AFI_NAMES: Final = {number: name for name, number in AFI.items()}
_SAFI_NAMES: Final = {number: name for name, number in SAFI.items()}

DIRECTIONS: Final = {
    PolicyDirection.IMPORT: api.AssignmentDirection.IMPORT,
    PolicyDirection.EXPORT: api.AssignmentDirection.EXPORT,
}
RULE: Final = "hive-"
"""Prefix of the names of our policies."""


class RuleFacts(msgspec.Struct, frozen=True):
    """A gobgpd policy with one statement: peers and prefixes that it matches, attributes that it adds."""

    neighbors: frozenset[IPAddress] = frozenset()
    """Addresses of peers without zones; empty: all peers."""
    version: int = 0
    """IP version of the prefixes; 0: all routes match."""
    local_routes: bool = False
    communities: frozenset[int] = frozenset()
    large_communities: frozenset[tuple[int, int, int]] = frozenset()
    local_preference: int = 0
    """0: not set."""
    prefixes: frozenset[PrefixMatch] = frozenset()

    @property
    def name(self) -> str:
        """A name by the hash of all fields except the prefixes, which change in place."""
        parts = (
            sorted(map(str, self.neighbors)),
            self.version,
            self.local_routes,
            sorted(self.communities),
            sorted(self.large_communities),
            self.local_preference,
        )
        return RULE + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def is_for(self, peer: IPAddress) -> bool:
        """Return whether the rule matches a peer."""
        return not self.neighbors or without_zone(peer) in self.neighbors

    def covers(self, route: IPNetwork) -> bool:
        """Return whether the rule matches a route."""
        return not self.version or any(route in match for match in self.prefixes)

    def covered(
        self, routes: Set[IPNetwork], matches: Collection[PrefixMatch] | None = None
    ) -> set[IPNetwork]:
        """Return the routes that match the rule's prefixes, or the given ones."""
        if not self.version:
            return set(routes)
        found: set[IPNetwork] = set()
        for match in self.prefixes if matches is None else matches:
            if match.min_length == match.max_length == match.cidr.prefixlen:
                found.update(routes & {match.cidr})
            else:
                found.update(route for route in routes if route in match)
        return found

    def differs(self, other: Self, routes: Set[IPNetwork]) -> set[IPNetwork]:
        """Return the routes that match either this rule or another rule of the same name, but not both."""
        found = self.covered(routes, self.prefixes ^ other.prefixes) if self.version else set()
        return {route for route in found if self.covers(route) != other.covers(route)}


class PeerFacts(msgspec.Struct, frozen=True):
    """The configuration of a peer."""

    asn: int
    password: str
    description: str
    """Name and local address: gobgpd does not show the configured local address of established sessions."""
    local_port: int
    remote_port: int
    multihop_ttl: int
    """0: no multihop, the peer is directly connected."""
    connect_retry: int
    hold_time: int
    keepalive: int
    restart_time: int
    """0: no graceful restart."""
    families: frozenset[tuple[int, int]]
    enabled: bool = True

    @property
    def digest(self) -> str:
        """A hash of all fields."""
        parts = msgspec.structs.replace(self, families=frozenset()), sorted(self.families)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @classmethod
    def of_row(cls, peer: BGPPeer) -> Self:
        """Return the desired configuration."""
        return cls(
            asn=peer.asn,
            password=peer.password.reveal() if peer.password is not None else "",
            description=peer.name if peer.local_address is None else f"{peer.name} from {peer.local_address}",
            local_port=peer.local_port,
            remote_port=peer.remote_port,
            multihop_ttl=peer.multihop_ttl if peer.external and peer.multihop_ttl > 1 else 0,
            connect_retry=peer.timers.connect_retry,
            hold_time=peer.timers.hold,
            keepalive=peer.timers.keepalive,
            restart_time=peer.graceful_restart.restart_time if peer.graceful_restart.enabled else 0,
            families=frozenset(map(family_numbers, peer.families)),
        )

    @classmethod
    def of_listed(cls, peer: api.ApiPeer) -> Self:
        """Return the configuration that gobgpd lists."""
        conf, transport = peer.conf or api.PeerConf(), peer.transport or api.ApiTransport()
        multihop = peer.ebgp_multihop or api.EbgpMultihop()
        timers = (peer.timers or api.Timers()).config or api.TimersConfig()
        restart = peer.graceful_restart or api.GracefulRestart()
        families = [one.config for one in peer.afi_safis if one.config is not None and one.config.enabled]
        return cls(
            asn=conf.peer_asn,
            password=conf.auth_password,
            description=conf.description,
            local_port=transport.local_port,
            remote_port=transport.remote_port,
            multihop_ttl=multihop.multihop_ttl if multihop.enabled else 0,
            connect_retry=timers.connect_retry,
            hold_time=timers.hold_time,
            keepalive=timers.keepalive_interval,
            restart_time=restart.restart_time if restart.enabled else 0,
            families=frozenset((one.family.afi, one.family.safi) for one in families if one.family),
            enabled=not conf.admin_down and (peer.state is None or not peer.state.admin_state),
        )


class SpeakerFacts(msgspec.Struct, frozen=True):
    """The configuration and the routes of a speaker."""

    speaker: tuple[int, str, int] | None
    """ASN, router ID and listening port; None: BGP is not started."""
    rules: Mapping[str, RuleFacts]
    assigned: Mapping[PolicyDirection, frozenset[str]]
    """Names of the rules that are assigned to the global RIB."""
    rejects: frozenset[PolicyDirection]
    """Directions with the default action reject."""
    paths: Mapping[IPNetwork, bool]
    """Routes, and whether they have the attributes that route() sets."""
    peers: Mapping[IPAddress, PeerFacts]
    foreign_policies: frozenset[str] = frozenset()
    """Policies that rule_messages() has not created."""
    foreign_sets: frozenset[tuple[api.DefinedType, str]] = frozenset()
    """Defined sets that rule_messages() has not created."""


_NONE_ASSIGNED: Final = dict.fromkeys(PolicyDirection, frozenset[str]())
NOTHING: Final = SpeakerFacts(None, {}, _NONE_ASSIGNED, frozenset(), {}, {})
"""The facts of a speaker without BGP, or one that does not answer."""


class PolicyRules(NamedTuple):
    """The rules of a RoutePolicy by direction and name."""

    instance: str
    parts: tuple[tuple[PolicyDirection, str, RuleFacts], ...]


def policy_rules(policy: RoutePolicy) -> PolicyRules:
    """Convert a policy to rules."""
    export = policy.direction is PolicyDirection.EXPORT
    rules = [rule for statement in policy.statements for rule in _rules_of(statement)]
    return PolicyRules(
        policy.instance,
        tuple((policy.direction, one.name if export else f"{one.name}-in", one) for one in rules),
    )


def _rules_of(statement: PolicyStatement) -> Iterable[RuleFacts]:
    """Yield a rule per IP version, as a prefix set has prefixes of one version."""
    rule = RuleFacts(
        neighbors=frozenset(statement.neighbors),
        local_routes=statement.local_routes,
        communities=frozenset(statement.communities),
        large_communities=frozenset(statement.large_communities),
        local_preference=statement.local_preference or 0,
    )
    if not statement.prefixes:
        yield rule
    for version in (4, 6):
        if prefixes := frozenset(one for one in statement.prefixes if one.cidr.version == version):
            yield msgspec.structs.replace(rule, version=version, prefixes=prefixes)


def wanted_facts(
    instance: BGPInstance,
    peers: Iterable[BGPPeer],
    policies: Iterable[PolicyRules],
    paths: Iterable[AnnouncedPath],
    only: IPAddress | None = None,
) -> SpeakerFacts:
    """Return the desired facts of an instance; with ``only``, with the policies for this peer."""
    grouped: dict[str, list[RuleFacts]] = {}
    assigned: dict[PolicyDirection, set[str]] = {direction: set() for direction in PolicyDirection}
    for policy in policies:
        for direction, name, rule in policy.parts:
            if only is not None and not rule.is_for(only):
                continue
            grouped.setdefault(name, []).append(rule)
            assigned[direction].add(name)
    rules = {
        name: parts[0]
        if len(parts) == 1
        else msgspec.structs.replace(
            parts[0], prefixes=frozenset[PrefixMatch]().union(*(one.prefixes for one in parts))
        )
        for name, parts in grouped.items()
    }
    return SpeakerFacts(
        speaker=(instance.local_asn, str(instance.router_id), instance.listen_port),
        rules=rules,
        assigned={direction: frozenset(names) for direction, names in assigned.items()},
        rejects=frozenset(PolicyDirection),
        paths=dict.fromkeys((path.prefix for path in paths), True),
        peers={peer.address: PeerFacts.of_row(peer) for peer in peers},
    )


async def listed_facts(gobgp: Gobgp) -> SpeakerFacts:
    """Read the facts of a running speaker. Raises GobgpError."""
    speaker = await gobgp.speaker()
    if speaker is None:
        return NOTHING
    sets = {(kind, one.name): one for kind in api.DefinedType for one in await gobgp.sets(kind)}
    rules: dict[str, RuleFacts] = {}
    foreign_policies, used = set(), set()
    for policy in await gobgp.policies():
        rule = _listed_rule(policy, sets)
        if rule is None:
            foreign_policies.add(policy.name)
            continue
        rules[policy.name] = rule
        used |= {(api.DefinedType(one.defined_type), one.name) for one in _sets_of(policy.name, rule)}
    assigned, rejects = {}, set()
    for direction, number in DIRECTIONS.items():
        found = await gobgp.assignment(number) or api.PolicyAssignment()
        assigned[direction] = frozenset(one.name for one in found.policies)
        if found.default_action == api.RouteAction.REJECT:
            rejects.add(direction)
    paths: dict[IPNetwork, bool] = {}
    for afi in (1, 2):
        for destination in await gobgp.routes(api.TableType.GLOBAL, afi, binary=True):
            for path in destination.paths:
                if path.neighbor_ip in {"", "<nil>"}:
                    prefix = _network(afi, path.nlri_binary)
                    paths[prefix] = list(path.pattrs_binary) == _attributes_on_wire(prefix, path.nlri_binary)
    return SpeakerFacts(
        speaker=(speaker.asn, speaker.router_id, speaker.listen_port),
        rules=rules,
        assigned=assigned,
        rejects=frozenset(rejects),
        paths=paths,
        peers={
            ip_address(one.conf.neighbor_address): PeerFacts.of_listed(one)
            for one in await gobgp.peers()
            if one.conf is not None
        },
        foreign_policies=frozenset(foreign_policies),
        foreign_sets=frozenset(sets.keys() - used),
    )


# Rules.


def rule_messages(name: str, rule: RuleFacts) -> tuple[list[api.DefinedSet], api.ApiPolicy]:
    """Return the defined sets of a rule, and the policy that refers to them."""
    conditions = api.Conditions(route_type=api.RouteType.LOCAL if rule.local_routes else api.RouteType.NONE)
    if rule.version:
        conditions.prefix_set = api.MatchSet(name=f"{name}-prefixes")
    if rule.neighbors:
        conditions.neighbor_set = api.MatchSet(name=f"{name}-neighbors")
    actions = api.Actions(route_action=api.RouteAction.ACCEPT)
    if rule.communities:
        texts = [f"{one >> 16}:{one & 0xFFFF}" for one in sorted(rule.communities)]
        actions.community = api.CommunityAction(communities=texts)
    if rule.large_communities:
        texts = [":".join(map(str, one)) for one in sorted(rule.large_communities)]
        actions.large_community = api.CommunityAction(communities=texts)
    if rule.local_preference:
        actions.local_pref = api.LocalPreference(value=rule.local_preference)
    statement = api.Statement(name=name, conditions=conditions, actions=actions)
    return _sets_of(name, rule), api.ApiPolicy(name=name, statements=[statement])


def prefix_set(name: str, prefixes: Iterable[PrefixMatch]) -> api.DefinedSet:
    """Return the prefix set of a rule, or a part of it."""
    ranges = [
        api.PrefixRange(ip_prefix=str(cidr), mask_length_min=least, mask_length_max=most)
        for cidr, least, most in prefixes
    ]
    return api.DefinedSet(defined_type=api.DefinedType.PREFIX, name=f"{name}-prefixes", prefixes=ranges)


WITHDRAW: Final = "retire"
"""Name of the policy that withdraws routes from some peers."""
MARK: Final = 0xFFFFFFFF
"""Community that marks these routes; it is removed before routes are sent to peers."""


def withdrawal_policy(
    routes: Mapping[IPAddress, Collection[IPNetwork]],
) -> tuple[list[api.DefinedSet], api.ApiPolicy]:
    """Return the policy, and its sets, that withdraws marked routes from some peers.

    gobgpd does not record which routes it has sent. It withdraws a replaced route from a peer if the current
    policies reject the new route and accept the old one. So a route is replaced by one with MARK, which this
    policy rejects for the given peers; for other peers, it removes the community.
    """
    community = f"^{MARK >> 16}:{MARK & 0xFFFF}$"
    sets = [api.DefinedSet(defined_type=api.DefinedType.COMMUNITY, name=WITHDRAW, list=[community])]
    statements = []
    for address, prefixes in routes.items():
        name = f"{WITHDRAW}-{address}"
        for version in (4, 6):
            exact = [
                PrefixMatch(one, one.prefixlen, one.prefixlen) for one in prefixes if one.version == version
            ]
            if not exact:
                continue
            peer = frozenset([without_zone(address)])
            rule = RuleFacts(neighbors=peer, version=version, prefixes=frozenset(exact))
            of_rule, policy = rule_messages(f"{name}-{version}", rule)
            sets += of_rule
            for statement in policy.statements:
                if statement.conditions is not None:
                    statement.conditions.community_set = api.MatchSet(name=WITHDRAW)
                statement.actions = api.Actions(route_action=api.RouteAction.REJECT)
                statements.append(statement)
    remove_mark = api.CommunityAction(type=api.REMOVE, communities=[community])
    statements.append(api.Statement(name=WITHDRAW, actions=api.Actions(community=remove_mark)))
    return sets, api.ApiPolicy(name=WITHDRAW, statements=statements)


def _sets_of(name: str, rule: RuleFacts) -> list[api.DefinedSet]:
    found = [prefix_set(name, rule.prefixes)] if rule.version else []
    if rule.neighbors:
        kind, texts = api.DefinedType.NEIGHBOR, sorted(f"{one}/{one.max_prefixlen}" for one in rule.neighbors)
        found.append(api.DefinedSet(defined_type=kind, name=f"{name}-neighbors", list=texts))
    return found


def _listed_rule(
    policy: api.ApiPolicy, sets: Mapping[tuple[api.DefinedType, str], api.DefinedSet]
) -> RuleFacts | None:
    """Return the rule from which a policy was created; None for a policy of any other form."""
    if len(policy.statements) != 1:
        return None
    conditions = policy.statements[0].conditions or api.Conditions()
    actions = policy.statements[0].actions or api.Actions()
    ranges, neighbors = api.DefinedSet(), api.DefinedSet()
    if conditions.prefix_set is not None:
        ranges = sets.get((api.DefinedType.PREFIX, conditions.prefix_set.name), ranges)
    if conditions.neighbor_set is not None:
        neighbors = sets.get((api.DefinedType.NEIGHBOR, conditions.neighbor_set.name), neighbors)
    try:
        prefixes = frozenset(
            PrefixMatch(ip_network(one.ip_prefix), one.mask_length_min, one.mask_length_max)
            for one in ranges.prefixes
        )
        rule = RuleFacts(
            neighbors=frozenset(ip_address(one.partition("/")[0]) for one in neighbors.list),
            version=next(iter(prefixes)).cidr.version if prefixes else 0,
            local_routes=conditions.route_type == api.RouteType.LOCAL,
            communities=_communities(actions.community),
            large_communities=_large_communities(actions.large_community),
            local_preference=actions.local_pref.value if actions.local_pref is not None else 0,
            prefixes=prefixes,
        )
    except ValueError:
        return None
    if policy.name not in {rule.name, f"{rule.name}-in"} or policy != _as_listed(policy.name, rule):
        return None
    return rule


def _as_listed(name: str, rule: RuleFacts) -> api.ApiPolicy:
    """Return the policy of a rule, with tuples instead of lists, as in decoded messages."""
    policy = rule_messages(name, rule)[1]
    for statement in policy.statements:
        for action in (
            (statement.actions.community, statement.actions.large_community) if statement.actions else ()
        ):
            if action is not None:
                action.communities = tuple(action.communities)
    policy.statements = tuple(policy.statements)
    return policy


def _communities(action: api.CommunityAction | None) -> frozenset[int]:
    """Parse communities. Raises ValueError."""
    found = set()
    for text in action.communities if action is not None else ():
        high, _, low = text.partition(":")
        found.add(int(high) << 16 | int(low))
    return frozenset(found)


def _large_communities(action: api.CommunityAction | None) -> frozenset[tuple[int, int, int]]:
    """Parse large communities. Raises ValueError."""
    found = set()
    for text in action.communities if action is not None else ():
        first, second, third = map(int, text.split(":"))
        found.add((first, second, third))
    return frozenset(found)


# Routes.


def _packed(message: WireMessage) -> api.Packed:
    return api.Packed(type_url=f"type.googleapis.com/{message.protobuf}", value=encode(message))


_IGP: Final = _packed(api.OriginAttribute())
_NEXT_HOP_SELF: Final = _packed(api.NextHopAttribute(next_hop="0.0.0.0"))  # gobgpd sends its own address


def route(prefix: IPNetwork, *, withdrawn: bool = False, marked: bool = False) -> api.ApiPath:
    """Return an announcement or withdrawal; ORIGIN is IGP, next hop the local address of each session."""
    family = api.AddressFamily(afi=1 if prefix.version == 4 else 2, safi=api.UNICAST)
    nlri = _packed(api.AddressPrefix(prefix=str(prefix.network_address), prefix_len=prefix.prefixlen))
    reach = _NEXT_HOP_SELF
    if prefix.version == 6:
        reach = _packed(api.MpReachAttribute(family=family, next_hops=["::"], nlris=[nlri]))
    attributes = (
        [_IGP, reach, _packed(api.CommunitiesAttribute(communities=[MARK]))] if marked else [_IGP, reach]
    )
    return api.ApiPath(nlri=nlri, pattrs=attributes, family=family, is_withdraw=withdrawn)


def _network(afi: int, nlri: bytes) -> IPNetwork:
    """Decode the prefix of an NLRI (RFC 4271, section 4.3)."""
    if afi == 1:
        return IPv4Network((nlri[1:].ljust(4, b"\0"), nlri[0]))
    return IPv6Network((nlri[1:].ljust(16, b"\0"), nlri[0]))


def _attributes_on_wire(prefix: IPNetwork, nlri: bytes) -> list[bytes]:
    """Encode ORIGIN and NEXT_HOP or MP_REACH_NLRI (RFC 4271, section 4.3; RFC 4760, section 3)."""
    if prefix.version == 4:
        return [b"\x40\x01\x01\x00", b"\x40\x03\x04" + bytes(4)]
    reach = b"\x00\x02\x01\x10" + bytes(17) + nlri
    return [b"\x40\x01\x01\x00", b"\x80\x0e" + bytes((len(reach),)) + reach]


# Peers.


def family_numbers(family: AfiSafi) -> tuple[int, int]:
    """Return AFI and SAFI of a family."""
    return AFI[family.afi], SAFI[family.safi]


def family_of(family: api.AddressFamily) -> AfiSafi:
    """Return the family by the names of Cilium's resources; unknown AFIs and SAFIs as decimal text."""
    return AfiSafi(
        _AFI_NAMES.get(family.afi, str(family.afi)), _SAFI_NAMES.get(family.safi, str(family.safi))
    )


def new_peer(peer: BGPPeer) -> api.ApiPeer:
    """Return the message that adds a peer."""
    facts = PeerFacts.of_row(peer)
    graceful = bool(facts.restart_time)
    return api.ApiPeer(
        conf=api.PeerConf(
            neighbor_address=str(peer.address),
            peer_asn=facts.asn,
            auth_password=facts.password,
            description=facts.description,
        ),
        ebgp_multihop=api.EbgpMultihop(enabled=True, multihop_ttl=facts.multihop_ttl)
        if facts.multihop_ttl
        else None,
        timers=api.Timers(
            config=api.TimersConfig(
                connect_retry=facts.connect_retry,
                hold_time=facts.hold_time,
                keepalive_interval=facts.keepalive,
                idle_hold_time_after_reset=IDLE,
            )
        ),
        transport=api.ApiTransport(
            local_address=_local_address(peer), local_port=facts.local_port, remote_port=facts.remote_port
        ),
        graceful_restart=api.GracefulRestart(
            enabled=True,
            restart_time=facts.restart_time,
            deferral_time=DEFERRAL,
            notification_enabled=True,
            local_restarting=True,
        )
        if graceful
        else None,
        afi_safis=[
            api.PeerFamily(
                config=api.FamilyConfig(family=api.AddressFamily(afi=afi, safi=safi), enabled=True),
                mp_graceful_restart=api.FamilyRestart(config=api.Enabled(enabled=graceful)),
            )
            for afi, safi in map(family_numbers, peer.families)
        ],
    )


DEFERRAL: Final = 1
"""Seconds for which routes are deferred until peers have sent End-of-RIB (RFC 4724, section 4.1).

Our routes do not depend on those of peers. gobgpd's default for peers that send no End-of-RIB, or are down,
is 360 s.
"""
IDLE: Final = 5
"""Seconds before a session that was reset is tried again. gobgpd 3.10 ignores it and waits for 30 s."""


def changed_peer(listed: api.ApiPeer, peer: BGPPeer) -> api.ApiPeer:
    """Return a listed peer with another connect-retry time; a change of timers only does not end the session.

    The configured local address is restored, as gobgpd lists the actual one of an established session.
    """
    found = msgspec.structs.replace(listed, state=None)
    timers = (listed.timers or api.Timers()).config or api.TimersConfig()
    timers = msgspec.structs.replace(timers, connect_retry=peer.timers.connect_retry)
    transport = listed.transport or api.ApiTransport()
    found.timers = api.Timers(config=timers)
    found.transport = msgspec.structs.replace(transport, local_address=_local_address(peer))
    return found


def _local_address(peer: BGPPeer) -> str:
    if peer.local_address is not None:
        return str(peer.local_address)
    return str(IPv4Address(0) if peer.address.version == 4 else IPv6Address(0))
