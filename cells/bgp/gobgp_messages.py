"""Messages of gobgpd's API, with the fields that are used.

Why:    a stable subset: gobgpd 3.10 to 3.29 differ only in fields that are not used here.
Source: gobgp 3.10, api/gobgp.proto, api/attribute.proto (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, ClassVar

from cells.hubble.codec import Wire, WireMessage

UNICAST = 1
"""The SAFI of announced routes."""
GLOBAL_RIB = "global"
"""Name of the policy assignments for all peers."""


class TableType(IntEnum):
    """A RIB: Loc-RIB, Adj-RIB-In or Adj-RIB-Out."""

    GLOBAL = 0
    ADJ_IN = 2
    ADJ_OUT = 3


class DefinedType(IntEnum):
    """Type of a defined set."""

    PREFIX = 0
    NEIGHBOR = 1
    COMMUNITY = 4


class RouteAction(IntEnum):
    """Action of a statement, or default action of an assignment."""

    NONE = 0
    ACCEPT = 1
    REJECT = 2


class AssignmentDirection(IntEnum):
    """Direction of a policy assignment."""

    UNKNOWN = 0
    IMPORT = 1
    EXPORT = 2


class RouteType(IntEnum):
    """Origin of a route, as a condition."""

    NONE = 0
    LOCAL = 3


class SoftResetDirection(IntEnum):
    """Direction of a soft reset."""

    IN = 0
    OUT = 1
    BOTH = 2


class SessionState(IntEnum):
    """State of a session (RFC 4271, section 8.2.2)."""

    UNKNOWN = 0
    IDLE = 1
    CONNECT = 2
    ACTIVE = 3
    OPENSENT = 4
    OPENCONFIRM = 5
    ESTABLISHED = 6


class EmptyMessage(WireMessage):
    """An empty message."""

    protobuf: ClassVar[str] = "google.protobuf.Empty"


class Packed(WireMessage):
    """A google.protobuf.Any: an encoded message with its type."""

    protobuf: ClassVar[str] = "google.protobuf.Any"
    type_url: Annotated[str, Wire(1)] = ""
    value: Annotated[bytes, Wire(2)] = b""


class AddressFamily(WireMessage):
    """AFI and SAFI (RFC 4760)."""

    protobuf: ClassVar[str] = "apipb.Family"
    afi: Annotated[int, Wire(1, "int32")] = 0
    safi: Annotated[int, Wire(2, "int32")] = 0


# The speaker as a whole.


class RouteSelection(WireMessage):
    """Options of route selection."""

    protobuf: ClassVar[str] = "apipb.RouteSelectionOptionsConfig"
    advertise_inactive_routes: Annotated[bool, Wire(4)] = False


class Global(WireMessage):
    """Global configuration; ASN 0 before StartBgp."""

    protobuf: ClassVar[str] = "apipb.Global"
    asn: Annotated[int, Wire(1, "uint32")] = 0
    router_id: Annotated[str, Wire(2)] = ""
    listen_port: Annotated[int, Wire(3, "int32")] = 0
    """-1: gobgpd does not listen."""
    route_selection_options: Annotated[RouteSelection | None, Wire(7)] = None


class StartBgp(WireMessage):
    """Request of StartBgp, response of GetBgp."""

    protobuf: ClassVar[str] = "apipb.StartBgpRequest"
    all: Annotated[Global | None, Wire(1)] = None


# Peers.


class PeerConf(WireMessage):
    """Identity of a peer."""

    protobuf: ClassVar[str] = "apipb.PeerConf"
    auth_password: Annotated[str, Wire(1)] = ""
    description: Annotated[str, Wire(2)] = ""
    local_asn: Annotated[int, Wire(3, "uint32")] = 0
    neighbor_address: Annotated[str, Wire(4)] = ""
    peer_asn: Annotated[int, Wire(5, "uint32")] = 0
    peer_group: Annotated[str, Wire(6)] = ""
    type: Annotated[int, Wire(7, "int32")] = 0
    remove_private: Annotated[int, Wire(8, "int32")] = 0
    route_flap_damping: Annotated[bool, Wire(9)] = False
    send_community: Annotated[int, Wire(10, "uint32")] = 0
    neighbor_interface: Annotated[str, Wire(11)] = ""
    vrf: Annotated[str, Wire(12)] = ""
    allow_own_asn: Annotated[int, Wire(13, "uint32")] = 0
    replace_peer_asn: Annotated[bool, Wire(14)] = False
    admin_down: Annotated[bool, Wire(15)] = False


class EbgpMultihop(WireMessage):
    """Multihop of an eBGP peer."""

    protobuf: ClassVar[str] = "apipb.EbgpMultihop"
    enabled: Annotated[bool, Wire(1)] = False
    multihop_ttl: Annotated[int, Wire(2, "uint32")] = 0


class ApiPeerState(WireMessage):
    """State of a session."""

    protobuf: ClassVar[str] = "apipb.PeerState"
    neighbor_address: Annotated[str, Wire(5)] = ""
    session_state: Annotated[int, Wire(13, "int32")] = 0
    admin_state: Annotated[int, Wire(15, "int32")] = 0
    """0: up."""
    flops: Annotated[int, Wire(17, "uint32")] = 0
    """Number of times an established session ended."""
    remote_cap: Annotated[Sequence[Packed], Wire(18)] = ()
    local_cap: Annotated[Sequence[Packed], Wire(19)] = ()
    router_id: Annotated[str, Wire(20)] = ""


class TimersConfig(WireMessage):
    """Configured timers in seconds."""

    protobuf: ClassVar[str] = "apipb.TimersConfig"
    connect_retry: Annotated[int, Wire(1, "uint64")] = 0
    hold_time: Annotated[int, Wire(2, "uint64")] = 0
    keepalive_interval: Annotated[int, Wire(3, "uint64")] = 0
    minimum_advertisement_interval: Annotated[int, Wire(4, "uint64")] = 0
    idle_hold_time_after_reset: Annotated[int, Wire(5, "uint64")] = 0


class TimersState(WireMessage):
    """Negotiated timers in seconds; uptime: nanoseconds since 1970 when the session was established."""

    protobuf: ClassVar[str] = "apipb.TimersState"
    keepalive_interval: Annotated[int, Wire(3, "uint64")] = 0
    negotiated_hold_time: Annotated[int, Wire(5, "uint64")] = 0
    uptime: Annotated[int | None, Wire(6, "Timestamp")] = None


class Timers(WireMessage):
    """Configured and negotiated timers."""

    protobuf: ClassVar[str] = "apipb.Timers"
    config: Annotated[TimersConfig | None, Wire(1)] = None
    state: Annotated[TimersState | None, Wire(2)] = None


class ApiTransport(WireMessage):
    """Addresses and ports of the connection."""

    protobuf: ClassVar[str] = "apipb.Transport"
    local_address: Annotated[str, Wire(1)] = ""
    """In the list of peers, the actual address of an established session."""
    local_port: Annotated[int, Wire(2, "uint32")] = 0
    mtu_discovery: Annotated[bool, Wire(3)] = False
    passive_mode: Annotated[bool, Wire(4)] = False
    remote_address: Annotated[str, Wire(5)] = ""
    remote_port: Annotated[int, Wire(6, "uint32")] = 0
    tcp_mss: Annotated[int, Wire(7, "uint32")] = 0
    bind_interface: Annotated[str, Wire(8)] = ""


class GracefulRestart(WireMessage):
    """Graceful restart as announced to the peer (RFC 4724, RFC 8538)."""

    protobuf: ClassVar[str] = "apipb.GracefulRestart"
    enabled: Annotated[bool, Wire(1)] = False
    restart_time: Annotated[int, Wire(2, "uint32")] = 0
    helper_only: Annotated[bool, Wire(3)] = False
    deferral_time: Annotated[int, Wire(4, "uint32")] = 0
    notification_enabled: Annotated[bool, Wire(5)] = False
    longlived_enabled: Annotated[bool, Wire(6)] = False
    stale_routes_time: Annotated[int, Wire(7, "uint32")] = 0
    peer_restart_time: Annotated[int, Wire(8, "uint32")] = 0
    peer_restarting: Annotated[bool, Wire(9)] = False
    local_restarting: Annotated[bool, Wire(10)] = False
    mode: Annotated[str, Wire(11)] = ""


class Enabled(WireMessage):
    """A switch."""

    protobuf: ClassVar[str] = "apipb.MpGracefulRestartConfig"
    enabled: Annotated[bool, Wire(1)] = False


class FamilyRestart(WireMessage):
    """Graceful restart of a family."""

    protobuf: ClassVar[str] = "apipb.MpGracefulRestart"
    config: Annotated[Enabled | None, Wire(1)] = None


class FamilyConfig(WireMessage):
    """Configuration of a family."""

    protobuf: ClassVar[str] = "apipb.AfiSafiConfig"
    family: Annotated[AddressFamily | None, Wire(1)] = None
    enabled: Annotated[bool, Wire(2)] = False


class FamilyState(WireMessage):
    """Route counts of a family."""

    protobuf: ClassVar[str] = "apipb.AfiSafiState"
    family: Annotated[AddressFamily | None, Wire(1)] = None
    enabled: Annotated[bool, Wire(2)] = False
    received: Annotated[int, Wire(3, "uint64")] = 0
    accepted: Annotated[int, Wire(4, "uint64")] = 0
    advertised: Annotated[int, Wire(5, "uint64")] = 0


class PeerFamily(WireMessage):
    """A family of a peer."""

    protobuf: ClassVar[str] = "apipb.AfiSafi"
    mp_graceful_restart: Annotated[FamilyRestart | None, Wire(1)] = None
    config: Annotated[FamilyConfig | None, Wire(2)] = None
    state: Annotated[FamilyState | None, Wire(3)] = None


class ApiPeer(WireMessage):
    """Configuration and state of a peer."""

    protobuf: ClassVar[str] = "apipb.Peer"
    conf: Annotated[PeerConf | None, Wire(2)] = None
    ebgp_multihop: Annotated[EbgpMultihop | None, Wire(3)] = None
    state: Annotated[ApiPeerState | None, Wire(5)] = None
    timers: Annotated[Timers | None, Wire(6)] = None
    transport: Annotated[ApiTransport | None, Wire(7)] = None
    graceful_restart: Annotated[GracefulRestart | None, Wire(9)] = None
    afi_safis: Annotated[Sequence[PeerFamily], Wire(10)] = ()


class PeerMessage(WireMessage):
    """Request of AddPeer and UpdatePeer, response of ListPeer."""

    protobuf: ClassVar[str] = "apipb.AddPeerRequest"
    peer: Annotated[ApiPeer | None, Wire(1)] = None


class DeletePeer(WireMessage):
    """Request of DeletePeer."""

    protobuf: ClassVar[str] = "apipb.DeletePeerRequest"
    address: Annotated[str, Wire(1)] = ""


class ListPeer(WireMessage):
    """Request of ListPeer."""

    protobuf: ClassVar[str] = "apipb.ListPeerRequest"
    address: Annotated[str, Wire(1)] = ""
    enable_advertised: Annotated[bool, Wire(2)] = False


class ResetPeer(WireMessage):
    """Request of ResetPeer."""

    protobuf: ClassVar[str] = "apipb.ResetPeerRequest"
    address: Annotated[str, Wire(1)] = ""
    communication: Annotated[str, Wire(2)] = ""
    soft: Annotated[bool, Wire(3)] = False
    direction: Annotated[int, Wire(4, "int32")] = 0


ADJ_IN = 1
"""Filter type of routes received from peers."""


class WatchFilter(WireMessage):
    """Filter of watched routes."""

    protobuf: ClassVar[str] = "apipb.WatchEventRequest.Table.Filter"
    type: Annotated[int, Wire(1, "int32")] = 0


class WatchTable(WireMessage):
    """Watch routes."""

    protobuf: ClassVar[str] = "apipb.WatchEventRequest.Table"
    filters: Annotated[Sequence[WatchFilter], Wire(1)] = ()


class WatchEventRequest(WireMessage):
    """Request of WatchEvent: watch states of peers, or routes."""

    protobuf: ClassVar[str] = "apipb.WatchEventRequest"
    peer: Annotated[EmptyMessage | None, Wire(1)] = None
    table: Annotated[WatchTable | None, Wire(2)] = None


class UnknownCapability(WireMessage):
    """A capability without a message type in gobgpd."""

    protobuf: ClassVar[str] = "apipb.UnknownCapability"
    code: Annotated[int, Wire(1, "uint32")] = 0


# Routes.


class ApiPath(WireMessage):
    """An announcement or withdrawal of a route."""

    protobuf: ClassVar[str] = "apipb.Path"
    nlri: Annotated[Packed | None, Wire(1)] = None
    pattrs: Annotated[Sequence[Packed], Wire(2)] = ()
    age: Annotated[int | None, Wire(3, "Timestamp")] = None
    best: Annotated[bool, Wire(4)] = False
    is_withdraw: Annotated[bool, Wire(5)] = False
    family: Annotated[AddressFamily | None, Wire(9)] = None
    stale: Annotated[bool, Wire(13)] = False
    neighbor_ip: Annotated[str, Wire(15)] = ""
    nlri_binary: Annotated[bytes, Wire(20)] = b""
    pattrs_binary: Annotated[Sequence[bytes], Wire(21)] = ()


class Destination(WireMessage):
    """All paths to a prefix."""

    protobuf: ClassVar[str] = "apipb.Destination"
    prefix: Annotated[str, Wire(1)] = ""
    paths: Annotated[Sequence[ApiPath], Wire(2)] = ()


class ListPath(WireMessage):
    """Request of ListPath; ``only_binary``: NLRI and attributes in wire format only (RFC 4271)."""

    protobuf: ClassVar[str] = "apipb.ListPathRequest"
    table_type: Annotated[int, Wire(1, "int32")] = 0
    name: Annotated[str, Wire(2)] = ""
    family: Annotated[AddressFamily | None, Wire(3)] = None
    only_binary: Annotated[bool, Wire(9)] = False


class ListedPath(WireMessage):
    """Response of ListPath."""

    protobuf: ClassVar[str] = "apipb.ListPathResponse"
    destination: Annotated[Destination | None, Wire(1)] = None


class AddPathStream(WireMessage):
    """Request of AddPathStream."""

    protobuf: ClassVar[str] = "apipb.AddPathStreamRequest"
    table_type: Annotated[int, Wire(1, "int32")] = 0
    paths: Annotated[Sequence[ApiPath], Wire(3)] = ()


class AddressPrefix(WireMessage):
    """The NLRI of unicast routes."""

    protobuf: ClassVar[str] = "apipb.IPAddressPrefix"
    prefix_len: Annotated[int, Wire(1, "uint32")] = 0
    prefix: Annotated[str, Wire(2)] = ""


class OriginAttribute(WireMessage):
    """0: IGP (RFC 4271, 5.1.1)."""

    protobuf: ClassVar[str] = "apipb.OriginAttribute"
    origin: Annotated[int, Wire(1, "uint32")] = 0


class NextHopAttribute(WireMessage):
    """NEXT_HOP of IPv4 (RFC 4271, section 5.1.3); 0.0.0.0: the local address of each session."""

    protobuf: ClassVar[str] = "apipb.NextHopAttribute"
    next_hop: Annotated[str, Wire(1)] = ""


class CommunitiesAttribute(WireMessage):
    """COMMUNITIES (RFC 1997)."""

    protobuf: ClassVar[str] = "apipb.CommunitiesAttribute"
    communities: Annotated[Sequence[int], Wire(1, "uint32")] = ()


class MpReachAttribute(WireMessage):
    """MP_REACH_NLRI (RFC 4760, section 3); next hop ``::``: the local address of each session."""

    protobuf: ClassVar[str] = "apipb.MpReachNLRIAttribute"
    family: Annotated[AddressFamily | None, Wire(1)] = None
    next_hops: Annotated[Sequence[str], Wire(2)] = ()
    nlris: Annotated[Sequence[Packed], Wire(3)] = ()


# Policies.


class PrefixRange(WireMessage):
    """Prefixes within a network, with a range of prefix lengths."""

    protobuf: ClassVar[str] = "apipb.Prefix"
    ip_prefix: Annotated[str, Wire(1)] = ""
    mask_length_min: Annotated[int, Wire(2, "uint32")] = 0
    mask_length_max: Annotated[int, Wire(3, "uint32")] = 0


class DefinedSet(WireMessage):
    """A set to which conditions refer."""

    protobuf: ClassVar[str] = "apipb.DefinedSet"
    defined_type: Annotated[int, Wire(1, "int32")] = 0
    name: Annotated[str, Wire(2)] = ""
    list: Annotated[Sequence[str], Wire(3)] = ()
    prefixes: Annotated[Sequence[PrefixRange], Wire(4)] = ()


class DefinedSetMessage(WireMessage):
    """Request of AddDefinedSet and DeleteDefinedSet, response of ListDefinedSet."""

    protobuf: ClassVar[str] = "apipb.DeleteDefinedSetRequest"
    defined_set: Annotated[DefinedSet | None, Wire(1)] = None
    all: Annotated[bool, Wire(2)] = False


class ListDefinedSet(WireMessage):
    """Request of ListDefinedSet."""

    protobuf: ClassVar[str] = "apipb.ListDefinedSetRequest"
    defined_type: Annotated[int, Wire(1, "int32")] = 0


class MatchSet(WireMessage):
    """A condition that any member of a set matches."""

    protobuf: ClassVar[str] = "apipb.MatchSet"
    type: Annotated[int, Wire(1, "int32")] = 0
    name: Annotated[str, Wire(2)] = ""


class Conditions(WireMessage):
    """Conditions that must all match."""

    protobuf: ClassVar[str] = "apipb.Conditions"
    prefix_set: Annotated[MatchSet | None, Wire(1)] = None
    neighbor_set: Annotated[MatchSet | None, Wire(2)] = None
    community_set: Annotated[MatchSet | None, Wire(5)] = None
    route_type: Annotated[int, Wire(8, "int32")] = 0


REMOVE = 1
"""Action type that removes communities, given as regular expressions."""


class CommunityAction(WireMessage):
    """Communities to add (type 0) or remove."""

    protobuf: ClassVar[str] = "apipb.CommunityAction"
    type: Annotated[int, Wire(1, "int32")] = 0
    communities: Annotated[Sequence[str], Wire(2)] = ()


class LocalPreference(WireMessage):
    """LOCAL_PREF for iBGP peers."""

    protobuf: ClassVar[str] = "apipb.LocalPrefAction"
    value: Annotated[int, Wire(1, "uint32")] = 0


class Actions(WireMessage):
    """Actions for matching routes."""

    protobuf: ClassVar[str] = "apipb.Actions"
    route_action: Annotated[int, Wire(1, "int32")] = 0
    community: Annotated[CommunityAction | None, Wire(2)] = None
    local_pref: Annotated[LocalPreference | None, Wire(7)] = None
    large_community: Annotated[CommunityAction | None, Wire(8)] = None


class Statement(WireMessage):
    """Conditions and actions."""

    protobuf: ClassVar[str] = "apipb.Statement"
    name: Annotated[str, Wire(1)] = ""
    conditions: Annotated[Conditions | None, Wire(2)] = None
    actions: Annotated[Actions | None, Wire(3)] = None


class ApiPolicy(WireMessage):
    """A policy: the first statement that accepts or rejects a route decides."""

    protobuf: ClassVar[str] = "apipb.Policy"
    name: Annotated[str, Wire(1)] = ""
    statements: Annotated[Sequence[Statement], Wire(2)] = ()


class PolicyMessage(WireMessage):
    """Request of AddPolicy, response of ListPolicy."""

    protobuf: ClassVar[str] = "apipb.AddPolicyRequest"
    policy: Annotated[ApiPolicy | None, Wire(1)] = None


class DeletePolicy(WireMessage):
    """Request of DeletePolicy, which deletes the statements, too."""

    protobuf: ClassVar[str] = "apipb.DeletePolicyRequest"
    policy: Annotated[ApiPolicy | None, Wire(1)] = None
    all: Annotated[bool, Wire(3)] = False


class PolicyAssignment(WireMessage):
    """The policies of a direction, and its default action."""

    protobuf: ClassVar[str] = "apipb.PolicyAssignment"
    name: Annotated[str, Wire(1)] = ""
    direction: Annotated[int, Wire(2, "int32")] = 0
    policies: Annotated[Sequence[ApiPolicy], Wire(4)] = ()
    default_action: Annotated[int, Wire(5, "int32")] = 0


class AssignmentMessage(WireMessage):
    """Request of SetPolicyAssignment, response of ListPolicyAssignment."""

    protobuf: ClassVar[str] = "apipb.SetPolicyAssignmentRequest"
    assignment: Annotated[PolicyAssignment | None, Wire(1)] = None


class ListAssignment(WireMessage):
    """Request of ListPolicyAssignment."""

    protobuf: ClassVar[str] = "apipb.ListPolicyAssignmentRequest"
    name: Annotated[str, Wire(1)] = ""
    direction: Annotated[int, Wire(2, "int32")] = 0
