"""From resources and facts of this node to what its BGP speakers are to do: a function, and nothing else.

Source: CiliumBGPNodeConfig (made by the operator), CiliumBGPPeerConfig, CiliumBGPAdvertisement; this node,
        its pod ranges and pools; services; passwords.
Why:    one function of all facts gives the same whatever came first. Names of policies, and what announces
        what, are those of Cilium 1.17; where 1.17 depends on the order of events or lets one mistake stop
        everything, later versions' way is taken: overlapping advertisements are united, and a peer or an
        advertisement that cannot be followed is a fault of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import AddressValueError, IPv4Address, ip_address
from typing import Final, NamedTuple

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.bgp.facts import (
    CLUSTER_IP,
    EXTERNAL_IP,
    LOAD_BALANCER_IP,
    AnnouncedPool,
    AnnouncedService,
    BGPPassword,
)
from cells.bgp.speaker_state import (
    ALLOW_LOCAL,
    IPV4_UNICAST,
    IPV6_UNICAST,
    NOT_LISTENING,
    AfiSafi,
    AnnouncedPath,
    BGPFault,
    BGPInstance,
    BGPPeer,
    PeerRestart,
    PeerTimers,
    PolicyDirection,
    PolicyStatement,
    PrefixMatch,
    RoutePolicy,
    without_zone,
)
from cells.cluster.nodes.node import ClusterNode
from cells.kubernetes.objects.cilium_bgp import (
    AFIS,
    COMMUNITIES,
    SAFIS,
    BGPAdvertisement,
    BGPAttributes,
    BGPNodeInstance,
    BGPNodePeer,
    BGPPeerConfigSpec,
    CiliumBGPAdvertisement,
    CiliumBGPNodeConfig,
    CiliumBGPPeerConfig,
    CiliumBGPPeeringPolicy,
)
from cells.kubernetes.objects.kind import LabelSelector
from lifecycle import Secret

__all__ = ["BGPFacts", "InstancePlan", "plans"]


POD_CIDR, POOL, SERVICE = "PodCIDR", "CiliumPodIPPool", "Service"
MOST_31: Final = 0x7FFFFFFF
MOST_32: Final = 0xFFFFFFFF
REFUSED: Final = (
    "refused: policies of the first version are not served; expected a CiliumBGPClusterConfig instead"
)
_UNICAST: Final = {IPV4_UNICAST: Family.IPV4, IPV6_UNICAST: Family.IPV6}


class BGPFacts(NamedTuple):
    """All that decides what the speakers of this node are to do, in any order."""

    node: ClusterNode
    config: CiliumBGPNodeConfig | None = None
    peer_configs: Sequence[CiliumBGPPeerConfig] = ()
    advertisements: Sequence[CiliumBGPAdvertisement] = ()
    pod_cidrs: Sequence[IPNetwork] = ()
    """Empty in IPAM modes in which nodes have no ranges of their own."""
    pools: Sequence[AnnouncedPool] = ()
    services: Sequence[AnnouncedService] = ()
    passwords: Sequence[BGPPassword] = ()
    secrets_namespace: str = ""
    legacy: Sequence[CiliumBGPPeeringPolicy] = ()
    """Policies of the first version, which are refused."""


class InstancePlan(msgspec.Struct, frozen=True):
    """A row of the table ``bgp-plans``: all that one instance is to do. That of no name has faults alone."""

    name: str
    instance: BGPInstance | None = None
    peers: tuple[BGPPeer, ...] = ()
    policies: tuple[RoutePolicy, ...] = ()
    paths: tuple[AnnouncedPath, ...] = ()
    faults: tuple[BGPFault, ...] = ()


class _BadValueError(ValueError):
    """What was found and what was expected, in one line."""


def plans(facts: BGPFacts) -> dict[str, InstancePlan]:
    """What each instance of this node is to do, by its name."""
    refused = [
        BGPFault("", f"CiliumBGPPeeringPolicy/{one.name}", REFUSED)
        for one in sorted(facts.legacy, key=lambda each: each.name)
        if one.spec is None
        or one.spec.node_selector is None
        or one.spec.node_selector.matches(dict(facts.node.labels))
    ]
    announced = _Announced(facts)
    found: dict[str, InstancePlan] = {}
    for instance in facts.config.spec.bgp_instances if facts.config is not None else ():
        found[instance.name] = _plan(instance, facts, announced)
    if faults := tuple(dict.fromkeys((*refused, *announced.faults))):
        found[""] = InstancePlan("", faults=faults)
    return found


def _plan(wanted: BGPNodeInstance, facts: BGPFacts, announced: _Announced) -> InstancePlan:
    faults: list[BGPFault] = []

    def fault(subject: str, error: str) -> None:
        faults.append(BGPFault(wanted.name, subject, error))

    try:
        instance = _instance(wanted, facts.node)
    except _BadValueError as error:
        fault(f"instance {wanted.name}", f"not started: {error}")
        return InstancePlan(wanted.name, faults=tuple(faults))
    configs = {one.name: one.spec for one in facts.peer_configs}
    peers: dict[IPAddress, BGPPeer] = {}
    policies: dict[str, list[PolicyStatement]] = {}
    prefixes: set[IPNetwork] = set()
    for each in sorted(wanted.peers or (), key=lambda one: one.name):
        try:
            peer, spec = _peer(each, instance, configs, facts)
        except _BadValueError as error:
            fault(f"peer {each.name}", f"no session: {error}")
            continue
        if (other := peers.get(peer.address)) is not None:
            fault(f"peer {each.name}", f"no session: peer {other.name} has the address {peer.address}, too")
            continue
        if peer.timers.keepalive >= peer.timers.hold:
            given = f"keepAliveTimeSeconds={peer.timers.keepalive}, holdTimeSeconds={peer.timers.hold}"
            fault(f"peer {each.name}", f"{given}: the session may end again and again; expected a third")
        peers[peer.address] = peer
        for family in spec.families or ():
            sort = AfiSafi(family.afi, family.safi)
            for name, statement in announced.to(peer, sort, family.advertisements):
                statements = policies.setdefault(name, [])
                if statement not in statements:
                    statements.append(statement)
                prefixes.update([match.cidr for match in statement.prefixes])
    exports = [
        RoutePolicy(instance.name, name, PolicyDirection.EXPORT, _ordered(statements))
        for name, statements in sorted(policies.items())
    ]
    local = RoutePolicy(
        instance.name, ALLOW_LOCAL, PolicyDirection.IMPORT, (PolicyStatement(local_routes=True),)
    )
    return InstancePlan(
        instance.name,
        instance,
        tuple(sorted(peers.values(), key=lambda one: one.name)),
        (local, *exports),
        tuple(AnnouncedPath(instance.name, prefix) for prefix in sorted(prefixes, key=_order)),
        tuple(faults),
    )


def _ordered(statements: list[PolicyStatement]) -> tuple[PolicyStatement, ...]:
    if len(statements) == 1:
        return (statements[0],)
    return tuple(sorted(statements, key=lambda one: [_order(match.cidr) for match in one.prefixes]))


def _order(network: IPNetwork) -> tuple[int, bytes, int]:
    return network.version, network.network_address.packed, network.prefixlen


# The instance: its router ID and port come from the resource, the node's annotation, or the node.

_ANNOTATION: Final = "cilium.io/bgp-virtual-router."
_MOST_PORT: Final = 32767
"""Of the annotation, which Cilium reads as 16 bits with a sign."""


def _instance(wanted: BGPNodeInstance, node: ClusterNode) -> BGPInstance:
    """Raises _BadValueError."""
    _within(wanted.local_asn, 1, MOST_32, "localASN")
    _within(wanted.local_port, 0, 65535, "localPort")
    router_id, port = _annotated(node, wanted.local_asn)
    if wanted.router_id:
        router_id = _ipv4(wanted.router_id, "routerID")
    if router_id is None:
        found = node.node_ip(Family.IPV4)
        if not isinstance(found, IPv4Address):
            raise _BadValueError(
                f"node {node.name} has no IPv4 address to take the router ID from: expected routerID in a"
                " CiliumBGPNodeConfigOverride"
            )
        router_id = found
    return BGPInstance(wanted.name, wanted.local_asn, router_id, wanted.local_port or port)


def _annotated(node: ClusterNode, asn: int) -> tuple[IPv4Address | None, int]:
    """Router ID and port of an ASN by the node's annotations. Raises _BadValueError for any bad one."""
    router_id, port = None, NOT_LISTENING
    for key, value in sorted(node.annotations.items()):
        if not key.startswith(_ANNOTATION):
            continue
        number = key.removeprefix(_ANNOTATION)
        if (annotated := _decimal(number, MOST_32)) is None:
            raise _BadValueError(f"annotation {key} of node {node.name}: expected an ASN after the last dot")
        found_id, found_port = None, NOT_LISTENING
        for part in value.split(","):
            name, _, given = part.strip().partition("=")
            if name == "router-id":
                found_id = _ipv4(given, f"annotation {key} of node {node.name}: router-id")
            elif name == "local-port":
                if (parsed := _decimal(given, _MOST_PORT)) is None:
                    what = f"annotation {key} of node {node.name}: local-port={given}"
                    raise _BadValueError(f"{what}: expected 0 to {_MOST_PORT}")
                found_port = parsed
        if annotated == asn:
            router_id, port = found_id, found_port
    return router_id, port


def _ipv4(text: str, what: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except AddressValueError:
        raise _BadValueError(f"{what}={text}: expected an IPv4 address") from None


# Peers.


def _peer(
    wanted: BGPNodePeer,
    instance: BGPInstance,
    configs: Mapping[str, BGPPeerConfigSpec],
    facts: BGPFacts,
) -> tuple[BGPPeer, BGPPeerConfigSpec]:
    """Raises _BadValueError."""
    address = _address(wanted.peer_address, "peerAddress")
    if address is None:
        raise _BadValueError("peerAddress is missing: expected an IP address")
    _within(wanted.peer_asn, 1, MOST_32, "peerASN")
    spec = BGPPeerConfigSpec()
    if wanted.peer_config_ref is not None:
        found = configs.get(wanted.peer_config_ref.name)
        if found is None:
            raise _BadValueError(f"CiliumBGPPeerConfig {wanted.peer_config_ref.name} is missing")
        spec = found
    local = _address(wanted.local_address, "localAddress")
    if local is not None and local.version != address.version:
        raise _BadValueError(f"localAddress={local}: expected IPv{address.version} as that of the peer")
    peer = BGPPeer(
        instance.name,
        wanted.name,
        address,
        wanted.peer_asn,
        instance.local_asn,
        local_address=local,
        password=_password(spec.auth_secret_ref, facts),
        multihop_ttl=_within(spec.ebgp_multihop, 1, 255, "ebgpMultihop"),
    )
    given: dict[str, object] = {}
    if (transport := spec.transport) is not None:
        given["local_port"] = _within(transport.local_port, 0, 65535, "transport.localPort")
        given["remote_port"] = _within(transport.peer_port or 179, 1, 65535, "transport.peerPort")
    if (timers := spec.timers) is not None:
        given["timers"] = PeerTimers(
            _within(timers.connect_retry_time_seconds or 120, 1, MOST_31, "connectRetryTimeSeconds"),
            _within(timers.hold_time_seconds or 90, 3, 65535, "holdTimeSeconds"),
            _within(timers.keep_alive_time_seconds or 30, 1, 65535, "keepAliveTimeSeconds"),
        )
    if (restart := spec.graceful_restart) is not None:
        time = _within(restart.restart_time_seconds or 120, 1, 4095, "restartTimeSeconds")
        given["graceful_restart"] = PeerRestart(restart.enabled, time)
    if spec.families:
        given["families"] = tuple(dict.fromkeys(_family(one.afi, one.safi) for one in spec.families))
    return msgspec.structs.replace(peer, **given), spec


def _family(afi: str, safi: str) -> AfiSafi:
    if afi not in AFIS or safi not in SAFIS:
        raise _BadValueError(f"family {afi}/{safi}: expected one such as ipv4/unicast")
    return AfiSafi(afi, safi)


def _within(value: int, least: int, most: int, what: str) -> int:
    """Schemas have these limits, too, but not all objects come by an API server that has them."""
    if not least <= value <= most:
        raise _BadValueError(f"{what}={value}: expected {least} to {most}")
    return value


def _decimal(text: str, most: int) -> int | None:
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most:
        return int(text)
    return None


def _address(text: str, what: str) -> IPAddress | None:
    if not (stripped := text.strip()):
        return None
    try:
        return ip_address(stripped)
    except ValueError:
        raise _BadValueError(f"{what}={text}: expected an IP address") from None


def _password(secret: str | None, facts: BGPFacts) -> Secret | None:
    """None where none is asked for: a session that has to have one is never opened without it."""
    if not secret:
        return None
    if not (namespace := facts.secrets_namespace):
        raise _BadValueError(f"authSecretRef={secret}: expected bgp-secrets-namespace to be set")
    found = next((one.password for one in facts.passwords if one.key == (namespace, secret)), None)
    if found is None:
        raise _BadValueError(f"authSecretRef={secret}: Secret {namespace}/{secret} is missing")
    if not found:
        raise _BadValueError(f"Secret {namespace}/{secret} has no key password, or an empty one")
    return found


# Advertisements.


class _Attributes(NamedTuple):
    """What is added to routes."""

    communities: tuple[int, ...] = ()
    large: tuple[tuple[int, int, int], ...] = ()
    preference: int | None = None

    def united(self, other: _Attributes) -> _Attributes:
        """Both: all communities, and the higher preference."""
        preferences = [one for one in (self.preference, other.preference) if one is not None]
        return _Attributes(
            tuple(dict.fromkeys((*self.communities, *other.communities))),
            tuple(dict.fromkeys((*self.large, *other.large))),
            max(preferences, default=None),
        )


class _Routes(NamedTuple):
    """Routes of one pool or service, or of the node."""

    name: str
    """What follows peer and family in the name of a policy."""
    matches: tuple[PrefixMatch, ...]
    """Sorted; each network is a route."""


class _Entry(NamedTuple):
    """One advertisement of an object, with all that it announces of each family."""

    attributes: _Attributes
    routes: Mapping[Family, Sequence[_Routes]]


class _Announced:
    """What advertisements announce, worked out once for all peers."""

    def __init__(self, facts: BGPFacts) -> None:
        self.faults: list[BGPFault] = []
        self._objects: list[tuple[dict[str, str], list[_Entry]]] = []
        for each in sorted(facts.advertisements, key=lambda one: one.name):
            entries: list[_Entry] = []
            for entry in each.spec.advertisements:
                try:
                    attributes, routes = _attributes(entry.attributes), _by_family(_routes(entry, facts))
                except _BadValueError as error:
                    subject = f"CiliumBGPAdvertisement/{each.name}"
                    fault = BGPFault("", subject, f"{entry.advertisement_type} is not announced: {error}")
                    self.faults.append(fault)
                    continue
                entries.append(_Entry(attributes, routes))
            self._objects.append((each.labels, entries))

    def to(
        self, peer: BGPPeer, family: AfiSafi, selector: LabelSelector | None
    ) -> Iterator[tuple[str, PolicyStatement]]:
        """The policies of a peer by name, each with a statement that matches the routes of a family."""
        version = _UNICAST.get(family)
        if selector is None or version is None:
            return
        found: dict[str, list[tuple[_Routes, _Attributes]]] = {}
        for labels, entries in self._objects:
            if not selector.matches(labels):
                continue
            for entry in entries:
                for routes in entry.routes[version]:
                    _unite(found.setdefault(routes.name, []), routes, entry.attributes)
        for name, parts in found.items():
            for routes, attributes in parts:
                statement = PolicyStatement(
                    (without_zone(peer.address),),
                    routes.matches,
                    communities=attributes.communities,
                    large_communities=attributes.large,
                    local_preference=attributes.preference,
                )
                yield f"{peer.name}-{family.afi}-{name}", statement


def _unite(parts: list[tuple[_Routes, _Attributes]], routes: _Routes, attributes: _Attributes) -> None:
    """Two advertisements of the same routes are one. A name may be that of several services."""
    for number, (known, before) in enumerate(parts):
        if known.matches == routes.matches:
            parts[number] = known, before.united(attributes)
            return
    parts.append((routes, attributes))


_Route = tuple[str, IPNetwork, int]
"""What it is of, the route, and the length of what is matched."""


def _by_family(routes: Iterable[_Route]) -> dict[Family, list[_Routes]]:
    """The routes of each family, together where they are of the same."""
    grouped: dict[Family, dict[str, set[PrefixMatch]]] = {family: {} for family in Family}
    for name, network, length in routes:
        members = grouped[Family.of(network)].setdefault(name, set())
        members.add(PrefixMatch(network, length, length))
    return {
        family: [_Routes(name, _sorted(members)) for name, members in named.items()]
        for family, named in grouped.items()
    }


def _sorted(members: set[PrefixMatch]) -> tuple[PrefixMatch, ...]:
    if len(members) == 1:  # as of nearly every service
        return tuple(members)
    return tuple(sorted(members, key=lambda one: (_order(one.cidr), one.min_length)))


def _routes(entry: BGPAdvertisement, facts: BGPFacts) -> Iterator[_Route]:
    """Raises _BadValueError."""
    if entry.advertisement_type == POD_CIDR:
        yield from ((POD_CIDR, cidr, cidr.prefixlen) for cidr in facts.pod_cidrs)
    elif entry.advertisement_type == POOL:
        for pool in facts.pools:
            if entry.selector is not None and entry.selector.matches(pool.selectable):
                for cidr in pool.cidrs:
                    length = pool.mask_sizes.get(Family.of(cidr), cidr.prefixlen)
                    yield f"{POOL}-{pool.name}", cidr, length
    elif entry.service is None or not entry.service.addresses:
        raise _BadValueError(
            f"service.addresses is missing: expected some of {LOAD_BALANCER_IP}, {CLUSTER_IP}, {EXTERNAL_IP}"
        )
    elif entry.selector is not None:
        yield from _service_routes(entry.selector, set(entry.service.addresses), facts.services)


def _service_routes(
    selector: LabelSelector, types: set[str], services: Iterable[AnnouncedService]
) -> Iterator[_Route]:
    for service in services:
        if selector.matches(dict(service.labels)):
            namespace, name = service.key
            for address_type, network in service.addresses:
                if address_type in types:
                    yield f"{SERVICE}-{name}-{namespace}-{address_type}", network, network.prefixlen


def _attributes(given: BGPAttributes | None) -> _Attributes:
    """Raises _BadValueError."""
    if given is None:
        return _Attributes()
    preference = given.local_preference or None  # 0 is the same as none to a speaker
    if preference is not None and not 0 < preference <= MOST_32:
        raise _BadValueError(f"localPreference={preference}: expected 0 to {MOST_32}")
    if (communities := given.communities) is None:
        return _Attributes(preference=preference)
    standard = [_standard(text) for text in communities.standard or ()]
    for name in communities.well_known or ():
        if name not in COMMUNITIES:
            raise _BadValueError(f"community {name}: expected one of {', '.join(COMMUNITIES)}")
        standard.append(COMMUNITIES[name])
    large = [_large(text) for text in communities.large or ()]
    return _Attributes(tuple(dict.fromkeys(standard)), tuple(dict.fromkeys(large)), preference)


def _standard(text: str) -> int:
    """RFC 1997: two numbers of 16 bits, or one of 32."""
    parts = _numbers(text, MOST_32 if ":" not in text else 0xFFFF)
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0] << 16 | parts[1]
    raise _BadValueError(f"community {text}: expected 0 to {MOST_32}, or two numbers such as 65000:100")


def _large(text: str) -> tuple[int, int, int]:
    """RFC 8092: three numbers of 32 bits."""
    parts = _numbers(text, MOST_32)
    if len(parts) != 3:
        raise _BadValueError(f"large community {text}: expected three numbers such as 65000:1:2")
    return parts[0], parts[1], parts[2]


def _numbers(text: str, most: int) -> list[int]:
    parts = [_decimal(part, most) for part in text.split(":")]
    found = [part for part in parts if part is not None]
    if len(found) != len(parts):
        raise _BadValueError(f"community {text}: expected decimal numbers up to {most}")
    return found
