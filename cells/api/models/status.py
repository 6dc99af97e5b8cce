"""The wire types of GET /healthz: Cilium's StatusResponse, as far as this agent has what it describes.

What the agent does not have at all has no field: clients print such lines as
disabled, or not at all. ``modules`` is ours, Cilium's clients skip it. Features below must be complete:
cilium-dbg reads each unchecked.
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
    """State of one part: Ok, Warning, Failure or Disabled, and a text for a person."""

    state: str = ""
    msg: str = ""


class KubernetesStatus(Status, frozen=True):
    """How the API server is, and which kinds are followed: ``cilium/v2::CiliumNode``, ``core/v1::Pods``."""

    k8s_api_versions: tuple[str, ...] = ()


class Mode(Model, frozen=True):
    """A part that is only in a mode: chaining, clock source."""

    mode: str = ""


class WireguardPeerStatus(Model, frozen=True):
    """Another node, as WireGuard's device has it; bytes sent and received."""

    public_key: str = ""
    endpoint: str = ""
    last_handshake_time: str = ""
    allowed_ips: list[str] = field(default_factory=list)
    transfer_tx: int = 0
    transfer_rx: int = 0


class WireguardInterface(Model, frozen=True):
    """A device of WireGuard's; its peers are in /debuginfo only."""

    name: str = ""
    listen_port: int = 0
    public_key: str = ""
    peer_count: int = 0
    peers: list[WireguardPeerStatus] = field(default_factory=list)


class WireguardStatus(Model, frozen=True):
    """WireGuard on this node: whether nodes themselves are encrypted (Disabled, Enabled, OptedOut)."""

    node_encryption: str = ""
    interfaces: list[WireguardInterface] = field(default_factory=list)


class EncryptionStatus(Model, frozen=True):
    """How traffic between nodes is encrypted. Cilium's clients need ``wireguard`` in that mode, if empty."""

    mode: str = ""
    msg: str = ""
    wireguard: WireguardStatus | None = None


class HostFirewall(Model, frozen=True):
    """Whether host endpoint is ready, host policy enforced, and on which devices."""

    mode: str = ""
    devices: list[str] = field(default_factory=list)


class Switch(Model, frozen=True):
    """A part that is only on or off."""

    enabled: bool = False


class BigTcpStatus(Model, frozen=True):
    """Packets above 64 KiB of one family, and the largest ones, in bytes."""

    enabled: bool = False
    max_gro: int = field(default=0, name="maxGRO")
    max_gso: int = field(default=0, name="maxGSO")


class MasqueradedProtocols(Model, frozen=True):
    """Families that leave with the node's address."""

    ipv4: bool = False
    ipv6: bool = False


class Masquerading(Model, frozen=True):
    """Translation of pods' addresses on the way out, and to where there is none."""

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
    """How one module of the agent is: OK, Degraded, Stopped or Unknown."""

    module_id: str = ""
    level: str = ""
    message: str = ""
    last_updated: Time = ""


class BPFMapProperties(Model, frozen=True):
    """Name and capacity of one kind of BPF map."""

    name: str = ""
    size: int = 0


class BPFMapStatus(Model, frozen=True):
    """The BPF maps the agent keeps."""

    maps: list[BPFMapProperties] = field(default_factory=list)
    dynamic_size_ratio: float = 0.0


class IdentityRange(Model, frozen=True):
    """Identities this agent may allocate."""

    min_identity: int = 0
    max_identity: int = 0


class Routing(Model, frozen=True):
    """How packets travel between nodes and inside one."""

    inter_host_routing_mode: str = ""
    intra_host_routing_mode: str = ""
    tunnel_protocol: str = ""


class ProxyReplacementDevice(Model, frozen=True):
    """An uplink and its addresses."""

    name: str = ""
    ip: list[str] = field(default_factory=list)


class NodePortFeature(Model, frozen=True):
    """How clients outside are served."""

    enabled: bool = False
    mode: str = ""
    algorithm: str = ""
    acceleration: str = ""
    port_min: int = field(default=0, name="portMin")
    port_max: int = field(default=0, name="portMax")
    lut_size: int = field(default=0, name="lutSize")


class ProxyReplacementFeatures(Model, frozen=True):
    """Service features; cilium-dbg dereferences every one of them, on or off."""

    node_port: NodePortFeature = field(name="nodePort")
    host_port: Switch = field(name="hostPort")
    external_ips: Switch = field(name="externalIPs")
    socket_lb: Switch = field(name="socketLB")
    socket_lb_tracing: Switch = field(name="socketLBTracing")
    session_affinity: Switch = field(name="sessionAffinity")
    graceful_termination: Switch = field(name="gracefulTermination")
    nat46x64: Switch = field(name="nat46X64")
    annotations: list[str] = field(default_factory=list)
    """Those of services that mean something."""


class ProxyReplacement(Model, frozen=True):
    """State of the kube-proxy replacement; ``devices`` and ``deviceList`` are equally long."""

    mode: str
    features: ProxyReplacementFeatures
    devices: list[str] = field(default_factory=list)
    device_list: list[ProxyReplacementDevice] = field(default_factory=list, name="deviceList")
    direct_routing_device: str = field(default="", name="directRoutingDevice")


class ProxyRedirect(Model, frozen=True):
    """Connections that a proxy reads, by policies."""

    name: str
    proxy: str
    proxy_port: int


class ProxyStatus(Model, frozen=True):
    """The proxy of layer 7 and its redirects; without one, clients expect that layer 7 rules are refused."""

    ip: str = ""
    port_range: str = ""
    total_ports: int = 0
    total_redirects: int = 0
    envoy_deployment_mode: str = ""
    """``embedded``: the agent runs Envoy; ``external``: it runs beside the agent."""
    redirects: list[ProxyRedirect] = field(default_factory=list)


class HubbleObserver(Model, frozen=True):
    """How full Hubble's ring is."""

    current_flows: int = 0
    max_flows: int = 0
    seen_flows: int = 0
    uptime: str = ""
    """As Go writes a duration, ``1h0m0s``: clients decode nothing of an answer with a number here."""


class HubbleStatus(Status, frozen=True):
    """Hubble: Ok, Disabled, or Warning while relays cannot be served."""

    observer: HubbleObserver | None = None
    metrics: Status | None = None
    """Whether metrics of flows are served: Ok, or Disabled."""


class RemoteClusterConfiguration(Model, frozen=True):
    """What a remote cluster announces of itself."""

    required: bool = False
    retrieved: bool = False
    cluster_id: int = 0
    kvstoremesh: bool = False
    sync_canaries: bool = False
    service_exports_enabled: bool | None = None


class RemoteClusterSynced(Model, frozen=True):
    """What has been listed of a remote cluster."""

    nodes: bool = False
    services: bool = False
    endpoints: bool = False
    identities: bool = False


class RemoteClusterStatus(Model, frozen=True):
    """The connection to a remote cluster, and how much is known of it."""

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
    """Remote clusters, and the services that are global."""

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
