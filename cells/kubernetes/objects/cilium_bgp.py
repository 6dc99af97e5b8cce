"""The six kinds of the BGP control plane: instances, peers and advertisements.

Source: Cilium 1.17, custom resources of group cilium.io, v2alpha1; RFC 4271, 1997, 4724, 8092 for their
        numbers.

Limits are in the CRD schemas only: the API server enforces them, and objects of an older schema are read
unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta as Limits
from msgspec import field

from cells.kubernetes.objects.cilium_pools import PolicyMeta
from cells.kubernetes.objects.kind import AGE, Condition, Kind, LabelSelector, Object, ObjectPart

__all__ = [
    "AFIS",
    "CILIUM_BGP_ADVERTISEMENTS",
    "CILIUM_BGP_CLUSTER_CONFIGS",
    "CILIUM_BGP_KINDS",
    "CILIUM_BGP_NODE_CONFIGS",
    "CILIUM_BGP_NODE_CONFIG_OVERRIDES",
    "CILIUM_BGP_PEERING_POLICIES",
    "CILIUM_BGP_PEER_CONFIGS",
    "COMMUNITIES",
    "SAFIS",
    "BGPAdvertisement",
    "BGPAttributes",
    "BGPClusterConfigSpec",
    "BGPClusterInstance",
    "BGPClusterPeer",
    "BGPCommunities",
    "BGPFamily",
    "BGPGracefulRestart",
    "BGPInstanceStatus",
    "BGPNegotiatedTimers",
    "BGPNodeConfigSpec",
    "BGPNodeConfigStatus",
    "BGPNodeInstance",
    "BGPNodePeer",
    "BGPOverrideInstance",
    "BGPPeerConfigRef",
    "BGPPeerConfigSpec",
    "BGPPeerStatus",
    "BGPRouteCount",
    "BGPTimers",
    "BGPTransport",
    "CiliumBGPAdvertisement",
    "CiliumBGPClusterConfig",
    "CiliumBGPNodeConfig",
    "CiliumBGPNodeConfigOverride",
    "CiliumBGPPeerConfig",
    "CiliumBGPPeeringPolicy",
]

AFIS: Final = ("ipv4", "ipv6", "l2vpn", "ls", "opaque")
SAFIS: Final = (
    *("unicast", "multicast", "mpls_label", "encapsulation", "vpls", "evpn", "ls", "sr_policy", "mup"),
    *("mpls_vpn", "mpls_vpn_multicast", "route_target_constraints"),
    *("flowspec_unicast", "flowspec_vpn", "key_value"),
)
"""SAFIs by their name in the resources (IANA, Address Family Numbers and SAFI)."""
COMMUNITIES: Final = {
    "internet": 0x00000000,
    "planned-shut": 0xFFFF0000,
    "accept-own": 0xFFFF0001,
    "route-filter-translated-v4": 0xFFFF0002,
    "route-filter-v4": 0xFFFF0003,
    "route-filter-translated-v6": 0xFFFF0004,
    "route-filter-v6": 0xFFFF0005,
    "llgr-stale": 0xFFFF0006,
    "no-llgr": 0xFFFF0007,
    "blackhole": 0xFFFF029A,
    "no-export": 0xFFFFFF01,
    "no-advertise": 0xFFFFFF02,
    "no-export-subconfed": 0xFFFFFF03,
    "no-peer": 0xFFFFFF04,
}
"""Communities by name (IANA, BGP Well-known Communities)."""

_OCTET: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"({_OCTET}\.){{3}}{_OCTET}"
_GROUP: Final = "[0-9A-Fa-f]{1,4}"
_IPV6: Final = "|".join(
    [
        rf"({_GROUP}:){{7}}({_GROUP}|:)",
        rf"({_GROUP}:){{6}}(:{_GROUP}|{_IPV4}|:)",
        *(
            rf"({_GROUP}:){{{before}}}((:{_GROUP}){{1,{7 - before}}}|(:{_GROUP}){{0,{5 - before}}}:{_IPV4}|:)"
            for before in range(5, 0, -1)
        ),
        rf":((:{_GROUP}){{1,7}}|(:{_GROUP}){{0,5}}:{_IPV4}|:)",
    ]
)
_U16: Final = r"([0-9]|[1-9][0-9]{1,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_U32: Final = (
    r"([0-9]|[1-9][0-9]{1,8}|[1-3][0-9]{9}|4[01][0-9]{8}|42[0-8][0-9]{7}|429[0-3][0-9]{6}|4294[0-8][0-9]{5}"
    r"|42949[0-5][0-9]{4}|429496[0-6][0-9]{3}|4294967[01][0-9]{2}|42949672[0-8][0-9]|429496729[0-5])"
)


def _schema(**more: Any) -> Limits:
    return Limits(extra_json_schema=more)


def _int32(least: int, most: int, **more: Any) -> Limits:
    return _schema(format="int32", minimum=least, maximum=most, **more)


_BY_NAME: Final = _schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})
_BY_NAME_SOME: Final = _schema(
    **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "minItems": 1}
)
_BY_NAME_FEW: Final = _schema(
    **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "minItems": 1, "maxItems": 16}
)
_Name = Annotated[str, _schema(minLength=1, maxLength=255)]
_Address = Annotated[str, _schema(pattern=rf"^\s*({_IPV4}|({_IPV6})(%.+)?)\s*$")]
_RouterID = Annotated[str, _schema(format="ipv4")]
_LocalASN = Annotated[int, _schema(format="int64", minimum=1, maximum=4294967295)]
_PeerASN = Annotated[int, _schema(format="int64", minimum=0, maximum=4294967295)]
_ClusterPeerASN = Annotated[int, _schema(format="int64", minimum=0, maximum=4294967295, default=0)]
_Int32 = Annotated[int, _schema(format="int32")]
_Int64 = Annotated[int, _schema(format="int64")]
_Port = Annotated[int, _int32(1, 65535)]
_PeerPort = Annotated[int, _int32(1, 65535, default=179)]
_ConnectRetry = Annotated[int, _int32(1, 2147483647, default=120)]
_HoldTime = Annotated[int, _int32(3, 65535, default=90)]
_KeepAlive = Annotated[int, _int32(1, 65535, default=30)]
_Multihop = Annotated[int, _int32(1, 255, default=1)]
_AFI = Annotated[str, _schema(enum=list(AFIS))]
_SAFI = Annotated[str, _schema(enum=list(SAFIS))]
_Standard = Annotated[str, _schema(pattern=rf"^{_U32}$|^{_U16}:{_U16}$")]
_Large = Annotated[str, _schema(pattern=rf"^{_U32}:{_U32}:{_U32}$")]
_WellKnown = Annotated[str, _schema(enum=list(COMMUNITIES))]
_ServiceAddress = Literal["LoadBalancerIP", "ClusterIP", "ExternalIP"]


# CiliumBGPClusterConfig: instances of nodes, and their peers.


class BGPPeerConfigRef(ObjectPart, frozen=True, gc=False):
    """Reference to a CiliumBGPPeerConfig by name; group and kind are ignored."""

    name: str
    group: Annotated[str, _schema(default="cilium.io")] = ""
    kind: Annotated[str, _schema(default="CiliumBGPPeerConfig")] = ""


class BGPClusterPeer(ObjectPart, frozen=True, gc=False):
    """A peer of an instance; None and an empty text mean that a field is not set."""

    name: _Name
    peer_address: _Address = ""
    peer_asn: _ClusterPeerASN | None = field(name="peerASN", default=None)
    """0: any ASN, which the peer's OPEN message has."""
    peer_config_ref: BGPPeerConfigRef | None = None


class BGPClusterInstance(ObjectPart, frozen=True, gc=False):
    """A BGP router that each selected node runs."""

    name: _Name
    local_asn: _LocalASN = field(name="localASN", default=0)
    peers: Annotated[tuple[BGPClusterPeer, ...] | None, _BY_NAME] = None


class BGPClusterConfigSpec(ObjectPart, frozen=True, gc=False):
    """Instances, and the nodes that run them: all nodes without a selector."""

    bgp_instances: Annotated[tuple[BGPClusterInstance, ...], _BY_NAME_FEW]
    node_selector: LabelSelector | None = None


class BGPConditions(ObjectPart, frozen=True, gc=False):
    """Status of a ClusterConfig or a PeerConfig."""

    conditions: tuple[Condition, ...] | None = None


class CiliumBGPClusterConfig(Object, frozen=True, gc=False):
    """BGP routers of the nodes that it selects by labels of CiliumNodes."""

    metadata: PolicyMeta
    spec: BGPClusterConfigSpec
    status: BGPConditions = BGPConditions()


# CiliumBGPPeerConfig: settings of a session, and its advertisements.


class BGPTransport(ObjectPart, frozen=True, gc=False):
    """TCP ports of a session; local port 0 means any port."""

    local_port: _Port = 0
    peer_port: _PeerPort = 179


class BGPTimers(ObjectPart, frozen=True, gc=False):
    """Timers of a session, in seconds (RFC 4271, section 10)."""

    connect_retry_time_seconds: _ConnectRetry = 120
    hold_time_seconds: _HoldTime = 90
    keep_alive_time_seconds: _KeepAlive = 30


class BGPGracefulRestart(ObjectPart, frozen=True, gc=False):
    """How long a peer keeps the routes of a speaker that restarts, in seconds (RFC 4724)."""

    enabled: bool
    restart_time_seconds: Annotated[int, _int32(1, 4095, default=120)] = 120


class BGPFamily(ObjectPart, frozen=True, gc=False):
    """A family of a session, and a selector of CiliumBGPAdvertisements: none without a selector."""

    afi: _AFI
    safi: _SAFI
    advertisements: LabelSelector | None = None


class BGPPeerConfigSpec(ObjectPart, frozen=True, gc=False):
    """Settings of a session; without families it has IPv4 and IPv6 unicast, and advertises nothing."""

    transport: BGPTransport | None = None
    timers: BGPTimers | None = None
    auth_secret_ref: str | None = None
    graceful_restart: BGPGracefulRestart | None = None
    ebgp_multihop: _Multihop = 1
    families: tuple[BGPFamily, ...] | None = None


class CiliumBGPPeerConfig(Object, frozen=True, gc=False):
    """Settings of sessions with all peers that refer to it."""

    metadata: PolicyMeta
    spec: BGPPeerConfigSpec
    status: BGPConditions = BGPConditions()


# CiliumBGPAdvertisement: advertised routes and their attributes.


class BGPCommunities(ObjectPart, frozen=True, gc=False):
    """Communities that are added to routes (RFC 1997, RFC 8092)."""

    standard: tuple[_Standard, ...] | None = None
    well_known: tuple[_WellKnown, ...] | None = None
    large: tuple[_Large, ...] | None = None


class BGPAttributes(ObjectPart, frozen=True, gc=False):
    """Attributes of routes; the local preference is sent to peers of the same AS only."""

    communities: BGPCommunities | None = None
    local_preference: _Int64 | None = None


class BGPServiceAddresses(ObjectPart, frozen=True, gc=False):
    """The types of service addresses that are advertised."""

    addresses: Annotated[tuple[_ServiceAddress, ...], Limits(min_length=1)] | None = None


class BGPAdvertisement(ObjectPart, frozen=True, gc=False):
    """One type of routes; the selector selects pools or services, none without a selector."""

    advertisement_type: Literal["PodCIDR", "CiliumPodIPPool", "Service"]
    service: BGPServiceAddresses | None = None
    selector: LabelSelector | None = None
    attributes: BGPAttributes | None = None


class BGPAdvertisementSpec(ObjectPart, frozen=True, gc=False):
    """Advertised routes."""

    advertisements: tuple[BGPAdvertisement, ...]


class CiliumBGPAdvertisement(Object, frozen=True, gc=False):
    """Advertised routes; families of peers select the object by its labels."""

    spec: BGPAdvertisementSpec


# CiliumBGPNodeConfigOverride and CiliumBGPNodeConfig: both are named after a node.


class BGPOverridePeer(ObjectPart, frozen=True, gc=False):
    """A node's overrides for a peer. Cilium 1.17 also ignores the local port here."""

    name: _Name
    local_address: _Address = ""
    local_port: _Int32 = 0


class BGPOverrideInstance(ObjectPart, frozen=True, gc=False):
    """A node's overrides for an instance."""

    name: _Name
    router_id: _RouterID = field(name="routerID", default="")
    local_asn: _LocalASN = field(name="localASN", default=0)
    """0: the cluster's."""
    local_port: _Int32 = 0
    peers: Annotated[tuple[BGPOverridePeer, ...] | None, _BY_NAME] = None


class BGPNodeConfigOverrideSpec(ObjectPart, frozen=True, gc=False):
    """A node's overrides."""

    bgp_instances: Annotated[tuple[BGPOverrideInstance, ...], _BY_NAME_SOME]


class CiliumBGPNodeConfigOverride(Object, frozen=True, gc=False):
    """Overrides of a CiliumBGPClusterConfig for the node of this name."""

    spec: BGPNodeConfigOverrideSpec


class BGPNodePeer(ObjectPart, frozen=True, gc=False):
    """A peer of a node's instance."""

    name: str
    peer_address: _Address = ""
    peer_asn: _PeerASN | None = field(name="peerASN", default=None)
    local_address: _Address = ""
    peer_config_ref: BGPPeerConfigRef | None = None


class BGPNodeInstance(ObjectPart, frozen=True, gc=False):
    """A BGP router of a node. It listens if it has a local port, and derives its router ID if it has none."""

    name: _Name
    local_asn: _LocalASN = field(name="localASN", default=0)
    router_id: _RouterID = field(name="routerID", default="")
    local_port: _Port = 0
    peers: Annotated[tuple[BGPNodePeer, ...] | None, _BY_NAME] = None


class BGPNodeConfigSpec(ObjectPart, frozen=True, gc=False):
    """The instances of a node."""

    bgp_instances: Annotated[tuple[BGPNodeInstance, ...], _BY_NAME_FEW]


class BGPRouteCount(ObjectPart, frozen=True, gc=False):
    """Number of routes of a family in a session."""

    afi: _AFI
    safi: _SAFI
    received: _Int32 | None = None
    advertised: _Int32 | None = None


class BGPNegotiatedTimers(ObjectPart, frozen=True, gc=False):
    """Negotiated timers, in seconds; 0 before the session is established."""

    applied_hold_time_seconds: _Int32 | None = None
    applied_keepalive_seconds: _Int32 | None = None


class BGPPeerStatus(ObjectPart, frozen=True, gc=False):
    """State of a session."""

    name: str
    peer_address: str
    peer_asn: _Int64 | None = field(name="peerASN", default=None)
    peering_state: str | None = None
    timers: BGPNegotiatedTimers | None = None
    established_time: str | None = None
    route_count: tuple[BGPRouteCount, ...] | None = None


class BGPInstanceStatus(ObjectPart, frozen=True, gc=False):
    """State of an instance."""

    name: str
    local_asn: _Int64 | None = field(name="localASN", default=None)
    peers: Annotated[tuple[BGPPeerStatus, ...] | None, _BY_NAME] = None


class BGPNodeConfigStatus(ObjectPart, frozen=True, gc=False):
    """State of a node's instances, written by its agent."""

    bgp_instances: Annotated[tuple[BGPInstanceStatus, ...] | None, _BY_NAME] = None


class CiliumBGPNodeConfig(Object, frozen=True, gc=False):
    """BGP routers of the node of this name: the operator writes the spec, the agent the status."""

    spec: BGPNodeConfigSpec
    status: BGPNodeConfigStatus = BGPNodeConfigStatus()


# CiliumBGPPeeringPolicy: the older resource.


class BGPPathAttributes(ObjectPart, frozen=True, gc=False):
    """Attributes of some routes to a neighbor."""

    selector_type: Literal["PodCIDR", "CiliumLoadBalancerIPPool", "CiliumPodIPPool"]
    selector: LabelSelector | None = None
    communities: BGPCommunities | None = None
    local_preference: Annotated[int, _schema(format="int64", minimum=0, maximum=4294967295)] | None = None


class BGPNeighborFamily(ObjectPart, frozen=True, gc=False):
    """A family of a session with a neighbor."""

    afi: _AFI
    safi: _SAFI


class BGPNeighbor(ObjectPart, frozen=True, gc=False):
    """A peer, its address as a prefix."""

    peer_address: Annotated[str, _schema(format="cidr")]
    peer_asn: _PeerASN = field(name="peerASN")
    peer_port: _PeerPort = 179
    auth_secret_ref: str | None = None
    ebgp_multihop_ttl: _Multihop = field(name="eBGPMultihopTTL", default=1)
    connect_retry_time_seconds: _ConnectRetry = 120
    hold_time_seconds: _HoldTime = 90
    keep_alive_time_seconds: _KeepAlive = 30
    graceful_restart: BGPGracefulRestart | None = None
    families: tuple[BGPNeighborFamily, ...] | None = None
    advertised_path_attributes: tuple[BGPPathAttributes, ...] | None = None


class BGPVirtualRouter(ObjectPart, frozen=True, gc=False):
    """A router and its neighbors."""

    local_asn: _PeerASN = field(name="localASN")
    neighbors: Annotated[tuple[BGPNeighbor, ...], Limits(min_length=1)]
    export_pod_cidr: Annotated[bool, _schema(default=False)] = field(name="exportPodCIDR", default=False)
    pod_ip_pool_selector: LabelSelector | None = field(name="podIPPoolSelector", default=None)
    service_selector: LabelSelector | None = None
    service_advertisements: Annotated[
        tuple[_ServiceAddress, ...] | None, _schema(default=["LoadBalancerIP"])
    ] = None


class BGPPeeringPolicySpec(ObjectPart, frozen=True, gc=False):
    """Routers of the selected nodes; of all nodes without a selector."""

    virtual_routers: Annotated[tuple[BGPVirtualRouter, ...], Limits(min_length=1)]
    node_selector: LabelSelector | None = None


class CiliumBGPPeeringPolicy(Object, frozen=True, gc=False):
    """The older BGP resource; it is defined so that agents can reject it."""

    spec: BGPPeeringPolicySpec | None = None


def _kind(struct: type[Any], plural: str, short: str, *, status: bool = False) -> Kind[Any]:
    return Kind(
        struct,
        "cilium.io/v2alpha1",
        plural,
        namespaced=False,
        short=(short,),
        categories=("cilium", "ciliumbgp"),
        columns=(AGE,),
        status=status,
    )


CILIUM_BGP_CLUSTER_CONFIGS: Final[Kind[CiliumBGPClusterConfig]] = _kind(
    CiliumBGPClusterConfig, "ciliumbgpclusterconfigs", "cbgpcluster", status=True
)
CILIUM_BGP_PEER_CONFIGS: Final[Kind[CiliumBGPPeerConfig]] = _kind(
    CiliumBGPPeerConfig, "ciliumbgppeerconfigs", "cbgppeer", status=True
)
CILIUM_BGP_ADVERTISEMENTS: Final[Kind[CiliumBGPAdvertisement]] = _kind(
    CiliumBGPAdvertisement, "ciliumbgpadvertisements", "cbgpadvert"
)
CILIUM_BGP_NODE_CONFIGS: Final[Kind[CiliumBGPNodeConfig]] = _kind(
    CiliumBGPNodeConfig, "ciliumbgpnodeconfigs", "cbgpnode", status=True
)
CILIUM_BGP_NODE_CONFIG_OVERRIDES: Final[Kind[CiliumBGPNodeConfigOverride]] = _kind(
    CiliumBGPNodeConfigOverride, "ciliumbgpnodeconfigoverrides", "cbgpnodeoverride"
)
CILIUM_BGP_PEERING_POLICIES: Final[Kind[CiliumBGPPeeringPolicy]] = _kind(
    CiliumBGPPeeringPolicy, "ciliumbgppeeringpolicies", "bgpp"
)
CILIUM_BGP_KINDS: Final = (
    CILIUM_BGP_CLUSTER_CONFIGS,
    CILIUM_BGP_PEER_CONFIGS,
    CILIUM_BGP_ADVERTISEMENTS,
    CILIUM_BGP_NODE_CONFIGS,
    CILIUM_BGP_NODE_CONFIG_OVERRIDES,
    CILIUM_BGP_PEERING_POLICIES,
)
