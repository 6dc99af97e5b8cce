"""Plan the BGP instances of this node: a pure function from resources to plans.

Input:  CiliumBGPNodeConfig (written by the operator), CiliumBGPPeerConfig, CiliumBGPAdvertisement; the node,
        its pod CIDRs and pools; services; passwords.
Output: an InstancePlan per instance.
Why:    the plan does not depend on the order of events. Policies and their names are those of Cilium 1.17.
        Where 1.17 depends on the order, or one error stops an instance, the plan follows later versions:
        overlapping advertisements are united, and an invalid peer or advertisement is a separate fault.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import AddressValueError, IPv4Address, ip_address
from typing import Any, Final, NamedTuple

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.bgp.advertisements import (
    MAX_32,
    Announced,
    AnnouncedPool,
    AnnouncedService,
    BadValueError,
    decimal,
    network_order,
)
from cells.bgp.speaker_state import (
    ALLOW_LOCAL,
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
    RoutePolicy,
)
from cells.cluster.nodes.node import ClusterNode
from cells.kubernetes.objects.cilium_bgp import (
    AFIS,
    SAFIS,
    BGPNodeInstance,
    BGPNodePeer,
    BGPPeerConfigSpec,
    CiliumBGPAdvertisement,
    CiliumBGPNodeConfig,
    CiliumBGPPeerConfig,
    CiliumBGPPeeringPolicy,
)
from cells.kubernetes.objects.kind import Key, Kind, Object
from lifecycle import Secret

__all__ = ["SECRETS", "BGPFacts", "BGPPassword", "InstancePlan", "plans"]

MAX_31: Final = 0x7FFFFFFF
REFUSED: Final = (
    "refused: policies of the first version are not served; expected a CiliumBGPClusterConfig instead"
)


# Passwords: only the password of a Secret is stored, and no table shows it.


class BGPPassword(msgspec.Struct, frozen=True):
    """The password of a peer, from the key ``password`` of a Secret."""

    key: Key
    password: Secret
    """Empty if the Secret has no such key."""


class SecretObject(Object, frozen=True, gc=False):
    """A Secret of the API server; only its BGPPassword is stored in a table."""

    data: dict[str, str] | None = None


def _password_in(found: SecretObject) -> BGPPassword:
    text = ""
    with suppress(binascii.Error, UnicodeDecodeError):  # an undecodable password is treated as a missing one
        text = base64.b64decode((found.data or {}).get("password", ""), validate=True).decode()
    return BGPPassword(found.key, Secret(text))


SECRETS: Final[Kind[Any]] = Kind(SecretObject, "v1", "secrets", kind="Secret").stored_as(_password_in)
"""The resource; its rows are BGPPasswords."""


# Plans.


class BGPFacts(NamedTuple):
    """The input of plans(); sequences are in any order."""

    node: ClusterNode
    config: CiliumBGPNodeConfig | None = None
    peer_configs: Sequence[CiliumBGPPeerConfig] = ()
    advertisements: Sequence[CiliumBGPAdvertisement] = ()
    pod_cidrs: Sequence[IPNetwork] = ()
    """Empty in IPAM modes without pod CIDRs per node."""
    pools: Sequence[AnnouncedPool] = ()
    services: Sequence[AnnouncedService] = ()
    passwords: Sequence[BGPPassword] = ()
    secrets_namespace: str = ""
    legacy: Sequence[CiliumBGPPeeringPolicy] = ()
    """CiliumBGPPeeringPolicies, which are not supported."""


class InstancePlan(msgspec.Struct, frozen=True):
    """A row of the table ``bgp-plans``: the plan of one instance. A row without name has only faults."""

    name: str
    instance: BGPInstance | None = None
    peers: tuple[BGPPeer, ...] = ()
    policies: tuple[RoutePolicy, ...] = ()
    paths: tuple[AnnouncedPath, ...] = ()
    faults: tuple[BGPFault, ...] = ()


def plans(facts: BGPFacts) -> dict[str, InstancePlan]:
    """Return the plan of each instance of this node by name."""
    refused = [
        BGPFault("", f"CiliumBGPPeeringPolicy/{one.name}", REFUSED)
        for one in sorted(facts.legacy, key=lambda each: each.name)
        if one.spec is None
        or one.spec.node_selector is None
        or one.spec.node_selector.matches(dict(facts.node.labels))
    ]
    announced = Announced(facts.advertisements, facts.pod_cidrs, facts.pools, facts.services)
    found: dict[str, InstancePlan] = {}
    for instance in facts.config.spec.bgp_instances if facts.config is not None else ():
        found[instance.name] = _plan(instance, facts, announced)
    if faults := tuple(dict.fromkeys((*refused, *announced.faults))):
        found[""] = InstancePlan("", faults=faults)
    return found


def _plan(wanted: BGPNodeInstance, facts: BGPFacts, announced: Announced) -> InstancePlan:
    faults: list[BGPFault] = []

    def fault(subject: str, error: str) -> None:
        faults.append(BGPFault(wanted.name, subject, error))

    try:
        instance = _instance(wanted, facts.node)
    except BadValueError as error:
        fault(f"instance {wanted.name}", f"not started: {error}")
        return InstancePlan(wanted.name, faults=tuple(faults))
    configs = {one.name: one.spec for one in facts.peer_configs}
    peers: dict[IPAddress, BGPPeer] = {}
    policies: dict[str, list[PolicyStatement]] = {}
    prefixes: set[IPNetwork] = set()
    for each in sorted(wanted.peers or (), key=lambda one: one.name):
        try:
            peer, spec = _peer(each, instance, configs, facts)
        except BadValueError as error:
            fault(f"peer {each.name}", f"no session: {error}")
            continue
        if (other := peers.get(peer.address)) is not None:
            fault(f"peer {each.name}", f"no session: peer {other.name} has the address {peer.address}, too")
            continue
        if peer.timers.keepalive >= peer.timers.hold:
            timers = f"keepAliveTimeSeconds={peer.timers.keepalive}, holdTimeSeconds={peer.timers.hold}"
            fault(f"peer {each.name}", f"{timers}: the session may end again and again; expected a third")
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
        tuple(AnnouncedPath(instance.name, prefix) for prefix in sorted(prefixes, key=network_order)),
        tuple(faults),
    )


def _ordered(statements: list[PolicyStatement]) -> tuple[PolicyStatement, ...]:
    if len(statements) == 1:
        return (statements[0],)
    return tuple(sorted(statements, key=lambda one: [network_order(match.cidr) for match in one.prefixes]))


# The instance: its router ID and port come from the resource, the node's annotation, or the node.

_ANNOTATION: Final = "cilium.io/bgp-virtual-router."
_MAX_ANNOTATED_PORT: Final = 32767
"""Largest port of the annotation, which Cilium parses as a signed 16-bit number."""


def _instance(wanted: BGPNodeInstance, node: ClusterNode) -> BGPInstance:
    """Compute ASN, router ID and port of an instance. Raises BadValueError."""
    _within(wanted.local_asn, 1, MAX_32, "localASN")
    _within(wanted.local_port, 0, 65535, "localPort")
    router_id, port = _annotated(node, wanted.local_asn)
    if wanted.router_id:
        router_id = _ipv4(wanted.router_id, "routerID")
    if router_id is None:
        found = node.node_ip(Family.IPV4)
        if not isinstance(found, IPv4Address):
            raise BadValueError(
                f"node {node.name} has no IPv4 address to take the router ID from: expected routerID in a"
                " CiliumBGPNodeConfigOverride"
            )
        router_id = found
    return BGPInstance(wanted.name, wanted.local_asn, router_id, wanted.local_port or port)


def _annotated(node: ClusterNode, asn: int) -> tuple[IPv4Address | None, int]:
    """Return router ID and port of an ASN by the annotations. Raises BadValueError for any invalid one."""
    router_id, port = None, NOT_LISTENING
    for key, value in sorted(node.annotations.items()):
        if not key.startswith(_ANNOTATION):
            continue
        number = key.removeprefix(_ANNOTATION)
        if (annotated := decimal(number, MAX_32)) is None:
            raise BadValueError(f"annotation {key} of node {node.name}: expected an ASN after the last dot")
        found_id, found_port = None, NOT_LISTENING
        for part in value.split(","):
            name, _, setting = part.strip().partition("=")
            if name == "router-id":
                found_id = _ipv4(setting, f"annotation {key} of node {node.name}: router-id")
            elif name == "local-port":
                if (parsed := decimal(setting, _MAX_ANNOTATED_PORT)) is None:
                    what = f"annotation {key} of node {node.name}: local-port={setting}"
                    raise BadValueError(f"{what}: expected 0 to {_MAX_ANNOTATED_PORT}")
                found_port = parsed
        if annotated == asn:
            router_id, port = found_id, found_port
    return router_id, port


def _ipv4(text: str, what: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except AddressValueError:
        raise BadValueError(f"{what}={text}: expected an IPv4 address") from None


# Peers.


def _peer(
    wanted: BGPNodePeer,
    instance: BGPInstance,
    configs: Mapping[str, BGPPeerConfigSpec],
    facts: BGPFacts,
) -> tuple[BGPPeer, BGPPeerConfigSpec]:
    """Merge a peer with its CiliumBGPPeerConfig. Raises BadValueError."""
    address = _address(wanted.peer_address, "peerAddress")
    if address is None:
        raise BadValueError("peerAddress is missing: expected an IP address")
    if wanted.peer_asn is None:
        raise BadValueError(f"peerASN is missing: expected 1 to {MAX_32}, or 0 for any")
    asn = _within(wanted.peer_asn, 0, MAX_32, "peerASN")
    spec = BGPPeerConfigSpec()
    if wanted.peer_config_ref is not None:
        found = configs.get(wanted.peer_config_ref.name)
        if found is None:
            raise BadValueError(f"CiliumBGPPeerConfig {wanted.peer_config_ref.name} is missing")
        spec = found
    local = _address(wanted.local_address, "localAddress")
    if local is not None and local.version != address.version:
        raise BadValueError(f"localAddress={local}: expected IPv{address.version} as that of the peer")
    peer = BGPPeer(
        instance.name,
        wanted.name,
        address,
        asn,
        instance.local_asn,
        local_address=local,
        password=_password(spec.auth_secret_ref, facts),
        multihop_ttl=_within(spec.ebgp_multihop, 1, 255, "ebgpMultihop"),
    )
    options: dict[str, object] = {}
    if (transport := spec.transport) is not None:
        options["local_port"] = _within(transport.local_port, 0, 65535, "transport.localPort")
        options["remote_port"] = _within(transport.peer_port or 179, 1, 65535, "transport.peerPort")
    if (timers := spec.timers) is not None:
        options["timers"] = PeerTimers(
            _within(timers.connect_retry_time_seconds or 120, 1, MAX_31, "connectRetryTimeSeconds"),
            _within(timers.hold_time_seconds or 90, 3, 65535, "holdTimeSeconds"),
            _within(timers.keep_alive_time_seconds or 30, 1, 65535, "keepAliveTimeSeconds"),
        )
    if (restart := spec.graceful_restart) is not None:
        time = _within(restart.restart_time_seconds or 120, 1, 4095, "restartTimeSeconds")
        options["graceful_restart"] = PeerRestart(restart.enabled, time)
    if spec.families:
        options["families"] = tuple(dict.fromkeys(_family(one.afi, one.safi) for one in spec.families))
    return msgspec.structs.replace(peer, **options), spec


def _family(afi: str, safi: str) -> AfiSafi:
    if afi not in AFIS or safi not in SAFIS:
        raise BadValueError(f"family {afi}/{safi}: expected one such as ipv4/unicast")
    return AfiSafi(afi, safi)


def _within(value: int, least: int, most: int, what: str) -> int:
    """Check the limits of the CRD's schema, to which objects from files are not validated."""
    if not least <= value <= most:
        raise BadValueError(f"{what}={value}: expected {least} to {most}")
    return value


def _address(text: str, what: str) -> IPAddress | None:
    if not (stripped := text.strip()):
        return None
    try:
        return ip_address(stripped)
    except ValueError:
        raise BadValueError(f"{what}={text}: expected an IP address") from None


def _password(secret: str | None, facts: BGPFacts) -> Secret | None:
    """Return the password of authSecretRef, None if unset. Raises BadValueError if it is missing."""
    if not secret:
        return None
    if not (namespace := facts.secrets_namespace):
        raise BadValueError(f"authSecretRef={secret}: expected bgp-secrets-namespace to be set")
    found = next((one.password for one in facts.passwords if one.key == (namespace, secret)), None)
    if found is None:
        raise BadValueError(f"authSecretRef={secret}: Secret {namespace}/{secret} is missing")
    if not found:
        raise BadValueError(f"Secret {namespace}/{secret} has no key password, or an empty one")
    return found
