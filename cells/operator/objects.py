"""The tables of the cluster's objects that the leader's cells read.

A reflector lists and watches a kind if a cell has requested its table.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import anyio
import msgspec

from cells.kubernetes.objects.cilium_pools import CILIUM_LOAD_BALANCER_IP_POOLS
from cells.kubernetes.objects.kind import Condition, DatedMeta, Kind, LabelSelector, Meta, Object
from cells.kubernetes.reflector import Reflector
from cells.kubernetes.sink import Sink, SourceStatus
from cells.operator.api_server import ClusterAPI
from cells.operator.crds import CustomResources
from lifecycle import Health, Hook, Jobs, Lifecycle, Logger, Table, Tables, module, provide

__all__ = [
    "CLUSTER_IDENTITIES",
    "CLUSTER_PODS",
    "CLUSTER_SECRETS",
    "CLUSTER_SERVICES",
    "LOAD_BALANCER_POOLS",
    "BalancedServiceSpec",
    "ClusterIdentity",
    "ClusterObjects",
    "ClusterPod",
    "ClusterSecret",
    "ClusterService",
    "LoadBalancerPool",
    "PoolBlock",
    "cell",
    "wait_any",
]


# Pods, services and identities with the fields that the operator reads; agents read others.
#
# Source: k8s.io/api/core/v1.


class _Part(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """The base of parts of objects."""


class PodNodeSpec(_Part, frozen=True, gc=False):
    """The fields of a pod's spec that are read."""

    node_name: str = ""
    host_network: bool = False


class PodState(_Part, frozen=True, gc=False):
    """The fields of a pod's status that are read."""

    phase: str = ""
    start_time: str | None = None
    conditions: tuple[Condition, ...] | None = None


class ClusterPod(Object, frozen=True, gc=False):
    """A pod of any node."""

    spec: PodNodeSpec = PodNodeSpec()
    status: PodState = PodState()

    @property
    def finished(self) -> bool:
        """Whether all its containers have terminated."""
        return self.status.phase in {"Succeeded", "Failed"}

    @property
    def ready(self) -> bool:
        """Whether it is running and its Ready condition is true."""
        conditions = self.status.conditions or ()
        return self.status.phase == "Running" and any(
            one.type == "Ready" and one.status == "True" for one in conditions
        )


class ObservedServicePort(_Part, frozen=True, gc=False):
    """A port of a service."""

    name: str = ""
    port: int = 0
    protocol: str = "TCP"


class BalancedServiceSpec(_Part, frozen=True, gc=False):
    """The fields of a service's spec that load balancing and other clusters need."""

    type: str = "ClusterIP"
    cluster_ips: tuple[str, ...] | None = msgspec.field(name="clusterIPs", default=None)
    ports: tuple[ObservedServicePort, ...] | None = None
    selector: dict[str, str] | None = None
    ip_families: tuple[str, ...] | None = None
    ip_family_policy: str = ""
    external_traffic_policy: str = ""
    load_balancer_ip: str = msgspec.field(name="loadBalancerIP", default="")
    load_balancer_class: str | None = None


class IngressAddress(_Part, frozen=True, gc=False):
    """One address of a load balancer."""

    ip: str = ""
    hostname: str = ""


class LoadBalancerAddresses(_Part, frozen=True, gc=False):
    """The addresses of a service."""

    ingress: tuple[IngressAddress, ...] | None = None


class ServiceState(_Part, frozen=True, gc=False):
    """The fields of a service's status that are read."""

    load_balancer: LoadBalancerAddresses = LoadBalancerAddresses()
    conditions: tuple[Condition, ...] | None = None


class ClusterService(Object, frozen=True, gc=False):
    """A service, as load balancing and other clusters need it."""

    spec: BalancedServiceSpec = BalancedServiceSpec()
    status: ServiceState = ServiceState()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its load balancer addresses."""
        return tuple(one.ip for one in self.status.load_balancer.ingress or () if one.ip)


class VersionedMeta(Meta, frozen=True, gc=False):
    """``metadata`` with the object's resourceVersion."""

    resource_version: str = ""


class ClusterIdentity(Object, frozen=True, gc=False):
    """A CiliumIdentity, without its labels."""

    metadata: VersionedMeta


class ClusterSecret(Object, frozen=True, gc=False):
    """A secret, without its data."""


CLUSTER_IDENTITIES: Final = Kind(
    ClusterIdentity, "cilium.io/v2", "ciliumidentities", kind="CiliumIdentity", namespaced=False
)
CLUSTER_PODS: Final = Kind(ClusterPod, "v1", "pods", kind="Pod")
CLUSTER_SECRETS: Final = Kind(ClusterSecret, "v1", "secrets", kind="Secret")
CLUSTER_SERVICES: Final = Kind(ClusterService, "v1", "services", kind="Service", status=True)


# Pools of addresses for load balancers.


class PoolMeta(DatedMeta, frozen=True, gc=False):
    """``metadata`` with the generation."""

    generation: int = 0


class PoolBlock(_Part, frozen=True, gc=False):
    """A network, or a range from ``start`` to ``stop``."""

    cidr: str = ""
    start: str = ""
    stop: str = ""


class PoolSpec(_Part, frozen=True, gc=False):
    """Addresses of a pool, and a selector of services."""

    blocks: tuple[PoolBlock, ...] | None = None
    service_selector: LabelSelector | None = None
    disabled: bool = False
    allow_first_last_ips: str = msgspec.field(name="allowFirstLastIPs", default="")


class PoolStatus(_Part, frozen=True, gc=False):
    """A pool's conditions."""

    conditions: tuple[Condition, ...] | None = None


class LoadBalancerPool(Object, frozen=True, gc=False):
    """A CiliumLoadBalancerIPPool."""

    metadata: PoolMeta
    spec: PoolSpec = PoolSpec()
    status: PoolStatus = PoolStatus()


LOAD_BALANCER_POOLS: Final = Kind(
    LoadBalancerPool,
    CILIUM_LOAD_BALANCER_IP_POOLS.api_version,
    CILIUM_LOAD_BALANCER_IP_POOLS.plural,
    kind=CILIUM_LOAD_BALANCER_IP_POOLS.kind,
    namespaced=False,
    status=True,
)


# Follows each kind with a requested table.

T = TypeVar("T", bound=Object)


def source_statuses() -> Table[str, SourceStatus]:
    """Create the table ``k8s-sources``: the status of each kind's source, by ``ciliumnodes.cilium.io``."""
    return Table("k8s-sources", key=lambda one: one.kind)


class ClusterObjects:
    """The tables of the leader's cells; a kind is followed if a constructor has requested its table."""

    resources: CustomResources
    """Of which there are objects."""

    def __init__(
        self,
        server: ClusterAPI,
        resources: CustomResources,
        statuses: Table[str, SourceStatus],
        tables: Tables,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._server = server
        self.resources = resources
        """The registered custom resources."""
        self._statuses = statuses
        self._registry = tables
        self._jobs = jobs
        self._health = health
        self._log = log
        self._tables: dict[str, Table[Any, Any]] = {}
        self._sinks: list[tuple[Sink[Any], str]] = []
        lifecycle.append(Hook("follow objects", self._start))

    def table(self, kind: Kind[T], namespace: str = "") -> Table[tuple[str, str], T]:
        """Return the table of a kind, by namespace and name.

        Only constructors may call it, all with the same namespace; empty is all namespaces.
        """
        found = self._tables.get(kind.qualified)
        if found is None:
            found = self._tables[kind.qualified] = Table(kind.table, key=_key)
            sink = Sink(kind, found, self._statuses, self._health, self._log)
            self._sinks.append((sink, namespace))
            self._registry.add(found)
        return found

    async def _start(self) -> None:
        for sink, namespace in self._sinks:
            sink.begin()
            reflector = Reflector(self._server.client, sink.kind, sink, namespace=namespace)
            self._jobs.one_shot(f"follow-{sink.kind.plural}", reflector.run)


def _key(row: Object) -> tuple[str, str]:
    return row.key


# Waits for the first of several awaitables.


async def wait_any(*waits: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Return when the first awaitable does; cancel the others."""
    async with anyio.create_task_group() as group:

        async def one(wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(one, wait)


cell = module("objects", "Objects of the cluster, as tables", provide(source_statuses, ClusterObjects))
