"""The agent's status as wire models, and the interfaces to the views of node and status.

Cells contribute StatusSections that fill StatusFacts; ``node_view`` implements the interfaces.

Source: Cilium 1.17, StatusResponse of api/v1/openapi.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

import msgspec

from cells.api.models import ControllerCounts, ControllerStatus, MonitorStatus
from cells.api.models import status as wire
from cells.api.operations import config_mapping
from cells.api.operations.config_mapping import DATAPATH_MODE, NodeFacts
from cells.api.operations.endpoint_models import NEVER, controller, rfc3339
from cells.base.addresses import Family, IPAddress
from cells.cluster.identity.numbers import CLUSTER
from cells.datapath.settings import MonitorNotifications
from cells.observe.health import AgentStatus
from cells.services import LoadBalancerOptions
from lifecycle import HealthStatus

Source = TypeVar("Source")
Value = TypeVar("Value")


class Memo(Generic[Source, Value]):
    """Memoizes a value per object of a list; objects must be immutable."""

    def __init__(self, compute: Callable[[Source], Value]) -> None:
        self._compute = compute
        self._last: dict[int, tuple[Source, Value]] = {}
        """By id() of the source, which is unique because the source is stored as well."""

    def of(self, sources: Iterable[Source]) -> list[Value]:
        """Return the values of the sources, in order. Values of other sources are evicted."""
        last, self._last = self._last, {}
        for source in sources:
            found = last.get(id(source))
            self._last[id(source)] = (source, self._compute(source)) if found is None else found
        return [value for _, value in self._last.values()]


# Conversion of facts to StatusResponse.

LEVELS = {"ok": "OK", "degraded": "Degraded", "stopped": "Stopped", "unknown": "Unknown"}
DISABLED = wire.Status(state="Disabled")
NO_FLOWS = wire.HubbleStatus(state="Disabled")
FLOWS_NOT_SERVED = wire.HubbleStatus(state="Warning", msg="Server not initialized")
"""Message of Hubble's status if a TLS file is missing or invalid, or the server has not started."""
NO_KUBERNETES = wire.KubernetesStatus(state="Disabled")
OFF = wire.Switch()
NOT_ENCRYPTED = wire.EncryptionStatus(mode="Disabled")
NOT_MASQUERADED = wire.Masquerading()


ACCELERATIONS = {"disabled": "Disabled", "native": "Native", "best-effort": "Best-Effort"}


class ServiceFacts(msgspec.Struct, frozen=True):
    """Service features in use, in the terms of the kube-proxy replacement."""

    options: LoadBalancerOptions
    replaces_kube_proxy: bool
    """Whether the agent replaces kube-proxy completely."""
    sockets: bool
    """Whether socket LB is enabled."""
    direct_routing_device: str
    acceleration: str = "disabled"
    """The value of bpf-lb-acceleration."""


NOTHING = LoadBalancerOptions(
    enable_node_port=False,
    enable_external_ips=False,
    enable_host_port=False,
    enable_session_affinity=False,
)
NOTHING_SERVED = ServiceFacts(NOTHING, replaces_kube_proxy=False, sockets=False, direct_routing_device="")


def proxy_replacement(facts: ServiceFacts, uplinks: Mapping[str, tuple[str, ...]]) -> wire.ProxyReplacement:
    """Return the status of the kube-proxy replacement."""
    options = facts.options
    node_port = wire.NodePortFeature()
    if options.enable_node_port:
        node_port = wire.NodePortFeature(
            enabled=True,
            mode=options.bpf_lb_mode.upper() if options.bpf_lb_mode != "hybrid" else "Hybrid",
            algorithm=options.bpf_lb_algorithm.capitalize(),
            acceleration=ACCELERATIONS.get(facts.acceleration, "Generic"),
            port_min=options.node_port_min,
            port_max=options.node_port_max,
            lut_size=options.bpf_lb_maglev_table_size if options.bpf_lb_algorithm == "maglev" else 0,
        )
    return wire.ProxyReplacement(
        mode="True" if facts.replaces_kube_proxy else "False",
        features=wire.ProxyReplacementFeatures(
            node_port=node_port,
            host_port=wire.Switch(options.enable_host_port),
            external_ips=wire.Switch(options.enable_external_ips),
            socket_lb=wire.Switch(facts.sockets),
            socket_lb_tracing=OFF,
            session_affinity=wire.Switch(options.enable_session_affinity),
            graceful_termination=wire.Switch(options.enable_k8s_terminating_endpoint),
            nat46x64=OFF,
            annotations=sorted(_annotations(options)),
        ),
        devices=list(uplinks),
        device_list=[
            wire.ProxyReplacementDevice(name=device, ip=list(addresses))
            for device, addresses in uplinks.items()
        ],
        direct_routing_device=facts.direct_routing_device if options.outside else "",
    )


def _annotations(options: LoadBalancerOptions) -> Iterator[str]:
    """Return the service annotations that the options enable."""
    names = {
        "type": options.enable_node_port,
        "node": options.enable_node_port,
        "node-selector": options.enable_node_port,
        "src-ranges-policy": options.enable_node_port and options.enable_svc_source_range_check,
        "lb-algorithm": options.enable_node_port and options.bpf_lb_algorithm_annotation,
        "forwarding-mode": options.enable_node_port and options.bpf_lb_mode_annotation,
    }
    return (f"service.cilium.io/{name}" for name, is_read in names.items() if is_read)


class StatusFacts(msgspec.Struct):
    """Input of the status except the overall health; sections fill it for each response."""

    version: str
    revision: str
    """The datapath's digest, which distinguishes builds of one version."""
    cluster_name: str
    node_name: str
    node: NodeFacts
    node_ips: Mapping[Family, IPAddress]
    """Node IPs of this node."""
    nodes: Sequence[wire.NodeElement]
    """Nodes of the cluster, including this one."""
    uplinks: Mapping[str, tuple[str, ...]]
    """Addresses by uplink."""
    identities: range = CLUSTER
    """Range of the identities of this cluster."""
    ipam_status: str = ""
    allocations: Mapping[str, str] = msgspec.field(default_factory=dict)
    map_sizes: Mapping[str, int] = msgspec.field(default_factory=dict)
    map_size_ratio: float = 0.0
    monitor: MonitorStatus | None = None
    """Perf buffers; None if the monitor is disabled."""
    kubernetes: wire.KubernetesStatus = NO_KUBERNETES
    """The state of the API server."""
    kvstore: wire.Status = DISABLED
    """The state of the kvstore."""
    masquerading: wire.Masquerading = NOT_MASQUERADED
    services: ServiceFacts = NOTHING_SERVED
    proxy: wire.ProxyStatus | None = None
    """The L7 proxy; None without one."""
    hubble: wire.HubbleStatus = NO_FLOWS
    cilium_health: wire.Status = DISABLED
    """State of the health probes between nodes."""
    encryption: wire.EncryptionStatus = NOT_ENCRYPTED
    """Encryption between nodes."""
    cluster_mesh: wire.ClusterMeshStatus | None = None
    """Remote clusters; None without a cluster mesh."""
    host_firewall: bool = False
    """Whether the host firewall is enabled."""
    host_routing: str = "Legacy"
    """Path of packets between devices and pods: BPF (bypasses the stack) or Legacy."""


class StatusSection(msgspec.Struct, frozen=True):
    """A cell's contribution to the status: ``fill`` sets its fields for each request."""

    fill: Callable[[StatusFacts], None]


def hubble_status(current: int, most: int, seen: int, uptime: int, *, metrics: bool) -> wire.HubbleStatus:
    """Return the fill level of Hubble's ring, its uptime in ns, and whether metrics are served."""
    minutes, seconds = divmod(uptime // 1_000_000_000, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
    observer = wire.HubbleObserver(current_flows=current, max_flows=most, seen_flows=seen, uptime=text)
    served = wire.Status(state="Ok") if metrics else DISABLED
    return wire.HubbleStatus(state="Ok", observer=observer, metrics=served)


def cilium_status(status: AgentStatus, version: str, revision: str) -> wire.Status:
    """Return the overall health.

    Tools parse the start of the message: ``<version> (v<version>-<revision>)``.
    """
    title = f"{version} (v{version}-{revision})"
    message = f"{title}    {status.message}" if status.message else title
    return wire.Status(state=status.state, msg=message)


def uncontrolled(module: HealthStatus) -> ControllerStatus:
    """Return a degraded module as a failing controller, because Cilium's clients do not show modules."""
    counts = ControllerCounts(
        consecutive_failure_count=1,
        failure_count=1,
        last_failure_msg=degraded_message(module),
        last_failure_timestamp=rfc3339(module.since),
        last_success_timestamp=NEVER,
    )
    return ControllerStatus(name=module.module, status=counts)


def module_health(module: HealthStatus) -> wire.ModuleHealth:
    """Return the last report of a module."""
    return wire.ModuleHealth(
        module_id=module.module,
        level=LEVELS[module.level],
        message=degraded_message(module),
        last_updated=rfc3339(module.since),
    )


def degraded_message(module: HealthStatus) -> str:
    """Return the message of a degraded module, with its error unless the message contains it."""
    if not module.error or module.error.partition(": ")[2] in module.message:
        return module.message or module.error or ""
    return f"{module.message}: {module.error}" if module.message else module.error


def brief_response(
    status: AgentStatus, health: wire.Status, version: str, revision: str
) -> wire.StatusResponse:
    """Return the response to a brief request: overall health, cilium-health, one failing controller."""
    failing = (controller(each) for each in status.controllers if each.failures_in_a_row)
    return wire.StatusResponse(
        cilium=cilium_status(status, version, revision),
        cluster=wire.ClusterStatus(cilium_health=health),
        stale=stale(status),
        controllers=list(islice(chain(failing, map(uncontrolled, status.uncontrolled)), 1)),
    )


def stale(status: AgentStatus) -> dict[str, str]:
    """Return the probes that do not respond, with the times since when."""
    return {name: rfc3339(since) for name, since in status.stale.items()}


def cni_file(status: AgentStatus) -> wire.Status:
    """Return the state of the CNI configuration file, from the module that writes it."""
    if status.cni_config is None:
        return DISABLED
    if status.cni_config.level == "degraded":
        return wire.Status(state="Failure", msg=degraded_message(status.cni_config))
    return wire.Status(state="Ok", msg=status.cni_config.message)


def _of(family: Family, addresses: Iterable[str]) -> list[str]:
    """Return the addresses of the family."""
    return [address for address in addresses if (":" in address) is (family is Family.IPV6)]


class StatusModels:
    """Builds models of controllers and modules; unchanged ones are reused from the last response."""

    def __init__(self) -> None:
        self.controllers = Memo(controller)
        self.modules = Memo(module_health)


def without_peers(encryption: wire.EncryptionStatus) -> wire.EncryptionStatus:
    """Return the encryption status without peers, which only /debuginfo shows."""
    wireguard = encryption.wireguard
    if wireguard is None:
        return encryption
    interfaces = [msgspec.structs.replace(each, peers=[]) for each in wireguard.interfaces]
    shown = msgspec.structs.replace(wireguard, interfaces=interfaces)
    return msgspec.structs.replace(encryption, wireguard=shown)


def status_response(
    status: AgentStatus, facts: StatusFacts, models: StatusModels, *, peers: bool = False
) -> wire.StatusResponse:
    """Return the complete status; ``peers`` includes the peers of the encryption.

    ``features`` is complete also without services, because ``cilium-dbg status --verbose`` dereferences every
    member.
    """
    name = f"{facts.cluster_name}/{facts.node_name}"
    limits = facts.node.limits
    return wire.StatusResponse(
        cilium=cilium_status(status, facts.version, facts.revision),
        cluster=wire.ClusterStatus(
            self_name=name,
            cilium_health=facts.cilium_health,
            nodes=list(facts.nodes),
        ),
        stale=stale(status),
        controllers=[*models.controllers.of(status.controllers), *map(uncontrolled, status.uncontrolled)],
        modules=models.modules.of(module for module in status.modules if module.level != "unknown"),
        node_monitor=facts.monitor,
        cni_file=cni_file(status),
        kvstore=facts.kvstore,
        kubernetes=facts.kubernetes,
        kube_proxy_replacement=proxy_replacement(facts.services, facts.uplinks),
        host_firewall=wire.HostFirewall(
            mode="Enabled" if facts.host_firewall else "Disabled",
            devices=sorted(facts.uplinks) if facts.host_firewall else [],
        ),
        encryption=facts.encryption if peers else without_peers(facts.encryption),
        cni_chaining=wire.Mode(mode=facts.node.chaining),
        clock_source=wire.Mode(mode="ktime"),
        srv6=OFF,
        ipv4_big_tcp=wire.BigTcpStatus(Family.IPV4 in facts.node.big_tcp, limits.gro_ipv4, limits.gso_ipv4),
        ipv6_big_tcp=wire.BigTcpStatus(Family.IPV6 in facts.node.big_tcp, limits.gro, limits.gso),
        bandwidth_manager=OFF,
        masquerading=facts.masquerading,
        proxy=facts.proxy,
        hubble=facts.hubble,
        cluster_mesh=facts.cluster_mesh,
        routing=wire.Routing(
            inter_host_routing_mode="Tunnel" if facts.node.tunnel_protocol else "Native",
            intra_host_routing_mode=facts.host_routing,
            tunnel_protocol=facts.node.tunnel_protocol,
        ),
        datapath_mode=DATAPATH_MODE,
        attach_mode="tc",
        ipam=wire.IPAMStatus(
            status=facts.ipam_status,
            allocations=dict(facts.allocations),
            ipv4=sorted(_of(Family.IPV4, facts.allocations)),
            ipv6=sorted(_of(Family.IPV6, facts.allocations)),
        ),
        identity_range=wire.IdentityRange(
            min_identity=facts.identities[0], max_identity=facts.identities[-1]
        ),
        bpf_maps=wire.BPFMapStatus(
            maps=[wire.BPFMapProperties(name=name, size=size) for name, size in facts.map_sizes.items()],
            dynamic_size_ratio=facts.map_size_ratio,
        ),
        auth_certificate_provider=DISABLED,
    )


# Interfaces.


class NodeSummary(Protocol):
    """Interface to the node's properties and options."""

    def node(self) -> config_mapping.NodeFacts:
        """Return routers, pod CIDRs and MTU."""
        ...

    def audited(self) -> bool:
        """Whether policies of this node are in audit mode: drops are only reported."""
        ...

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        """Select the packet notifications of the datapath. Raises OSError."""
        ...

    def log_debug(self, on: bool) -> None:
        """Enable or disable debug logging."""
        ...

    def settings(self) -> Mapping[str, object]:
        """Return the daemon's configuration."""
        ...


class StatusSummary(Protocol):
    """Interface to the agent's status except the overall health."""

    def version(self) -> tuple[str, str]:
        """Return the agent's version, and the digest of its datapath."""
        ...

    def status(self) -> StatusFacts:
        """Return the contents of GET /healthz except the overall health."""
        ...
