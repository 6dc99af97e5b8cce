"""Wire types besides endpoints: policies, services, local redirects, identities, prefixes, maps, nodes."""

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
    """One label of a rule."""

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
    """An answer of DNS to an endpoint, or an address it is connected to after that has ended."""

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
    """A selector of names, and the expression that names must match."""

    selector_string: str = field(name="selectorString")
    regex_string: str = field(name="regexString")


class NameManager(Model, frozen=True, omit_defaults=False, rename=None):
    """The names that policies speak of."""

    poll_names: list[str] = field(default_factory=list, name="DNSPollNames")
    selectors: list[FQDNSelectorEntry] = field(default_factory=list, name="FQDNPolicySelectors")


# The wire types of services.
#
# Source: Cilium 1.17, api/v1/openapi.yaml, Service.


class FrontendAddress(Model, frozen=True):
    """Where a service is reached; who only sets states of backends leaves it empty."""

    ip: str = ""
    port: int = 0
    protocol: str = ""
    scope: str = ""


class BackendAddress(Model, frozen=True):
    """Who serves it."""

    ip: str
    node_name: str = field(name="nodeName", default="")
    port: int | None = None
    preferred: bool = False
    protocol: str = ""
    state: str = ""
    weight: int | None = None
    zone: str = ""


class ServiceFlags(Model, frozen=True):
    """How it is served."""

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
    """A service: one address, its backends."""

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
    """A service, and what has become of it."""

    spec: ServiceSpecModel
    status: ServiceStatusModel


# The wire types of local redirect policies.
#
# Source: Cilium 1.17, api/v1/openapi.yaml, LRPSpec.


class LRPBackend(Model, frozen=True):
    """A pod, and where it serves."""

    backend_address: BackendAddress
    pod_id: str = ""


class FrontendMapping(Model, frozen=True):
    """An address and who serves it instead."""

    frontend_address: FrontendAddress
    backends: tuple[LRPBackend, ...] = ()


class LRPSpec(Model, frozen=True):
    """A policy."""

    uid: str = ""
    name: str = ""
    namespace: str = ""
    frontend_type: str = ""
    lrp_type: str = ""
    service_id: str = ""
    frontend_mappings: tuple[FrontendMapping, ...] = field(default=())


class IdentityEndpoints(Model, frozen=True):
    """An identity, and how many endpoints of this node have it."""

    identity: IdentityModel
    ref_count: int = field(default=0, name="refCount")


class IPListMetadata(Model, frozen=True):
    """The source that named the owner of a prefix; the pod, if it is one's."""

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
    """A row of a map in words; ``desired-action`` is what is still to be done with it."""

    key: str
    value: str
    desired_action: str = "sync"
    last_error: str = ""


class BPFMap(Model, frozen=True):
    """A map; ``cache`` is absent if the datapath writes the map, or there is no copy of it."""

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
    """Absent for a client that gave none."""
    nodes_added: list[NodeElement] | None = None
    nodes_removed: list[NodeElement] | None = None


class NodeID(Model, frozen=True, omit_defaults=False):
    """The number a node has in the datapath; 0 is this one."""

    id: int
    ips: list[str]


class CgroupContainer(Model, frozen=True):
    """A container's control group."""

    cgroup_id: int = 0
    cgroup_path: str = ""


class CgroupPod(Model, frozen=True):
    """A pod's control groups."""

    name: str = ""
    namespace: str = ""
    ips: list[str] = field(default_factory=list)
    containers: list[CgroupContainer] = field(default_factory=list)


class CgroupDumpMetadata(Model, frozen=True, omit_defaults=False):
    """The control groups of pods."""

    pod_metadatas: list[CgroupPod] = field(default_factory=list)


class BgpPeerFamily(Model, frozen=True):
    """A family of a session, and how many routes it has."""

    afi: str
    safi: str
    received: int = 0
    accepted: int = 0
    advertised: int = 0


class BgpGracefulRestart(Model, frozen=True):
    """Whether a peer is to keep routes while there is no session, and how long."""

    enabled: bool = False
    restart_time_seconds: int = 0


class BgpPeer(Model, frozen=True):
    """A session: as it is configured, and as it is."""

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
    """Why it is not established; Cilium has no such field."""
    isolated_since: str = ""
    """When it got a gobgpd of its own (RFC 3339); Cilium has no such field."""
    speaker_crashes: int = 0
    """Of this gobgpd, lately; Cilium has no such field."""


class BgpFamily(Model, frozen=True):
    """A family of routes."""

    afi: str
    safi: str


class BgpWire(Model, frozen=True):
    """What is as on the wire, in base64."""

    base64: str


class BgpPath(Model, frozen=True):
    """A way to a prefix."""

    family: BgpFamily
    nlri: BgpWire
    path_attributes: list[BgpWire]
    age_nanoseconds: int = 0
    best: bool = False
    stale: bool = False


class BgpRoute(Model, frozen=True):
    """A prefix with the ways to it."""

    router_asn: int
    prefix: str
    paths: list[BgpPath]
    neighbor: str = ""
    """Of the tables of peers alone."""


class BgpPrefixMatch(Model, frozen=True, omit_defaults=False):
    """Prefixes within a network."""

    cidr: str
    prefix_len_min: int
    prefix_len_max: int


class BgpStatement(Model, frozen=True, omit_defaults=False):
    """What is done with routes that match; what is absent is null."""

    match_neighbors: list[str] | None
    match_prefixes: list[BgpPrefixMatch]
    route_action: str
    add_communities: list[str] | None
    add_large_communities: list[str] | None
    set_local_preference: int = -1
    """-1: none."""


class BgpRoutePolicy(Model, frozen=True):
    """A policy of a router."""

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
