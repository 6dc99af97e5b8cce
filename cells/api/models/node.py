"""Wire types of policies, services, local redirects, identities, prefixes, maps, nodes and BGP."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from cells.api.models import EndpointModel, IdentityModel, Model, Time
from cells.api.models.status import NodeElement, StatusResponse

__all__ = [
    "BPFMap",
    "BPFMapEntry",
    "BPFMapList",
    "BackendAddress",
    "BgpFamily",
    "BgpGracefulRestart",
    "BgpPath",
    "BgpPeer",
    "BgpPeerFamily",
    "BgpPrefixMatch",
    "BgpRoute",
    "BgpRoutePolicy",
    "BgpStatement",
    "BgpWire",
    "CgroupContainer",
    "CgroupDumpMetadata",
    "CgroupPod",
    "ClusterNodeStatus",
    "DNSLookup",
    "DebugInfo",
    "FQDNSelectorEntry",
    "FrontendAddress",
    "FrontendMapping",
    "IPListEntry",
    "IPListMetadata",
    "IdentityEndpoints",
    "LRPBackend",
    "LRPSpec",
    "MapEvent",
    "NameManager",
    "NodeID",
    "Policy",
    "SelectorIdentityMapping",
    "SelectorLabel",
    "ServiceFlags",
    "ServiceModel",
    "ServiceRequest",
    "ServiceSpecModel",
    "ServiceStatusModel",
]


# The wire types of policies.


class Policy(Model, frozen=True, omit_defaults=False):
    """The policies in force, as JSON in a text."""

    policy: str = "[]"
    revision: int = 1


class SelectorLabel(Model, frozen=True, omit_defaults=False):
    """A label of a rule."""

    key: str
    value: str
    source: str


class SelectorIdentityMapping(Model, frozen=True, omit_defaults=False):
    """A selector in use, its identities, its number of users, and the labels of a rule that has it."""

    selector: str
    identities: list[int]
    users: int
    labels: list[SelectorLabel]


class DNSLookup(Model, frozen=True, omit_defaults=False):
    """An address that DNS returned to an endpoint; an expired one while the endpoint is connected to it."""

    fqdn: str
    ips: list[str]
    ttl: int
    """Seconds."""
    lookup_time: str
    expiration_time: str
    endpoint_id: int
    source: str
    """``lookup`` or ``connection``."""


class FQDNSelectorEntry(Model, frozen=True, omit_defaults=False, rename=None):
    """A selector of names, and the regular expression that names must match."""

    selector_string: str = field(name="selectorString")
    regex_string: str = field(name="regexString")


class NameManager(Model, frozen=True, omit_defaults=False, rename=None):
    """The names that policies select."""

    poll_names: list[str] = field(default_factory=list, name="DNSPollNames")
    selectors: list[FQDNSelectorEntry] = field(default_factory=list, name="FQDNPolicySelectors")


# The wire types of services.
#
# Source: Cilium 1.17, api/v1/openapi.yaml, Service.


class FrontendAddress(Model, frozen=True):
    """The address of a service; empty in requests that only set states of backends."""

    ip: str = ""
    port: int = 0
    protocol: str = ""
    scope: str = ""


class BackendAddress(Model, frozen=True):
    """A backend."""

    ip: str
    node_name: str = field(name="nodeName", default="")
    port: int | None = None
    preferred: bool = False
    protocol: str = ""
    state: str = ""
    weight: int | None = None
    zone: str = ""


class ServiceFlags(Model, frozen=True):
    """Type, policies and name of a service."""

    cluster: str = ""
    ext_traffic_policy: str = field(name="extTrafficPolicy", default="")
    health_check_node_port: int = field(name="healthCheckNodePort", default=0)
    int_traffic_policy: str = field(name="intTrafficPolicy", default="")
    name: str = ""
    namespace: str = ""
    nat_policy: str = field(name="natPolicy", default="")
    traffic_policy: str = field(name="trafficPolicy", default="")
    type: str = ""


class ServiceSpecModel(Model, frozen=True):
    """A service: one frontend address and its backends."""

    id: int
    frontend_address: FrontendAddress
    backend_addresses: tuple[BackendAddress, ...] = ()
    flags: ServiceFlags = ServiceFlags()


class ServiceRequest(Model, frozen=True):
    """A requested service, or states of backends in all services."""

    frontend_address: FrontendAddress
    id: int = 0
    backend_addresses: tuple[BackendAddress, ...] = ()
    flags: ServiceFlags = ServiceFlags()
    update_services: bool = field(name="updateServices", default=False)


class ServiceStatusModel(Model, frozen=True):
    """The service as the datapath has it."""

    realized: ServiceSpecModel


class ServiceModel(Model, frozen=True):
    """A service: the desired and the realized one."""

    spec: ServiceSpecModel
    status: ServiceStatusModel


# The wire types of local redirect policies.
#
# Source: Cilium 1.17, api/v1/openapi.yaml, LRPSpec.


class LRPBackend(Model, frozen=True):
    """A pod, and its backend address."""

    backend_address: BackendAddress
    pod_id: str = ""


class FrontendMapping(Model, frozen=True):
    """A frontend address, and the local pods that its traffic is redirected to."""

    frontend_address: FrontendAddress
    backends: tuple[LRPBackend, ...] = ()


class LRPSpec(Model, frozen=True):
    """A local redirect policy."""

    uid: str = ""
    name: str = ""
    namespace: str = ""
    frontend_type: str = ""
    lrp_type: str = ""
    service_id: str = ""
    frontend_mappings: tuple[FrontendMapping, ...] = field(default=())


class IdentityEndpoints(Model, frozen=True):
    """An identity, and the number of endpoints of this node that have it."""

    identity: IdentityModel
    ref_count: int = field(default=0, name="refCount")


class IPListMetadata(Model, frozen=True):
    """The source of the owner of a prefix, and the pod if a pod owns it."""

    source: str = ""
    namespace: str = ""
    name: str = ""


class IPListEntry(Model, frozen=True, omit_defaults=False):
    """A prefix and its owner."""

    cidr: str
    identity: int
    metadata: IPListMetadata
    host_ip: str = field(default="", name="hostIP")
    encrypt_key: int = field(default=0, name="encryptKey")


class BPFMapEntry(Model, frozen=True, omit_defaults=False):
    """An entry of a map as text; ``desired-action`` is the pending operation."""

    key: str
    value: str
    desired_action: str = "sync"
    last_error: str = ""


class BPFMap(Model, frozen=True):
    """A map; ``cache`` is absent if the datapath writes the map, or the agent has no copy of it."""

    path: str
    cache: list[BPFMapEntry] | None = None


class BPFMapList(Model, frozen=True):
    """The node's maps."""

    maps: list[BPFMap]


class MapEvent(Model, frozen=True, omit_defaults=False):
    """One change of a map by the agent."""

    timestamp: Time
    key: str
    value: str
    action: str
    desired_action: str = "sync"
    last_error: str = ""


class ClusterNodeStatus(Model, frozen=True, omit_defaults=False):
    """Nodes added and removed since the last request of the client."""

    self_name: str = field(name="self")
    client_id: int | UnsetType = UNSET
    """Absent if the request had none."""
    nodes_added: list[NodeElement] | None = None
    nodes_removed: list[NodeElement] | None = None


class NodeID(Model, frozen=True, omit_defaults=False):
    """The node ID of a node in the datapath; 0 is this node."""

    id: int
    ips: list[str]


class CgroupContainer(Model, frozen=True):
    """The control group of a container."""

    cgroup_id: int = 0
    cgroup_path: str = ""


class CgroupPod(Model, frozen=True):
    """The control groups of a pod."""

    name: str = ""
    namespace: str = ""
    ips: list[str] = field(default_factory=list)
    containers: list[CgroupContainer] = field(default_factory=list)


class CgroupDumpMetadata(Model, frozen=True, omit_defaults=False):
    """The control groups of pods."""

    pod_metadatas: list[CgroupPod] = field(default_factory=list)


class BgpPeerFamily(Model, frozen=True):
    """An address family of a session, and its numbers of routes."""

    afi: str
    safi: str
    received: int = 0
    accepted: int = 0
    advertised: int = 0


class BgpGracefulRestart(Model, frozen=True):
    """Whether, and how long, a peer keeps routes after the session is lost."""

    enabled: bool = False
    restart_time_seconds: int = 0


class BgpPeer(Model, frozen=True):
    """The configuration and the state of a session."""

    local_asn: int
    peer_asn: int
    peer_address: str
    session_state: str
    graceful_restart: BgpGracefulRestart
    peer_port: int = 0
    uptime_nanoseconds: int = 0
    families: list[BgpPeerFamily] = field(default_factory=list)
    tcp_password_enabled: bool = False
    ebgp_multihop_ttl: int = 0
    connect_retry_time_seconds: int = 0
    configured_hold_time_seconds: int = 0
    configured_keep_alive_time_seconds: int = 0
    applied_hold_time_seconds: int = 0
    applied_keep_alive_time_seconds: int = 0
    session_error: str = ""
    """Why the session is not established; Cilium has no such field."""
    isolated_since: str = ""
    """Time since which the peer has a gobgpd of its own (RFC 3339); Cilium has no such field."""
    speaker_crashes: int = 0
    """Recent crashes of this gobgpd; Cilium has no such field."""


class BgpFamily(Model, frozen=True):
    """An address family of routes."""

    afi: str
    safi: str


class BgpWire(Model, frozen=True):
    """Wire format, in base64."""

    base64: str


class BgpPath(Model, frozen=True):
    """A path to a prefix."""

    family: BgpFamily
    nlri: BgpWire
    path_attributes: list[BgpWire]
    age_nanoseconds: int = 0
    best: bool = False
    stale: bool = False


class BgpRoute(Model, frozen=True):
    """A prefix and its paths."""

    router_asn: int
    prefix: str
    paths: list[BgpPath]
    neighbor: str = ""
    """Only in tables of peers."""


class BgpPrefixMatch(Model, frozen=True, omit_defaults=False):
    """Prefixes within a network."""

    cidr: str
    prefix_len_min: int
    prefix_len_max: int


class BgpStatement(Model, frozen=True, omit_defaults=False):
    """What a policy does with matching routes; null if unset."""

    match_neighbors: list[str] | None
    match_prefixes: list[BgpPrefixMatch]
    route_action: str
    add_communities: list[str] | None
    add_large_communities: list[str] | None
    set_local_preference: int = -1
    """-1: unset."""


class BgpRoutePolicy(Model, frozen=True):
    """A route policy of a router."""

    router_asn: int
    name: str
    type: str
    statements: list[BgpStatement]


class DebugInfo(Model, frozen=True, omit_defaults=False):
    """Information for a bug report."""

    cilium_version: str
    kernel_version: str
    cilium_status: StatusResponse
    endpoint_list: list[EndpointModel]
    policy: Policy
    environment_variables: list[str]
    cilium_memory_map: str
    subsystem: dict[str, str]
    service_list: list[dict[str, str]] = field(default_factory=list)
    cilium_nodemonitor_memory_map: str = ""
