"""A node's multi-pool IPAM with the operator at one API server: requests, assignment, release."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import structlog

from cells import kubernetes
from cells.base.addresses import Family, IPNetwork
from cells.cluster import nodes, pod_pools
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig, AgentSettings
from cells.node import ipam
from cells.node.addresses import NodeAddress, NodeAddresses, Origin
from cells.node.devices import Device
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import IpamLaterError, PodRange
from cells.node.router import Addressing, Router
from lifecycle import Hive, Lifecycle, ReadTable, Table, invoke, replace, supply
from lifecycle.testing import eventually, fake
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.unit.ipam.devices import devices

pytestmark = pytest.mark.anyio
NODES = Resource("cilium.io", "ciliumnodes")


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    one.crd_delay = 0
    async with one.serving():
        yield one


def node(folder: Path) -> Hive:
    """The addresses of node n1, without a kernel."""
    known = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())
    routers = {Family.IPV4: Addressing(ip_address("10.0.0.9"), ip_network("10.0.0.0/28"))}
    own: Table[Family, NodeAddress] = Table("node-addresses", key=lambda row: row.family)
    with own.txn() as txn:
        txn.put(NodeAddress(Family.IPV4, ip_address("192.0.2.1"), Origin.DEVICE))

    def needed(_: Ipam, __: ReadTable[str, ClusterNode]) -> None: ...

    return Hive(
        kubernetes.cell,
        nodes.cell,
        pod_pools.cell,
        ipam.cell,
        supply(known),
        supply(devices(), type=Table[int, Device]),
        supply(own, type=Table[Family, NodeAddress]),
        replace(
            NodeAddresses,
            fake(NodeAddresses, table=own, all=lambda: {one.family: one.ip for one in own.all()}),
        ),
        replace(Router, fake(Router, addressing=lambda: routers)),
        invoke(needed),
        settings={
            "k8s-kubeconfig-path": str(folder / "kubeconfig"),
            "ipam": "multi-pool",
            "ipam-cilium-node-update-rate": "10ms",
            "ipam-multi-pool-pre-allocation": "default=4",
        },
    )


def pool(name: str, cidr: str) -> dict[str, Any]:
    spec = {"ipv4": {"cidrs": [cidr], "maskSize": 29}}
    kind = {"apiVersion": "cilium.io/v2alpha1", "kind": "CiliumPodIPPool"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


async def test_a_node_has_what_its_pods_need_of_each_pool_and_no_more(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "n1")
    operators = Operators(server, tmp_path)
    values = {
        "ipam": "multi-pool",
        "auto-create-cilium-pod-ip-pools": "default=ipv4-cidrs:10.0.0.0/24;ipv4-mask-size:29",
    }

    def held() -> dict[str, list[str]]:
        found = server.store.get(NODES, ("", "n1")) or {"spec": {}}
        pools = found["spec"].get("ipam", {}).get("pools", {}).get("allocated") or []
        return {one["pool"]: one["cidrs"] for one in pools}

    async with operators.running(values):
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
        chosen = {"name": "web", "namespace": "shop", "annotations": {"ipam.cilium.io/ip-pool": "red"}}
        spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "example.invalid/c"}]}
        server.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}})
        server.add(space)
        server.add({"apiVersion": "v1", "kind": "Pod", "metadata": chosen, "spec": spec})
        async with node(tmp_path).started() as hive:
            addresses = hive.get(Ipam)
            addresses.forget_retired()
            assert held() == {"default": ["10.0.0.0/29"]}
            pods = [addresses.allocate_next("router")[0] for _ in range(6)]
            await eventually(lambda: held() == {"default": ["10.0.0.0/29", "10.0.0.8/29"]})
            with pytest.raises(IpamLaterError):
                addresses.allocate_next("shop/web")
            server.add(pool("red", "10.9.0.0/24"))
            await eventually(lambda: "red" in held())
            await eventually(
                lambda: "red" in {row.pool for row in hive.get(Table[IPNetwork, PodRange]).all()}
            )
            web = addresses.allocate_next("shop/web")[0]
            assert (web.pool, web.ip in ip_network("10.9.0.0/29")) == ("red", True)
            for one in (*pods, web):
                addresses.release(one.ip, one.pool)
            await eventually(lambda: held() == {"default": ["10.0.0.0/29"]})
            state = json.loads((tmp_path / "pod-pools.json").read_text())
            assert state == {"default": ["10.0.0.0/29"]}
            assert addresses.allocate_next("router")[0].ip in ip_network("10.0.0.0/29")
