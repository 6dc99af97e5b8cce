"""Pods, services and identities as the operator reads them: other parts of them than an agent does.

Needs: nothing.   Gives: ClusterPod, CLUSTER_PODS, ClusterService, CLUSTER_SERVICES, ClusterIdentity,
CLUSTER_IDENTITIES.
Source: k8s.io/api/core/v1.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cells.kubernetes import Condition, Kind, Meta, Object


class _Part(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object."""


class PodPlace(_Part, frozen=True, gc=False):
    """Where a pod runs."""

    node_name: str = ""
    host_network: bool = False


class PodState(_Part, frozen=True, gc=False):
    """How a pod is."""

    phase: str = ""
    start_time: str | None = None
    conditions: tuple[Condition, ...] | None = None


class ClusterPod(Object, frozen=True, gc=False):
    """A pod of any node."""

    spec: PodPlace = PodPlace()
    status: PodState = PodState()

    @property
    def finished(self) -> bool:
        """Whether its containers have ended for good."""
        return self.status.phase in {"Succeeded", "Failed"}

    @property
    def ready(self) -> bool:
        """Whether it runs, and its probes say that it is ready."""
        conditions = self.status.conditions or ()
        return self.status.phase == "Running" and any(
            one.type == "Ready" and one.status == "True" for one in conditions
        )


class Port(_Part, frozen=True, gc=False):
    """A port of a service."""

    port: int = 0
    protocol: str = "TCP"


class ServiceWishes(_Part, frozen=True, gc=False):
    """What a service asks of a load balancer."""

    type: str = "ClusterIP"
    ports: tuple[Port, ...] | None = None
    selector: dict[str, str] | None = None
    ip_families: tuple[str, ...] | None = None
    ip_family_policy: str = ""
    external_traffic_policy: str = ""
    load_balancer_ip: str = msgspec.field(name="loadBalancerIP", default="")
    load_balancer_class: str | None = None


class Ingress(_Part, frozen=True, gc=False):
    """One address of a load balancer."""

    ip: str = ""
    hostname: str = ""


class LoadBalancer(_Part, frozen=True, gc=False):
    """The addresses of a service."""

    ingress: tuple[Ingress, ...] | None = None


class ServiceState(_Part, frozen=True, gc=False):
    """What was given to a service."""

    load_balancer: LoadBalancer = LoadBalancer()
    conditions: tuple[Condition, ...] | None = None


class ClusterService(Object, frozen=True, gc=False):
    """A service, as load balancers see it."""

    spec: ServiceWishes = ServiceWishes()
    status: ServiceState = ServiceState()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses it has."""
        return tuple(one.ip for one in self.status.load_balancer.ingress or () if one.ip)


class VersionedMeta(Meta, frozen=True, gc=False):
    """``metadata`` with the version of the object."""

    resource_version: str = ""


class ClusterIdentity(Object, frozen=True, gc=False):
    """An identity, as far as it may be in use or not."""

    metadata: VersionedMeta


CLUSTER_IDENTITIES: Final = Kind(
    ClusterIdentity, "cilium.io/v2", "ciliumidentities", kind="CiliumIdentity", namespaced=False
)
CLUSTER_PODS: Final = Kind(ClusterPod, "v1", "pods", kind="Pod")
CLUSTER_SERVICES: Final = Kind(ClusterService, "v1", "services", kind="Service", status=True)
