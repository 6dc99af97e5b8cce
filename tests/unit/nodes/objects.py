"""Kubernetes objects of a node, and an agent that waits for them."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import structlog

from cells import kubernetes
from cells.base.addresses import Family, IPNetwork
from cells.cluster import nodes
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig, AgentSettings
from cells.node.addresses import NodeAddress, NodeAddresses, Origin
from cells.node.ipam.pools import AssignedPodCIDRs, AssignedPools, PoolRequest
from cells.node.ipam.ranges import PodRange
from cells.node.ipam.settings import IpamSettings, pod_addressing
from cells.node.router import Addressing, Router
from lifecycle import Hive, Lifecycle, ReadTable, Table, config, invoke, provide, replace, supply
from lifecycle.testing import fake


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "n1")


def agent(folder: Path | None, **settings: object) -> Hive:
    """Run the nodes cell over the objects of a folder, without a kernel."""
    state_dir = Path(str(settings.pop("state_dir", "/nowhere")))
    known = AgentConfig(AgentSettings(state_dir=state_dir), Lifecycle("test"), structlog.get_logger())
    routers = {Family.IPV4: Addressing(ip_address("10.1.0.9"), ip_network("10.1.0.0/24"))}
    own: Table[Family, NodeAddress] = Table("node-addresses", key=lambda row: row.family)
    with own.txn() as txn:
        txn.put(NodeAddress(Family.IPV4, ip_address("192.0.2.1"), Origin.DEVICE))

    pods: Table[IPNetwork, PodRange] = Table("pod-ranges", key=lambda row: row.network)
    with pods.txn() as writing:
        writing.put(PodRange(ip_network("10.1.0.0/24"), "primary", "default"))

    requests: Table[str, PoolRequest] = Table("pod-pool-requests", key=lambda row: row.pool)

    def needed(_: AssignedPodCIDRs, __: ReadTable[str, ClusterNode], ___: AssignedPools) -> None: ...

    given = {"manifests-dir": str(folder)} if folder is not None else {}
    return Hive(
        kubernetes.cell,
        nodes.cell,
        config(IpamSettings),
        provide(pod_addressing),
        supply(known),
        supply(own, type=Table[Family, NodeAddress]),
        supply(pods, type=Table[IPNetwork, PodRange]),
        supply(requests, type=Table[str, PoolRequest]),
        replace(
            NodeAddresses,
            fake(NodeAddresses, table=own, all=lambda: {one.family: one.ip for one in own.all()}),
        ),
        replace(Router, fake(Router, addressing=lambda: routers)),
        invoke(needed),
        settings=given | {name.replace("_", "-"): value for name, value in settings.items()},
    )


def ranges(hive: Hive) -> dict[str, list[str]]:
    current = hive.get(AssignedPodCIDRs).current()
    return {str(family): [str(each) for each in cidrs] for family, cidrs in current.items()}
