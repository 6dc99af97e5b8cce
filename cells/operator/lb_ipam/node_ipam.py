"""Node IPAM: services of class io.cilium/node get the addresses of nodes.

Needs: LBIPAMSettings, ClusterObjects, ClusterAPI.   Gives: NodeIPAM.
Why:   on a network that lets one announce nothing, the nodes' own addresses are all there is. It looks
       anew whenever nodes, backends or services change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from cells.kubernetes import ENDPOINT_SLICES, NODES, EndpointSlice, Key, served_by
from cells.operator.api_server import ClusterAPI
from cells.operator.lb_ipam.either import either
from cells.operator.lb_ipam.node_places import Place, addresses_for, place_of
from cells.operator.lb_ipam.settings import LBIPAMSettings
from cells.operator.lb_ipam.wishes import ServiceWish
from cells.operator.lb_ipam.writer import ServiceWriter
from cells.operator.objects import CLUSTER_SERVICES, ClusterObjects, ClusterService
from lifecycle import Health, Jobs, Logger, Reconciler, Table, Tables, minutes

AGAIN: Final = minutes(1)


class NodeIPAM:
    """Gives services the addresses of nodes, once all nodes, backends and services are known."""

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
        self._places: dict[str, Place] = {}
        self._wrong: dict[Key, str] = {}
        self.wishes: Table[ServiceWish] = Table(
            "node-ipam-requests", key=lambda one: (one.namespace, one.name)
        )
        """What services do not say yet, by namespace and name."""
        if self._classes:
            self._services = objects.table(CLUSTER_SERVICES)
            self._nodes = objects.table(NODES)
            self._slices = objects.table(ENDPOINT_SLICES)
            tables.add(self.wishes)
            jobs.one_shot("addresses of nodes", self._run)
            writer = Reconciler(self.wishes, ServiceWriter(server), full_every=AGAIN, put_early=True)
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
                    one.name: place for one in self._nodes.all() if (place := place_of(one)) is not None
                }
                changed |= places != self._places  # most of what nodes say is not about this
                self._places = places
            if changed:
                self._pass()
            await either(services.wait, nodes.wait, slices.wait)

    def _pass(self) -> None:
        backends: defaultdict[Key, list[EndpointSlice]] = defaultdict(list)
        for one in self._slices.all():
            backends[one.namespace, one.service].append(one)
        wrong: dict[Key, str] = {}
        wishes: list[ServiceWish] = []
        for service in self._services.all():
            if not self._serves(service):
                continue
            try:
                addresses = addresses_for(service, self._places.values(), backends[service.key])
            except ValueError as error:
                wrong[service.key] = str(error)
                continue  # what it has it keeps
            if addresses != service.addresses:
                wishes.append(_wish(service, addresses))
        with self.wishes.txn() as txn:
            txn.replace_all(wishes)
        self._tell(wrong)

    def _serves(self, service: ClusterService) -> bool:
        spec = service.spec
        return (
            spec.type == "LoadBalancer"
            and not service.terminating
            and (spec.load_balancer_class or "") in self._classes
            and served_by(service.labels, self._proxy)
        )

    def _tell(self, wrong: dict[Key, str]) -> None:
        for key, why in wrong.items():
            if self._wrong.get(key) != why:
                self._log.error("the nodes of a service cannot be listed", service="/".join(key), error=why)
        self._wrong = wrong
        if wrong:
            key, why = next(iter(wrong.items()))
            self._health.degraded(f"service {'/'.join(key)} keeps the addresses it has: {why}")
        else:
            self._health.ok("every selector of nodes can be read")


def _wish(service: ClusterService, addresses: Collection[str]) -> ServiceWish:
    uid = service.metadata.uid
    return ServiceWish(service.namespace, service.name, uid, tuple(addresses), None, conditioned=False)
