"""Nodes, namespaces, pods, Services, EndpointSlices and network policies.

Source: k8s.io/api/core/v1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import field

from cells.kubernetes.objects.kind import Condition, DatedMeta, Kind, Object, ObjectPart

__all__ = [
    "ENDPOINT_SLICES",
    "HEADLESS",
    "NAMESPACES",
    "NETWORK_POLICIES",
    "NODES",
    "PODS",
    "SERVICES",
    "SERVICE_TYPES",
    "ContainerPort",
    "EndpointConditions",
    "EndpointSlice",
    "Namespace",
    "NetworkPolicy",
    "Node",
    "Pod",
    "Service",
    "ServicePort",
    "SliceEndpoint",
    "served_by",
]


class Taint(ObjectPart, frozen=True, gc=False):
    """A taint, which keeps pods off a node."""

    key: str
    effect: str = ""
    value: str = ""


class NodeSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a node."""

    pod_cidr: str = field(name="podCIDR", default="")
    pod_cidrs: tuple[str, ...] | None = field(name="podCIDRs", default=None)
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeStatusAddress(ObjectPart, frozen=True, gc=False):
    """One address of a node: InternalIP, ExternalIP, Hostname."""

    type: str
    address: str


class NodeInfo(ObjectPart, frozen=True, gc=False):
    """The kubelet's report about its machine."""

    boot_id: str = field(name="bootID", default="")


class NodeStatus(ObjectPart, frozen=True, gc=False):
    """Status of a node."""

    addresses: tuple[NodeStatusAddress, ...] | None = None
    conditions: tuple[Condition, ...] | None = None
    node_info: NodeInfo = NodeInfo()


class Node(Object, frozen=True, gc=False):
    """A node of the cluster."""

    metadata: DatedMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(Object, frozen=True, gc=False):
    """A namespace; only its metadata is read."""


class ContainerPort(ObjectPart, frozen=True, gc=False):
    """A port that a container declares."""

    container_port: int
    name: str = ""
    protocol: str = "TCP"
    host_port: int = 0
    host_ip: str = field(name="hostIP", default="")


class Container(ObjectPart, frozen=True, gc=False):
    """The fields of a container that are read."""

    name: str
    ports: tuple[ContainerPort, ...] | None = None


class PodSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a pod."""

    node_name: str = ""
    host_network: bool = False
    service_account_name: str = ""
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None


class PodIP(ObjectPart, frozen=True, gc=False):
    """One address of a pod."""

    ip: str = ""


class PodCondition(ObjectPart, frozen=True, gc=False):
    """A condition of a pod; ``Ready`` means that services may send to it."""

    type: str = ""
    status: str = ""


class PodStatus(ObjectPart, frozen=True, gc=False):
    """Status of a pod."""

    phase: str = ""
    conditions: tuple[PodCondition, ...] | None = None
    pod_ip: str = field(name="podIP", default="")
    pod_ips: tuple[PodIP, ...] | None = field(name="podIPs", default=None)
    host_ip: str = field(name="hostIP", default="")
    qos_class: str = ""


class Pod(Object, frozen=True, gc=False):
    """A pod."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses; the primary family comes first."""
        found = tuple(one.ip for one in self.status.pod_ips or () if one.ip)
        return found or ((self.status.pod_ip,) if self.status.pod_ip else ())

    @property
    def named_ports(self) -> Iterator[ContainerPort]:
        """The named ports of its containers."""
        for container in (*(self.spec.init_containers or ()), *(self.spec.containers or ())):
            yield from (port for port in container.ports or () if port.name)

    @property
    def is_ready(self) -> bool:
        """Whether its condition ``Ready`` is True."""
        return any(one.type == "Ready" and one.status == "True" for one in self.status.conditions or ())

    @property
    def finished(self) -> bool:
        """Whether all containers have terminated for good; the pod's address may be reused."""
        return self.status.phase in {"Succeeded", "Failed"}


NODES = Kind(Node, "v1", "nodes", namespaced=False)
NAMESPACES = Kind(Namespace, "v1", "namespaces", namespaced=False)
PODS = Kind(Pod, "v1", "pods")


# Services, EndpointSlices and network policies.
#
# Source: k8s.io/api/core/v1, discovery/v1, networking/v1.

SERVICE_NAME = "kubernetes.io/service-name"
"""Label of an EndpointSlice with the name of its service."""
PROXY_NAME = "service.kubernetes.io/service-proxy-name"
"""Label of a Service with the name of the proxy that serves it."""
SERVICE_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
HEADLESS = "service.kubernetes.io/headless"
"""Label of Services and EndpointSlices that proxies ignore."""


def served_by(labels: Mapping[str, str], proxy: str) -> bool:
    """Whether the proxy of this name serves a Service with these labels; empty: the default proxy.

    Source: kube-proxy's list options, which Cilium shares.
    """
    return HEADLESS not in labels and labels.get(PROXY_NAME) == (proxy or None)


class ServicePort(ObjectPart, frozen=True, gc=False):
    """A port of a service."""

    port: int
    name: str = ""
    protocol: str = "TCP"
    app_protocol: str | None = None
    target_port: int | str = 0
    node_port: int = 0


class ClientIPConfig(ObjectPart, frozen=True, gc=False):
    """How long a client keeps its backend."""

    timeout_seconds: int = 10800


class SessionAffinityConfig(ObjectPart, frozen=True, gc=False):
    """Settings of session affinity."""

    client_ip: ClientIPConfig | None = field(name="clientIP", default=None)


class ServiceSpec(ObjectPart, frozen=True, gc=False):
    """Spec of a service."""

    type: str = "ClusterIP"
    ports: tuple[ServicePort, ...] | None = None
    selector: dict[str, str] | None = None
    cluster_ip: str = field(name="clusterIP", default="")
    cluster_ips: tuple[str, ...] | None = field(name="clusterIPs", default=None)
    external_ips: tuple[str, ...] | None = field(name="externalIPs", default=None)
    external_name: str = ""
    ip_families: tuple[str, ...] | None = None
    ip_family_policy: str = ""
    session_affinity: str = "None"
    session_affinity_config: SessionAffinityConfig | None = None
    external_traffic_policy: str = ""
    internal_traffic_policy: str = "Cluster"
    health_check_node_port: int = 0
    load_balancer_ip: str = field(name="loadBalancerIP", default="")
    load_balancer_class: str | None = None
    load_balancer_source_ranges: tuple[str, ...] | None = None
    allocate_load_balancer_node_ports: bool | None = None
    publish_not_ready_addresses: bool = False
    traffic_distribution: str | None = None


class Ingress(ObjectPart, frozen=True, gc=False):
    """An address of a load balancer."""

    ip: str = ""
    hostname: str = ""
    ip_mode: str | None = None

    @property
    def is_of_nodes(self) -> bool:
        """Whether nodes serve the address themselves, without an external proxy (KEP-1860)."""
        return bool(self.ip) and self.ip_mode in {None, "", "VIP"}


class LoadBalancerStatus(ObjectPart, frozen=True, gc=False):
    """The addresses of a load balancer."""

    ingress: tuple[Ingress, ...] | None = None


class ServiceStatus(ObjectPart, frozen=True, gc=False):
    """Status of a service."""

    load_balancer: LoadBalancerStatus = LoadBalancerStatus()


class Service(Object, frozen=True, gc=False):
    """A service."""

    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


class EndpointConditions(ObjectPart, frozen=True, gc=False):
    """State of a backend; absent conditions count as ready and serving."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ZoneHint(ObjectPart, frozen=True, gc=False):
    """A zone with clients that should use a backend."""

    name: str


class EndpointHints(ObjectPart, frozen=True, gc=False):
    """Clients that should use a backend."""

    for_zones: tuple[ZoneHint, ...] | None = None


class TargetReference(ObjectPart, frozen=True, gc=False):
    """The pod behind a backend."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class SliceEndpoint(ObjectPart, frozen=True, gc=False):
    """A backend; all its addresses belong to one pod."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions = EndpointConditions()
    node_name: str | None = None
    hostname: str | None = None
    hints: EndpointHints | None = None
    target_ref: TargetReference | None = None


class EndpointPort(ObjectPart, frozen=True, gc=False):
    """A port of all backends of a slice; without a number every port."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class EndpointSlice(Object, frozen=True, gc=False):
    """Backends of a service, of one address family."""

    address_type: str = ""
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None

    @property
    def service(self) -> str:
        """The name of the service, in the slice's namespace."""
        return self.labels.get(SERVICE_NAME, "")


class NetworkPolicy(Object, frozen=True, gc=False):
    """A network policy. Its spec stays unparsed; the policy engine parses it."""

    spec: dict[str, Any] | None = None


SERVICES = Kind(Service, "v1", "services")
ENDPOINT_SLICES = Kind(EndpointSlice, "discovery.k8s.io/v1", "endpointslices")
NETWORK_POLICIES = Kind(NetworkPolicy, "networking.k8s.io/v1", "networkpolicies")
