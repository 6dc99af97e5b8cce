"""Routes that a router receives of an agent, from CRDs in a folder to FRR's table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import structlog

from cells import kubernetes
from cells.base.addresses import IPNetwork
from cells.bgp import control
from cells.bgp.control import BGPControl
from cells.bgp.rest import BGPState
from cells.bgp.speaker_processes import end_speakers
from cells.bgp.speaker_state import IPV4_UNICAST, PeerState, RouteTable
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.config import AgentConfig, AgentSettings
from cells.config import shared as service_settings
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import PodRange
from cells.services.control.tables import refused_addresses
from lifecycle import Hive, Lifecycle, ReadTable, Table, invoke, provide, replace
from lifecycle.testing import eventually, fake
from tests.support.bgp import FRR, NODE, gobgpd_pids, routers

PODS, WEB = "10.244.1.0/24", "203.0.113.7/32"
RESOURCES = f"""
apiVersion: cilium.io/v2alpha1
kind: CiliumBGPNodeConfig
metadata: {{name: n1}}
spec:
  bgpInstances:
    - name: edge
      localASN: 65001
      peers: [{{name: tor, peerAddress: {FRR}, peerASN: 65101, peerConfigRef: {{name: tor}}}}]
---
apiVersion: cilium.io/v2alpha1
kind: CiliumBGPPeerConfig
metadata: {{name: tor}}
spec:
  authSecretRef: tor
  timers: {{connectRetryTimeSeconds: 1, holdTimeSeconds: 9, keepAliveTimeSeconds: 3}}
  gracefulRestart: {{enabled: true, restartTimeSeconds: 60}}
  families: [{{afi: ipv4, safi: unicast, advertisements: {{}}}}]
---
apiVersion: cilium.io/v2alpha1
kind: CiliumBGPAdvertisement
metadata: {{name: all}}
spec:
  advertisements:
    - advertisementType: PodCIDR
      attributes: {{communities: {{standard: ["65001:100"], wellKnown: [no-export], large: ["65001:1:2"]}}}}
    - advertisementType: Service
      service: {{addresses: [LoadBalancerIP]}}
      selector: {{}}
---
apiVersion: v1
kind: Secret
metadata: {{name: tor, namespace: kube-system}}
data: {{password: c2VzYW1l}}
"""
SERVICE = f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: default}}
spec: {{type: LoadBalancer, clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9], ports: [{{port: 80}}]}}
status: {{loadBalancer: {{ingress: [{{ip: {WEB.partition("/")[0]}}}]}}}}
"""


@asynccontextmanager
async def agent(folder: Path, *, on: bool = True) -> AsyncIterator[Hive]:
    """The part of an agent that has to do with BGP, its objects from a folder."""
    known = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())

    def nodes() -> ReadTable[str, ClusterNode]:
        found: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.name)
        addresses = (NodeIP("InternalIP", ip_address(NODE)),)
        found.put(ClusterNode(cluster="default", name="n1", source=Source.LOCAL, addresses=addresses))
        return found

    def ranges() -> Table[IPNetwork, PodRange]:
        found: Table[IPNetwork, PodRange] = Table("pod-ranges", key=lambda row: row.network)
        found.put(PodRange(ip_network(PODS), "primary"))
        return found

    hive = Hive(
        kubernetes.cell,
        service_settings.cell,
        control.cell,
        replace(AgentConfig, known),
        replace(Ipam, fake(Ipam, mode="cluster-pool")),
        provide(nodes, ranges, refused_addresses),
        invoke(BGPState),
        settings={
            "manifests-dir": str(folder / "manifests"),
            "bgp-secrets-namespace": "kube-system",
            "enable-bgp-control-plane": "true" if on else "false",
        },
    )
    async with hive.started():
        yield hive


async def test_resources_become_routes_of_a_router_and_an_agents_end_takes_none(
    in_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "n1")
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "bgp.yaml").write_text(RESOURCES)
    (manifests / "web.yaml").write_text(SERVICE)
    with routers(tmp_path) as far:
        try:
            async with agent(tmp_path) as hive:
                await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
                route = far.frr_routes()[PODS]
                assert set(route["community"]["list"]) == {"65001:100", "noExport"}
                assert route["largeCommunity"]["string"] == "65001:1:2"
                state = hive.get(BGPState)
                await eventually(
                    lambda: [one.state for one in state.observed.all()] == [PeerState.ESTABLISHED]
                )
                await eventually(lambda: state.observed.all()[0].families[0].advertised >= 2)
                sent = await state.listing.listed_routes(
                    "edge", RouteTable.ADJ_RIB_OUT, IPV4_UNICAST, ip_address(FRR)
                )
                assert {str(one.prefix) for one in sent} == {PODS, WEB}
                assert hive.get(BGPControl).faults.all() == []
                (manifests / "web.yaml").unlink()
                await eventually(lambda: set(far.frr_routes()) == {PODS})
            updates, pids = far.frr_updates(), gobgpd_pids(tmp_path)
            async with agent(tmp_path):
                (manifests / "web.yaml").write_text(SERVICE)
                await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
                assert far.frr_sessions() == ("Established", 1)
                assert far.frr_updates() == updates + 1, "a new agent repeats nothing"
                assert gobgpd_pids(tmp_path) == pids
            async with agent(tmp_path, on=False):
                await eventually(lambda: not gobgpd_pids(tmp_path))
                await eventually(lambda: not far.frr_routes())
        finally:
            end_speakers(tmp_path)
