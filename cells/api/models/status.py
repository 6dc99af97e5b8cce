"""Wire types of GET /healthz: Cilium's StatusResponse, limited to what this agent has.

Features that the agent does not have are absent: clients print them as disabled, or not at all. ``modules``
is ours; Cilium's clients ignore it. ProxyReplacementFeatures must be complete, as cilium-dbg reads its
members without a check.
"""

from __future__ import annotations

from msgspec import field

from cells.api.models import (
    ControllerStatus,
    Model,
    MonitorStatus,
    NodeAddressing,
    NodeAddressingElement,
    Time,
)


class Status(Model, frozen=True):
    """State of a component, Ok, Warning, Failure or Disabled, and a text for people."""

    state: str = ""
    msg: str = ""


class KubernetesStatus(Status, frozen=True):
    """State of the API server, and the watched kinds: ``cilium/v2::CiliumNode``, ``core/v1::Pods``."""

    k8s_api_versions: tuple[str, ...] = ()


class Mode(Model, frozen=True):
    """A component that has only a mode: chaining, clock source."""

    mode: str = ""


class WireguardPeerStatus(Model, frozen=True):
    """A peer of the WireGuard device; bytes sent and received."""

    public_key: str = ""
    endpoint: str = ""
    last_handshake_time: str = ""
    allowed_ips: list[str] = field(default_factory=list)
    transfer_tx: int = 0
    transfer_rx: int = 0


class WireguardInterface(Model, frozen=True):
    """A WireGuard device; its peers are only in /debuginfo."""

    name: str = ""
    listen_port: int = 0
    public_key: str = ""
    peer_count: int = 0
    peers: list[WireguardPeerStatus] = field(default_factory=list)


class WireguardStatus(Model, frozen=True):
    """WireGuard on this node. ``node-encryption``: Disabled, Enabled or OptedOut."""

    node_encryption: str = ""
    interfaces: list[WireguardInterface] = field(default_factory=list)


class EncryptionStatus(Model, frozen=True):
    """Encryption of traffic between nodes. In mode Wireguard, Cilium's clients require ``wireguard``."""

    mode: str = ""
    msg: str = ""
    wireguard: WireguardStatus | None = None


class HostFirewall(Model, frozen=True):
    """Whether the host firewall is enabled, and its devices."""

    mode: str = ""
    devices: list[str] = field(default_factory=list)


class Switch(Model, frozen=True):
    """A component that is only enabled or disabled."""

    enabled: bool = False


class BigTcpStatus(Model, frozen=True):
    """Packets above 64 KiB of one address family, and their maximum sizes in bytes."""

    enabled: bool = False
    max_gro: int = field(default=0, name="maxGRO")
    max_gso: int = field(default=0, name="maxGSO")


class MasqueradedProtocols(Model, frozen=True):
    """Address families that are masqueraded."""

    ipv4: bool = False
    ipv6: bool = False


class Masquerading(Model, frozen=True):
    """Masquerading of pods' addresses, and the destinations without it."""

    enabled: bool = False
    mode: str = ""
    enabled_protocols: MasqueradedProtocols | None = field(default=None, name="enabledProtocols")
    ip_masq_agent: bool = field(default=False, name="ip-masq-agent")
    snat_exclusion_cidr: str = field(default="", name="snat-exclusion-cidr")
    snat_exclusion_cidr_v4: str = field(default="", name="snat-exclusion-cidr-v4")
    snat_exclusion_cidr_v6: str = field(default="", name="snat-exclusion-cidr-v6")


class NodeElement(Model, frozen=True):
    """A node of the cluster as this agent sees it; the name is ``cluster/node``."""

    name: str = ""
    primary_address: NodeAddressing | None = None
    secondary_addresses: list[NodeAddressingElement] | None = None
    health_endpoint_address: NodeAddressing | None = None
    ingress_address: NodeAddressing | None = None
    source: str = ""


class ClusterStatus(Model, frozen=True):
    """This node and its cluster."""

    self_name: str = field(default="", name="self")
    cilium_health: Status | None = field(default=None, name="ciliumHealth")
    nodes: list[NodeElement] = field(default_factory=list)


class IPAMStatus(Model, frozen=True):
    """Allocated addresses and their owners."""

    status: str = ""
    allocations: dict[str, str] = field(default_factory=dict)
    ipv4: list[str] = field(default_factory=list)
    ipv6: list[str] = field(default_factory=list)


class ModuleHealth(Model, frozen=True):
    """Health of a module of the agent: OK, Degraded, Stopped or Unknown."""

    module_id: str = ""
    level: str = ""
    message: str = ""
    last_updated: Time = ""


class BPFMapProperties(Model, frozen=True):
    """Name and capacity of a kind of BPF map."""

    name: str = ""
    size: int = 0


class BPFMapStatus(Model, frozen=True):
    """The agent's BPF maps."""

    maps: list[BPFMapProperties] = field(default_factory=list)
    dynamic_size_ratio: float = 0.0


class IdentityRange(Model, frozen=True):
    """The range from which this agent allocates identities."""

    min_identity: int = 0
    max_identity: int = 0


class Routing(Model, frozen=True):
    """The routing modes between nodes and inside a node."""

    inter_host_routing_mode: str = ""
    intra_host_routing_mode: str = ""
    tunnel_protocol: str = ""


class ProxyReplacementDevice(Model, frozen=True):
    """A native device and its addresses."""

    name: str = ""
    ip: list[str] = field(default_factory=list)


class NodePortFeature(Model, frozen=True):
    """How services are reached from outside the cluster."""

    enabled: bool = False
    mode: str = ""
    algorithm: str = ""
    acceleration: str = ""
    port_min: int = field(default=0, name="portMin")
    port_max: int = field(default=0, name="portMax")
    lut_size: int = field(default=0, name="lutSize")


class ProxyReplacementFeatures(Model, frozen=True):
    """Service features; cilium-dbg dereferences every one of them, enabled or not."""

    node_port: NodePortFeature = field(name="nodePort")
    host_port: Switch = field(name="hostPort")
    external_ips: Switch = field(name="externalIPs")
    socket_lb: Switch = field(name="socketLB")
    socket_lb_tracing: Switch = field(name="socketLBTracing")
    session_affinity: Switch = field(name="sessionAffinity")
    graceful_termination: Switch = field(name="gracefulTermination")
    nat46x64: Switch = field(name="nat46X64")
    annotations: list[str] = field(default_factory=list)
    """Supported annotations of services."""


class ProxyReplacement(Model, frozen=True):
    """State of the kube-proxy replacement; ``devices`` and ``deviceList`` are equally long."""

    mode: str
    features: ProxyReplacementFeatures
    devices: list[str] = field(default_factory=list)
    device_list: list[ProxyReplacementDevice] = field(default_factory=list, name="deviceList")
    direct_routing_device: str = field(default="", name="directRoutingDevice")


class ProxyRedirect(Model, frozen=True):
    """A redirect of connections to a proxy, by policies."""

    name: str
    proxy: str
    proxy_port: int


class ProxyStatus(Model, frozen=True):
    """The layer 7 proxy and its redirects; if absent, clients assume that layer 7 rules are refused."""

    ip: str = ""
    port_range: str = ""
    total_ports: int = 0
    total_redirects: int = 0
    envoy_deployment_mode: str = ""
    """``embedded``: the agent runs Envoy; ``external``: Envoy runs outside the agent."""
    redirects: list[ProxyRedirect] = field(default_factory=list)


class HubbleObserver(Model, frozen=True):
    """Fill level of Hubble's ring."""

    current_flows: int = 0
    max_flows: int = 0
    seen_flows: int = 0
    uptime: str = ""
    """A Go duration such as ``1h0m0s``: clients cannot decode an answer with a number here."""


class HubbleStatus(Status, frozen=True):
    """Hubble: Ok, Disabled, or Warning if relays cannot be served."""

    observer: HubbleObserver | None = None
    metrics: Status | None = None
    """Metrics of flows: Ok if they are served, or Disabled."""


class RemoteClusterConfiguration(Model, frozen=True):
    """The configuration that a remote cluster publishes."""

    required: bool = False
    retrieved: bool = False
    cluster_id: int = 0
    kvstoremesh: bool = False
    sync_canaries: bool = False
    service_exports_enabled: bool | None = None


class RemoteClusterSynced(Model, frozen=True):
    """Which initial lists of a remote cluster are complete."""

    nodes: bool = False
    services: bool = False
    endpoints: bool = False
    identities: bool = False


class RemoteClusterStatus(Model, frozen=True):
    """The connection to a remote cluster, and the number of objects received."""

    name: str
    ready: bool = False
    connected: bool = False
    status: str = ""
    config: RemoteClusterConfiguration | None = None
    num_nodes: int = 0
    num_shared_services: int = 0
    num_endpoints: int = 0
    num_identities: int = 0
    num_failures: int = 0
    last_failure: Time = ""
    synced: RemoteClusterSynced | None = None


class ClusterMeshStatus(Model, frozen=True):
    """Remote clusters, and the number of global services."""

    clusters: list[RemoteClusterStatus] = field(default_factory=list)
    num_global_services: int = 0


class StatusResponse(Model, frozen=True):
    """The answer to GET /healthz."""

    cilium: Status
    cluster: ClusterStatus | None = None
    stale: dict[str, Time] | None = None
    controllers: list[ControllerStatus] | None = None
    modules: list[ModuleHealth] | None = None
    node_monitor: MonitorStatus | None = field(default=None, name="nodeMonitor")
    cni_file: Status | None = None
    kvstore: Status | None = None
    kubernetes: KubernetesStatus | None = None
    kube_proxy_replacement: ProxyReplacement | None = None
    host_firewall: HostFirewall | None = None
    encryption: EncryptionStatus | None = None
    cni_chaining: Mode | None = None
    clock_source: Mode | None = None
    srv6: Switch | None = None
    ipv4_big_tcp: BigTcpStatus | None = None
    ipv6_big_tcp: BigTcpStatus | None = None
    bandwidth_manager: Switch | None = None
    masquerading: Masquerading | None = None
    proxy: ProxyStatus | None = None
    hubble: HubbleStatus | None = None
    cluster_mesh: ClusterMeshStatus | None = None
    routing: Routing | None = None
    datapath_mode: str = ""
    attach_mode: str = ""
    ipam: IPAMStatus | None = None
    identity_range: IdentityRange | None = None
    bpf_maps: BPFMapStatus | None = None
    auth_certificate_provider: Status | None = None
