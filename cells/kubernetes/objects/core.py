"""Nodes, namespaces and pods.

Needs: nothing.   Gives: Node, Namespace, Pod and their parts, NODES, NAMESPACES, PODS.
Source: k8s.io/api/core/v1.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.objects.meta import Condition, DatedMeta, Object, Wire


class Taint(Wire, frozen=True, gc=False):
    """What keeps pods off a node."""

    key: str
    effect: str = ""
    value: str = ""


class NodeSpec(Wire, frozen=True, gc=False):
    """Of a node."""

    pod_cidr: str = field(name="podCIDR", default="")
    pod_cidrs: tuple[str, ...] | None = field(name="podCIDRs", default=None)
    provider_id: str = field(name="providerID", default="")
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeAddress(Wire, frozen=True, gc=False):
    """One address of a node: InternalIP, ExternalIP, Hostname."""

    type: str
    address: str


class NodeInfo(Wire, frozen=True, gc=False):
    """What the kubelet reports about its machine."""

    boot_id: str = field(name="bootID", default="")


class NodeStatus(Wire, frozen=True, gc=False):
    """Of a node."""

    addresses: tuple[NodeAddress, ...] | None = None
    conditions: tuple[Condition, ...] | None = None
    node_info: NodeInfo = NodeInfo()


class Node(Object, frozen=True, gc=False):
    """A node of the cluster."""

    metadata: DatedMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(Object, frozen=True, gc=False):
    """A namespace; its labels count."""


class ContainerPort(Wire, frozen=True, gc=False):
    """A port a container names."""

    container_port: int
    name: str = ""
    protocol: str = "TCP"
    host_port: int = 0
    host_ip: str = field(name="hostIP", default="")


class Container(Wire, frozen=True, gc=False):
    """What is read of a container."""

    name: str
    ports: tuple[ContainerPort, ...] | None = None


class PodSpec(Wire, frozen=True, gc=False):
    """Of a pod."""

    node_name: str = ""
    host_network: bool = False
    service_account_name: str = ""
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None


class PodIP(Wire, frozen=True, gc=False):
    """One address of a pod."""

    ip: str = ""


class PodCondition(Wire, frozen=True, gc=False):
    """What holds for a pod: of ``Ready``, whether services may send to it."""

    type: str = ""
    status: str = ""


class PodStatus(Wire, frozen=True, gc=False):
    """Of a pod."""

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
        """Its addresses, the first family first."""
        found = tuple(one.ip for one in self.status.pod_ips or () if one.ip)
        return found or ((self.status.pod_ip,) if self.status.pod_ip else ())

    @property
    def named_ports(self) -> Iterator[ContainerPort]:
        """The ports its containers give names."""
        for container in (*(self.spec.init_containers or ()), *(self.spec.containers or ())):
            yield from (port for port in container.ports or () if port.name)

    @property
    def is_ready(self) -> bool:
        """Whether its condition ``Ready`` holds."""
        return any(one.type == "Ready" and one.status == "True" for one in self.status.conditions or ())

    @property
    def finished(self) -> bool:
        """Whether its containers have ended for good: its address may be another's."""
        return self.status.phase in {"Succeeded", "Failed"}


NODES = Kind(Node, "v1", "nodes", namespaced=False)
NAMESPACES = Kind(Namespace, "v1", "namespaces", namespaced=False)
PODS = Kind(Pod, "v1", "pods")
