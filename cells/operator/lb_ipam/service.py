"""Plans anew whenever pools or services change.

Needs: LBIPAMSettings, OperatorOptions, ClusterObjects, the tables of wishes.   Gives: LBIPAM.
"""

from __future__ import annotations

from itertools import count

from msgspec.structs import replace

from cells.kubernetes import Key, served_by
from cells.operator.lb_ipam.either import either
from cells.operator.lb_ipam.kinds import LOAD_BALANCER_POOLS
from cells.operator.lb_ipam.plan import Grant, Plan, plan
from cells.operator.lb_ipam.pools import Address, AddressPool, AddressRange, address_pools
from cells.operator.lb_ipam.requests import Request, request_of
from cells.operator.lb_ipam.settings import LBIPAMSettings
from cells.operator.lb_ipam.wishes import PoolWish, ServiceWish, pool_wish, service_wish
from cells.operator.objects import CLUSTER_SERVICES, ClusterObjects, ClusterService
from cells.operator.options import OperatorOptions
from lifecycle import Jobs, Logger, Table


class LBIPAM:
    """Gives addresses to services, once all services and pools are known."""

    def __init__(
        self,
        settings: LBIPAMSettings,
        options: OperatorOptions,
        objects: ClusterObjects,
        service_wishes: Table[ServiceWish],
        pool_wishes: Table[PoolWish],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.active = settings.enable_lb_ipam
        """Whether addresses are ours to give."""
        self._classes = settings.classes
        self._proxy = settings.k8s_service_proxy_name
        self._proto_diff = settings.bpf_lb_proto_diff
        self._versions = [4] * options.enable_ipv4 + [6] * options.enable_ipv6
        self._service_wishes = service_wishes
        self._pool_wishes = pool_wishes
        self._log = log
        self._arrival: dict[Key, int] = {}
        self._given: dict[Key, tuple[str, tuple[Address, ...]]] = {}
        """Service -> its uid and addresses, as they were planned last: its status may not say so yet."""
        self._slept = True
        self._broken: dict[str, str] = {}
        self._clock = count()
        self._age: dict[tuple[str, tuple[AddressRange, ...]], int] = {}
        """When a pool came to have its ranges: those that have had them longest are used first."""
        self.pools: list[AddressPool] = []
        self.plan = Plan({}, {})
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
            await either(pools.wait, services.wait)

    def _pass(self) -> None:
        services = {one.key: one for one in self._services.all()}
        self._arrival = {key: at for key, at in self._arrival.items() if key in services}
        rows = {one.name: one for one in self._pools.all()}
        pools, broken = address_pools(rows.values())
        known = {(one.name, one.ranges): self._age.get((one.name, one.ranges)) for one in pools}
        self._age = {key: next(self._clock) if at is None else at for key, at in known.items()}
        self.pools = sorted(pools, key=lambda one: self._age[one.name, one.ranges])
        self._tell_broken(broken)
        self._slept = self._slept and not rows
        ours = {key: one for key, one in services.items() if self._serves(one)}
        requests = [self._request(ours[key]) for key in sorted(ours, key=self._arrival.__getitem__)]
        self.plan = Plan({}, {}) if self._slept else plan(self.pools, requests)
        self._given = {one.key: (one.uid, self._grant(one.key).addresses) for one in requests}
        by_name = {one.name: one for one in self.pools}
        with self._service_wishes.txn() as txn:
            wishes = [
                service_wish(one, self.plan.grants.get(key))
                for key, one in services.items()
                if not (self._slept and key in ours)  # without pools nothing is said of services
            ]
            txn.replace_all(one for one in wishes if one is not None)
        with self._pool_wishes.txn() as pool_txn:
            found = (pool_wish(row, by_name.get(name), self.plan.used) for name, row in rows.items())
            pool_txn.replace_all(one for one in found if one is not None)

    def _serves(self, service: ClusterService) -> bool:
        spec = service.spec
        return (
            spec.type == "LoadBalancer"
            and (spec.load_balancer_class or "") in self._classes
            and served_by(service.labels, self._proxy)
        )

    def _request(self, service: ClusterService) -> Request:
        request = request_of(service, self._versions, proto_diff=self._proto_diff)
        uid, given = self._given.get(service.key, ("", ()))
        if uid != request.uid or self._slept:
            return request
        return replace(request, has=given)

    def _grant(self, key: Key) -> Grant:
        return self.plan.grants.get(key) or Grant(())

    def _tell_broken(self, broken: dict[str, str]) -> None:
        for name, why in broken.items():
            if self._broken.get(name) != why:
                self._log.error("pool cannot be read", pool=name, error=why)
        self._broken = broken
