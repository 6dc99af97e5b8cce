"""Allocates addresses of services of type LoadBalancer, from CiliumLoadBalancerIPPools or of nodes.

A pure function of all services and pools (nodes and backends for node IPAM) computes the addresses, so that a
service keeps its address while it is valid, also over restarts. Tables ``lb-service-annotations``,
``lb-pool-requests`` and ``node-ipam-requests`` have the pending changes; reconcilers write them to the status
of services and the conditions of pools.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from ipaddress import ip_address
from itertools import count
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.base.metrics import Collector, MetricFamily, gauge
from cells.kubernetes.objects.core import ENDPOINT_SLICES, NODES, EndpointSlice, Node, served_by
from cells.kubernetes.objects.kind import Key, selector_of
from cells.observe.metrics import Metrics
from cells.operator.api_server import ClusterAPI
from cells.operator.lb_ipam.allocation import AllocationRequest, plan, request_of
from cells.operator.lb_ipam.pools import (
    NO_PLAN,
    Address,
    AddressPool,
    ConditionsPatch,
    ConditionsWriter,
    Grant,
    ServicePatch,
    ServiceWriter,
    address_pools,
    pool_patch,
    pool_patches,
    service_patch,
    service_patches,
)
from cells.operator.objects import (
    CLUSTER_SERVICES,
    LOAD_BALANCER_POOLS,
    ClusterObjects,
    ClusterService,
    wait_any,
)
from cells.operator.options import ServedCluster
from lifecycle import (
    Health,
    Jobs,
    Lifecycle,
    Logger,
    Reconciler,
    Settings,
    Table,
    Tables,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = [
    "LBIPAM",
    "ConditionsPatch",
    "ConditionsWriter",
    "LBIPAMSettings",
    "NodeIPAM",
    "ServicePatch",
    "cell",
]


# Which services get addresses from LB-IPAM and from node IPAM.
#
# Source: Cilium 1.17, options of the operator.

L2_CLASS = "io.cilium/l2-announcer"
BGP_CLASS = "io.cilium/bgp-control-plane"
NODE_CLASS = "io.cilium/node"


class LBIPAMSettings(Settings, frozen=True):
    """Settings of LB-IPAM and node IPAM."""

    enable_lb_ipam: bool = True
    """Allocate addresses of CiliumLoadBalancerIPPools to services of type LoadBalancer."""

    default_lb_service_ipam: str = "lbipam"
    """Who allocates addresses to services without a loadBalancerClass: lbipam, nodeipam (with
    enable-node-ipam), or none.
    """

    enable_node_ipam: bool = False
    """Services of class io.cilium/node get the addresses of nodes."""

    enable_l2_announcements: bool = False
    """Allocate addresses to services of class io.cilium/l2-announcer, too."""

    k8s_service_proxy_name: str = ""
    """Serve only services with this value of the label service.kubernetes.io/service-proxy-name; unset: only
    those without the label."""

    bpf_lb_proto_diff: bool = True
    """Whether agents distinguish protocols; if not, services that share an address need different port
    numbers.
    """

    def faults(self) -> Iterator[str]:
        if self.default_lb_service_ipam not in {"lbipam", "nodeipam", "none"}:
            yield f"default-lb-service-ipam={self.default_lb_service_ipam}: expected lbipam, nodeipam or none"
        elif self.default_lb_service_ipam == "nodeipam" and not self.enable_node_ipam:
            yield "default-lb-service-ipam=nodeipam: expected enable-node-ipam=true, too"

    @property
    def classes(self) -> frozenset[str]:
        """Classes of services that get addresses of pools; an empty string stands for none."""
        found = {""} if self.default_lb_service_ipam == "lbipam" else set()
        return frozenset(found | ({L2_CLASS} if self.enable_l2_announcements else set()))

    @property
    def node_classes(self) -> frozenset[str]:
        """Classes of services that get addresses of nodes; an empty string stands for none."""
        if not self.enable_node_ipam:
            return frozenset()
        return frozenset({NODE_CLASS, *([""] if self.default_lb_service_ipam == "nodeipam" else [])})


# Computes a new plan whenever pools or services change.


class LBIPAM:
    """Allocates addresses to services, once services and pools are synchronized."""

    def __init__(
        self,
        settings: LBIPAMSettings,
        cluster: ServedCluster,
        objects: ClusterObjects,
        service_patches: Table[tuple[str, str], ServicePatch],
        pool_patches: Table[str, ConditionsPatch],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.active = settings.enable_lb_ipam
        """Whether LB-IPAM is enabled."""
        self._classes = settings.classes | ({BGP_CLASS} if objects.resources.bgp else set())
        self._proxy = settings.k8s_service_proxy_name
        self._proto_diff = settings.bpf_lb_proto_diff
        self._versions = [4] * cluster.ipv4 + [6] * cluster.ipv6
        self._service_patches = service_patches
        self._pool_patches = pool_patches
        self._log = log
        self._arrival: dict[Key, int] = {}
        self._given: dict[Key, tuple[str, tuple[Address, ...]]] = {}
        """Service -> uid and addresses of the last plan; its status may lag behind."""
        self._slept = True
        """Whether there was no pool in the last pass."""
        self._requests: dict[Key, AllocationRequest] = {}
        """The requests of the last plan, without addresses."""
        self._released: set[tuple[Key, str]] = set()
        """Services by UID that had addresses of the last pool, until their status has none."""
        self._broken: dict[str, str] = {}
        self._clock = count()
        self._age: dict[tuple[str, Address, Address], int] = {}
        """(pool, first, last) -> sequence number; ranges are used in the order in which pools got them."""
        self.pools: list[AddressPool] = []
        self.plan = NO_PLAN
        if self.active:
            self._pools = objects.table(LOAD_BALANCER_POOLS)
            self._services = objects.table(CLUSTER_SERVICES)
            jobs.one_shot("allocate", self._run)

    async def _run(self) -> None:
        await self._pools.wait_initialized()
        await self._services.wait_initialized()
        pools, services = self._pools.changes(), self._services.changes()
        while True:
            changed = services.take()
            if pools.take() or changed:
                for change in changed:
                    if change.row is not None:
                        self._arrival.setdefault(change.row.key, change.revision)
                self._pass()
            await wait_any(pools.wait, services.wait)

    def _pass(self) -> None:
        services = {one.key: one for one in self._services.all()}
        self._arrival = {key: at for key, at in self._arrival.items() if key in services}
        rows = {one.name: one for one in self._pools.all()}
        pools, broken = address_pools(rows.values())
        known = [(pool.name, one.first, one.last) for pool in pools for one in pool.ranges]
        self._age = {key: self._age[key] if key in self._age else next(self._clock) for key in known}
        self.pools = [
            replace(pool, order=tuple(self._age[pool.name, one.first, one.last] for one in pool.ranges))
            for pool in pools
        ]
        self._report_broken(broken)
        ours = {key: one for key, one in services.items() if self._serves(one)}
        served = ours if rows else self._released_by(ours)
        requests = [self._request(served[key]) for key in sorted(served, key=self._arrival.__getitem__)]
        bare = {one.key: replace(one, has=()) for one in requests}
        changed = {key for key, one in bare.items() if self._requests.get(key, one) != one}
        self.plan = plan(self.pools, requests, changed) if served else NO_PLAN
        self._requests, self._slept = bare, not rows
        self._given = {one.key: (one.uid, self._grant(one.key).addresses) for one in requests}
        by_name = {one.name: one for one in self.pools}
        with self._service_patches.txn() as txn:
            patches = [
                service_patch(one, self.plan.grants.get(key))
                for key, one in services.items()
                if key not in ours or key in served
            ]
            pending = [one for one in patches if one is not None]
            txn.replace_all(pending)
        unwritten = {((one.namespace, one.name), one.uid) for one in pending}
        self._released = {(key, one.metadata.uid) for key, one in served.items()}
        if not rows:
            self._released &= unwritten
        with self._pool_patches.txn() as pool_txn:
            found = (pool_patch(row, by_name.get(name), self.plan) for name, row in rows.items())
            pool_txn.replace_all(one for one in found if one is not None)

    def _released_by(self, services: dict[Key, ClusterService]) -> dict[Key, ClusterService]:
        """Return the services that lose their addresses with the last pool.

        Without pools LB-IPAM is dormant, as Cilium's: it changes no other service, so that another controller
        may give addresses.
        """
        return {key: one for key, one in services.items() if (key, one.metadata.uid) in self._released}

    def _serves(self, service: ClusterService) -> bool:
        spec = service.spec
        return (
            spec.type == "LoadBalancer"
            and (spec.load_balancer_class or "") in self._classes
            and served_by(service.labels, self._proxy)
        )

    def _request(self, service: ClusterService) -> AllocationRequest:
        request = request_of(service, self._versions, proto_diff=self._proto_diff)
        uid, given = self._given.get(service.key, ("", ()))
        if uid != request.uid or self._slept:  # dormant, addresses are those of others
            return request
        return replace(request, has=given)

    def _grant(self, key: Key) -> Grant:
        return self.plan.grants.get(key) or Grant(())

    def _report_broken(self, broken: dict[str, str]) -> None:
        for name, why in broken.items():
            if self._broken.get(name) != why:
                self._log.error("invalid pool", pool=name, error=why)
        self._broken = broken


# The node addresses of a service.
#
# Source: Cilium 1.17, node IPAM; KEP-3458 for the nodes that load balancers exclude.

EXCLUDED: Final = "node.kubernetes.io/exclude-from-external-load-balancers"
GOING: Final = "ToBeDeletedByClusterAutoscaler"
MATCH: Final = "io.cilium.nodeipam/match-node-labels"
FAMILIES: Final = {"IPv4": 4, "IPv6": 6}


class EntryNode(msgspec.Struct, frozen=True, gc=False):
    """A node that external traffic may enter by."""

    name: str
    labels: dict[str, str]
    external: tuple[str, ...]
    internal: tuple[str, ...]


def entry_node_of(node: Node) -> EntryNode | None:
    """Return the node as an EntryNode, or None if it is excluded or being deleted."""
    tainted = any(one.key == GOING for one in node.spec.taints or ())
    if node.terminating or EXCLUDED in node.labels or tainted:
        return None
    found: dict[str, list[str]] = {"ExternalIP": [], "InternalIP": []}
    for one in node.status.addresses or ():
        if one.type in found and _version(one.address):
            found[one.type].append(one.address)
    return EntryNode(node.name, dict(node.labels), tuple(found["ExternalIP"]), tuple(found["InternalIP"]))


def ready_nodes(slices: Iterable[EndpointSlice]) -> set[str]:
    """Return the nodes with a ready backend; a backend without the condition is ready."""
    return {
        one.node_name
        for each in slices
        for one in each.endpoints or ()
        if one.node_name and one.conditions.ready is not False
    }


def addresses_for(
    service: ClusterService, places: Collection[EntryNode], slices: Iterable[EndpointSlice]
) -> tuple[str, ...]:
    """Return the external addresses of a service's nodes, else the internal ones, in order.

    With ``externalTrafficPolicy: Local`` only nodes with a ready backend count. Raises ValueError for an
    invalid selector.
    """
    text = service.annotations.get(MATCH, "")
    try:
        selector = selector_of(text)
    except ValueError as error:
        raise ValueError(f"{MATCH}={text}: {error}") from error
    chosen = [one for one in places if selector.matches(one.labels)]
    if service.spec.external_traffic_policy == "Local":
        ready = ready_nodes(slices)
        chosen = [one for one in chosen if one.name in ready]
    versions = {FAMILIES.get(one) for one in service.spec.ip_families or ("IPv4",)}
    external = {ip for one in chosen for ip in one.external if _version(ip) in versions}
    internal = {ip for one in chosen for ip in one.internal if _version(ip) in versions}
    return tuple(sorted(external or internal))


def _version(text: str) -> int | None:
    try:
        return ip_address(text).version
    except ValueError:
        return None


# Node IPAM: services of class io.cilium/node get addresses of nodes.
#
# For networks on which no address can be announced. Recomputed whenever nodes, backends or services change.

AGAIN: Final = minutes(1)


class NodeIPAM:
    """Assigns addresses of nodes to services, once nodes, backends and services are synchronized."""

    def __init__(
        self,
        settings: LBIPAMSettings,
        objects: ClusterObjects,
        server: ClusterAPI,
        *,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self._classes = settings.node_classes
        self._proxy = settings.k8s_service_proxy_name
        self._health = health.child("node-ipam")
        self._log = log
        self._places: dict[str, EntryNode] = {}
        self._wrong: dict[Key, str] = {}
        self.patches: Table[tuple[str, str], ServicePatch] = Table(
            "node-ipam-requests", key=lambda one: (one.namespace, one.name)
        )
        """Pending changes of services, by namespace and name."""
        if self._classes:
            self._services = objects.table(CLUSTER_SERVICES)
            self._nodes = objects.table(NODES)
            self._slices = objects.table(ENDPOINT_SLICES)
            tables.add(self.patches)
            jobs.one_shot("addresses of nodes", self._run)
            writer = Reconciler(self.patches, ServiceWriter(server), full_every=AGAIN, put_early=True)
            jobs.observe("write-addresses-of-nodes", writer)

    async def _run(self) -> None:
        for table in (self._services, self._nodes, self._slices):
            await table.wait_initialized()
        services, nodes = self._services.changes(), self._nodes.changes()
        slices = self._slices.changes()
        while True:
            changed = bool(services.take()) | bool(slices.take())
            if nodes.take():
                places = {
                    one.name: place for one in self._nodes.all() if (place := entry_node_of(one)) is not None
                }
                changed |= places != self._places  # most changes of Nodes do not concern their addresses
                self._places = places
            if changed:
                self._pass()
            await wait_any(services.wait, nodes.wait, slices.wait)

    def _pass(self) -> None:
        backends: defaultdict[Key, list[EndpointSlice]] = defaultdict(list)
        for one in self._slices.all():
            backends[one.namespace, one.service].append(one)
        wrong: dict[Key, str] = {}
        patches: list[ServicePatch] = []
        for service in self._services.all():
            if not self._serves(service):
                continue
            try:
                addresses = addresses_for(service, self._places.values(), backends[service.key])
            except ValueError as error:
                wrong[service.key] = str(error)
                continue  # its current addresses stay
            if addresses != service.addresses:
                patches.append(_patch_of(service, addresses))
        with self.patches.txn() as txn:
            txn.replace_all(patches)
        self._report(wrong)

    def _serves(self, service: ClusterService) -> bool:
        spec = service.spec
        return (
            spec.type == "LoadBalancer"
            and not service.terminating
            and (spec.load_balancer_class or "") in self._classes
            and served_by(service.labels, self._proxy)
        )

    def _report(self, wrong: dict[Key, str]) -> None:
        for key, why in wrong.items():
            if self._wrong.get(key) != why:
                self._log.error("invalid node selector of a service", service="/".join(key), error=why)
        self._wrong = wrong
        if wrong:
            key, why = next(iter(wrong.items()))
            self._health.degraded(f"service {'/'.join(key)} keeps its addresses: {why}")
        else:
            self._health.ok("every node selector is valid")


def _patch_of(service: ClusterService, addresses: Collection[str]) -> ServicePatch:
    uid = service.metadata.uid
    return ServicePatch(service.namespace, service.name, uid, tuple(addresses), None, conditioned=False)


# Metrics of LB-IPAM.
#
# Source: Cilium 1.17, metrics of the operator; all are gauges, despite their names.

PREFIX = "cilium_operator_lbipam"


def collect_metrics(metrics: Metrics, ipam: LBIPAM, lifecycle: Lifecycle) -> None:
    """Report the metrics while this operator leads."""

    async def collect() -> Iterable[MetricFamily]:
        return families(ipam)

    if ipam.active:
        metrics.report(lifecycle, Collector("lb-ipam", collect))


def families(ipam: LBIPAM) -> list[MetricFamily]:
    """Return the metrics of LB-IPAM."""
    pools, found = ipam.pools, ipam.plan
    used = {one.name: float(found.used.get(one.name, 0)) for one in pools}
    free = {one.name: float(found.available(one)) for one in pools}
    grants = found.grants.values()
    lacking = sum(not one.satisfied for one in grants)
    conflicts = sum(bool(one.conflict) for one in pools)
    return [
        gauge(f"{PREFIX}_conflicting_pools_total", "Pools in conflict.", conflicts),
        gauge(f"{PREFIX}_ips_available_total", "Addresses that are free.", free, "pool"),
        gauge(f"{PREFIX}_ips_used_total", "Addresses that services have.", used, "pool"),
        gauge(f"{PREFIX}_services_matching_total", "Services that request addresses.", len(grants)),
        gauge(f"{PREFIX}_services_unsatisfied_total", "Services that lack a requested address.", lacking),
    ]


def write(
    server: ClusterAPI,
    services: Table[tuple[str, str], ServicePatch],
    pools: Table[str, ConditionsPatch],
    ipam: LBIPAM,
    jobs: Jobs,
) -> None:
    """Start the reconcilers of services and pools, if LB-IPAM is enabled."""
    if not ipam.active:
        return
    to_services = Reconciler(services, ServiceWriter(server), full_every=AGAIN, put_early=True)
    to_pools = Reconciler(
        pools, ConditionsWriter(server, LOAD_BALANCER_POOLS), full_every=AGAIN, put_early=True
    )
    jobs.observe("write-services", to_services)
    jobs.observe("write-pools", to_pools)


cell = module(
    "lb-ipam",
    "Addresses of load balancers",
    config(LBIPAMSettings),
    provide(service_patches, pool_patches, LBIPAM, NodeIPAM),
    invoke(write, collect_metrics, NodeIPAM),
)
