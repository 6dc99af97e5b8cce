"""LB-IPAM and changes of pools, as Cilium's operator handles them one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL

pytestmark = pytest.mark.anyio
SERVICES = Resource("", "services")
POOLS = Resource("cilium.io", "ciliumloadbalancerippools")
IPS = "lbipam.cilium.io/ips"


class Cluster:
    """Pools and services at a server."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def pool(self, name: str, *cidrs: str, **spec: Any) -> None:
        """Create a pool."""
        body = {"blocks": [{"cidr": one} for one in cidrs], **spec}
        kind = {"apiVersion": "cilium.io/v2alpha1", "kind": "CiliumLoadBalancerIPPool"}
        self._server.add({**kind, "metadata": {"name": name}, "spec": body})

    def blocks(self, name: str, *cidrs: str) -> None:
        """Replace the blocks of a pool."""
        live = self._server.store.of(POOLS).objects["", name]
        metadata = {**live["metadata"], "generation": live["metadata"]["generation"] + 1}
        spec = {**live["spec"], "blocks": [{"cidr": one} for one in cidrs]}
        self._server.store.put(POOLS, ("", name), {**live, "metadata": metadata, "spec": spec})

    def service(self, name: str, ips: str = "") -> None:
        """Create a service, or change its requested addresses."""
        annotations = {IPS: ips} if ips else {}
        metadata = {"name": name, "namespace": "default", "annotations": annotations}
        live = self._server.store.get(SERVICES, ("default", name))
        if live is None:
            spec = {"type": "LoadBalancer", "ports": [{"port": 80}]}
            self._server.add({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
            return
        changed = {**live, "metadata": {**live["metadata"], "annotations": annotations}}
        self._server.store.put(SERVICES, ("default", name), changed)

    def addresses(self, name: str) -> list[str]:
        """The addresses of a service, in order."""
        status = self._server.store.of(SERVICES).objects["default", name].get("status") or {}
        return [one["ip"] for one in (status.get("loadBalancer") or {}).get("ingress") or ()]

    def counts(self, name: str) -> list[str]:
        """The numbers of a pool: all addresses, available and used ones; empty if they are outdated."""
        live = self._server.store.of(POOLS).objects["", name]
        generation = live["metadata"]["generation"]
        conditions = (live.get("status") or {}).get("conditions") or ()
        numbers = [one for one in conditions if one["type"].startswith("cilium.io/IPs")]
        if any(one["observedGeneration"] != generation for one in numbers):
            return []
        return [one["message"] for one in numbers]


async def test_an_added_block_is_used_after_those_that_other_pools_had(
    server: ApiServer, operators: Operators
) -> None:
    cluster = Cluster(server)
    async with operators.running(POOL):
        cluster.pool("a", "198.51.100.0/32")
        await eventually(lambda: cluster.counts("a") == ["1", "1", "0"], 30)
        cluster.pool("b", "203.0.113.0/32")
        await eventually(lambda: cluster.counts("b") == ["1", "1", "0"], 30)
        cluster.blocks("a", "192.0.2.0/32", "198.51.100.0/32")
        await eventually(lambda: cluster.counts("a") == ["2", "2", "0"], 30)
        for name, address in (("1", "198.51.100.0"), ("2", "203.0.113.0"), ("3", "192.0.2.0")):
            cluster.service(name)
            await eventually(lambda: cluster.addresses(name) == [address], 30)  # noqa: B023  # it waits here


async def test_an_address_that_is_added_follows_those_of_the_service(
    server: ApiServer, operators: Operators
) -> None:
    cluster = Cluster(server)
    async with operators.running(POOL):
        cluster.pool("p", "203.0.113.0/28")
        cluster.service("s", "203.0.113.5")
        await eventually(lambda: cluster.addresses("s") == ["203.0.113.5"], 30)
        cluster.service("s", "203.0.113.3,203.0.113.5")
        await eventually(lambda: cluster.addresses("s") == ["203.0.113.5", "203.0.113.3"], 30)


async def test_the_numbers_of_a_pool_are_of_its_generation(server: ApiServer, operators: Operators) -> None:
    """Also if they are the same as before."""
    cluster = Cluster(server)
    async with operators.running(POOL):
        cluster.pool("p", "203.0.113.0/28")
        await eventually(lambda: cluster.counts("p") == ["16", "16", "0"], 30)
        cluster.blocks("p", "198.51.100.0/28")
        await eventually(lambda: cluster.counts("p") == ["16", "16", "0"], 30)
