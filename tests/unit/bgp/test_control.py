"""The BGP control plane in a hive: objects of an API server in, desired speakers and a status out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from msgspec import structs

from cells import kubernetes
from cells.base.addresses import IPAddress, IPNetwork
from cells.bgp import FOLDER, BGPSettings, control
from cells.bgp.control import BGPControl, BGPSessions
from cells.bgp.speaker_processes import end_speakers
from cells.bgp.speaker_state import (
    IPV4_UNICAST,
    FamilyCounts,
    ObservedPeer,
    PeerState,
    observed_peers,
)
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.config import AgentConfig, AgentSettings
from cells.config import shared as service_settings
from cells.kubernetes.objects.core import ENDPOINT_SLICES, SERVICES
from cells.kubernetes.resources import Resources
from cells.kubernetes.sink import SourceStatus
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import PodRange
from cells.services import ServiceName
from cells.services.control.tables import refused_addresses
from cells.services.model.claims import EXTERNAL_IPS, RefusedAddress
from lifecycle import Hive, Lifecycle, ReadTable, StartError, Table, Tables, config, invoke, provide, replace
from lifecycle.admin.plain import plain
from lifecycle.testing import eventually, fake
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, User
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL
from tests.unit.kubernetes.cluster import kubeconfig

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def of_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "n1")


ALPHA: Final = "cilium.io/v2alpha1"
NODE_CONFIGS = Resource("cilium.io", "ciliumbgpnodeconfigs")
PEER: Final = ("tor", ip_address("192.0.2.1"))
VIP: Final = ip_network("203.0.113.7/32")
UNANNOUNCED, SECOND = ip_network("192.0.2.0/24"), ip_network("10.1.1.0/24")


def body(
    kind: str, name: str, spec: dict[str, Any], *, version: str = ALPHA, **metadata: Any
) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


OBJECTS: Final = [
    body("CiliumNode", "n1", {}, version="cilium.io/v2"),
    body(
        "CiliumBGPClusterConfig",
        "all",
        {
            "bgpInstances": [
                {
                    "name": "tor",
                    "localASN": 65001,
                    "peers": [
                        {
                            "name": "one",
                            "peerAddress": str(PEER[1]),
                            "peerASN": 65000,
                            "peerConfigRef": {"name": "rack"},
                        }
                    ],
                }
            ]
        },
    ),
    body(
        "CiliumBGPPeerConfig",
        "rack",
        {
            "authSecretRef": "tor",
            "families": [{"afi": "ipv4", "safi": "unicast", "advertisements": {}}],
        },
    ),
    body(
        "CiliumBGPAdvertisement",
        "all",
        {
            "advertisements": [
                {"advertisementType": "PodCIDR"},
                {
                    "advertisementType": "Service",
                    "service": {"addresses": ["ExternalIP"]},
                    "selector": {},
                },
            ]
        },
    ),
    {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "tor", "namespace": "kube-system"},
        "data": {"password": "c2Vzc2FtZQ=="},
    },
    body("CiliumBGPPeeringPolicy", "old", {"virtualRouters": [{"localASN": 1, "neighbors": [
        {"peerAddress": "192.0.2.1/32", "peerASN": 2}]}]}),
    body(
        "Service",
        "web",
        {
            "ports": [{"port": 80}],
            "externalIPs": [str(VIP.network_address)],
            "externalTrafficPolicy": "Local",
            "type": "NodePort",
        },
        version="v1",
        namespace="default",
    ),
]  # fmt: skip


def backends(node: str) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"web-{node}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.1.0.9"], "nodeName": node, "conditions": {"ready": True}}],
        "ports": [{"port": 80, "name": "", "protocol": "TCP"}],
    }


@asynccontextmanager
async def agent(folder: Path, **settings: str) -> AsyncIterator[Hive]:
    """The cells of BGP for a node with one pod CIDR."""
    known = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())

    def nodes() -> ReadTable[str, ClusterNode]:
        found: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.name)
        addresses = (NodeIP("InternalIP", ip_address("192.0.2.11")),)
        found.put(
            ClusterNode(
                cluster="default",
                name="n1",
                source=Source.LOCAL,
                addresses=addresses,
                unannounced=(UNANNOUNCED,),
            )
        )
        return found

    def ranges() -> Table[IPNetwork, PodRange]:
        found: Table[IPNetwork, PodRange] = Table("pod-ranges", key=lambda row: row.network)
        found.put(PodRange(ip_network("10.1.0.0/24"), "primary"))
        return found

    hive = Hive(
        kubernetes.cell,
        service_settings.cell,
        control.cell,
        replace(AgentConfig, known),
        replace(Ipam, fake(Ipam, mode="cluster-pool")),
        provide(nodes, ranges, refused_addresses),
        settings={
            "k8s-client-qps": "0",
            "bgp-secrets-namespace": "kube-system",
            **{key.replace("_", "-"): value for key, value in settings.items()},
        },
    )
    try:
        async with hive.started():
            yield hive
    finally:
        end_speakers(folder)


def test_a_damaged_record_of_a_speaker_is_left_out(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "damaged.json").write_bytes(b'{"name":"\xff"}')
    assert not end_speakers(tmp_path)


@asynccontextmanager
async def server() -> AsyncIterator[ApiServer]:
    found = ApiServer({ADMIN_TOKEN: User("admin", ("system:masters",))})
    found.crd_delay = 0
    async with found.serving():
        yield found


def reached(one: ApiServer, folder: Path) -> dict[str, str]:
    return {"k8s_kubeconfig_path": kubeconfig(folder, f"http://127.0.0.1:{one.port}")}


async def test_while_the_kinds_are_not_served_nothing_is_known(tmp_path: Path) -> None:
    """An agent that starts before the CRDs are served withdraws no routes of a running speaker."""
    async with (
        server() as one,
        agent(tmp_path, **reached(one, tmp_path), enable_bgp_control_plane="true") as hive,
    ):
        sources = hive.get(Table[str, SourceStatus])
        kinds = ("ciliumbgpnodeconfigs", "ciliumbgppeerconfigs", "ciliumbgpadvertisements")
        for kind in kinds:
            await sources.wait_for(f"{kind}.cilium.io", lambda status: status.state == "absent")
        assert not any(table.initialized for table in hive.get(BGPControl).wanted)


async def test_an_agent_follows_what_the_operator_makes_and_reports_its_sessions(tmp_path: Path) -> None:
    on = {**POOL, "enable-bgp-control-plane": "true", "bgp-secrets-namespace": "kube-system"}
    async with server() as one:
        async with Operators(one, tmp_path).running(on):
            one.definitions.fresh.clear()  # their storage is ready at once
            for each in OBJECTS:
                one.add(each)
            await eventually(lambda: one.store.get(NODE_CONFIGS, ("", "n1")) is not None, 30)
        on_node = {"enable_bgp_control_plane": "true", "external_bgp_speaker": "true"}  # none runs
        async with agent(tmp_path, **reached(one, tmp_path), **on_node) as hive:
            await follows(one, hive)


async def follows(one: ApiServer, hive: Hive) -> None:
    found = hive.get(BGPControl)
    wanted = found.wanted
    await wanted.paths.wait_initialized()
    assert {row.prefix for row in wanted.paths.all()} == {ip_network("10.1.0.0/24")}
    peer = wanted.peers.get(PEER)
    assert peer is not None
    assert peer.password is not None
    assert peer.password.reveal() == "sessame"
    shown = [[plain(row) for row in table.all()] for table in hive.get(Tables).all()]
    assert "sessame" not in str(shown), "no table shows a password"
    assert "(hidden)" in str(shown)
    await eventually(lambda: len(found.faults) == 1)
    assert "CiliumBGPClusterConfig instead" in found.faults.all()[0].error

    one.add(backends("n1"))
    await eventually(lambda: VIP in {row.prefix for row in wanted.paths.all()})
    assert ("tor", "one-ipv4-Service-web-default-ExternalIP") in wanted.policies
    refused = hive.get(Table[tuple[str, str, str], RefusedAddress])
    with refused.txn() as rows:
        web, ip = ServiceName("default", "web"), VIP.network_address
        rows.put(RefusedAddress(web, ip, EXTERNAL_IPS, "is an address of node n2", announced_only=True))
    await eventually(lambda: VIP not in {row.prefix for row in wanted.paths.all()})
    with refused.txn() as rows:
        rows.replace_all([])
    await eventually(lambda: VIP in {row.prefix for row in wanted.paths.all()})
    with hive.get(Table[IPNetwork, PodRange]).txn() as ranges:
        ranges.put(PodRange(UNANNOUNCED, "secondary"))
        ranges.put(PodRange(SECOND, "secondary"))
    await eventually(lambda: SECOND in {row.prefix for row in wanted.paths.all()})
    assert UNANNOUNCED not in {row.prefix for row in wanted.paths.all()}

    before = found.plans.revision
    one.add(backends("n2"))
    await hive.get(Resources).table(ENDPOINT_SLICES).wait_for(("default", "web-n2"))
    assert found.plans.revision == before, "backends of other nodes are no news"

    since = datetime(2026, 11, 1, tzinfo=UTC)
    counts = (FamilyCounts(IPV4_UNICAST, 3, 0, 2),)
    session = ObservedPeer("tor", PEER[1], 65000, 65001, 179, PeerState.ESTABLISHED, since, 90, 30, counts)
    observed = hive.get(Table[tuple[str, IPAddress], ObservedPeer])

    def status() -> Any:
        if observed.get(session.key) is None:  # a list of the sessions of no speaker has removed it
            observed.put(session)
        return (one.store.get(NODE_CONFIGS, ("", "n1")) or {}).get("status")

    expected = {
        "name": "one",
        "peerAddress": "192.0.2.1",
        "peerASN": 65000,
        "peeringState": "established",
        "timers": {"appliedHoldTimeSeconds": 90, "appliedKeepaliveSeconds": 30},
        "establishedTime": "2026-11-01T00:00:00Z",
        "routeCount": [{"afi": "ipv4", "safi": "unicast", "received": 3, "advertised": 2}],
    }
    instances = [{"name": "tor", "localASN": 65001, "peers": [expected]}]
    await eventually(lambda: status() == {"bgpInstances": instances}, 20)


async def test_health_shows_why_sessions_are_down() -> None:
    hive = Hive(
        provide(observed_peers),
        provide(BGPSessions),
        invoke(BGPSessions),
        config(BGPSettings),
        settings={"enable-bgp-control-plane": "true"},
    )
    down = ObservedPeer("tor", PEER[1], 65000, 65001, 179, PeerState.ACTIVE, error="bad peer AS")
    async with hive.started():

        def shown() -> str:
            return " ".join(one.message for one in hive.health.snapshot())

        observed = hive.get(Table[tuple[str, IPAddress], ObservedPeer])
        observed.put(down)
        await eventually(lambda: "tor: 192.0.2.1: bad peer AS" in shown())
        observed.put(structs.replace(down, state=PeerState.ESTABLISHED))
        await eventually(lambda: "bad peer AS" not in shown())


async def test_without_bgp_nothing_is_followed_or_loaded(tmp_path: Path) -> None:
    async with server() as one, agent(tmp_path, **reached(one, tmp_path)) as hive:
        await hive.get(Resources).table(SERVICES).wait_initialized()
        wanted = hive.get(BGPControl).wanted
        assert all(table.initialized and not table.all() for table in wanted)
        assert [path for path in map(str, one.requests) if "bgp" in path or "secrets" in path] == []


def test_the_controller_is_loaded_where_bgp_is_on() -> None:
    script = (
        "import sys, cells.bgp.control\n"
        "late = ('controller', 'advertisements', 'sessions', 'speaker', 'gobgpd')\n"
        "print([name for name in late if 'cells.bgp.' + name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


async def test_without_a_source_of_objects_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="there is no source of objects"):
        async with agent(tmp_path, enable_bgp_control_plane="true"):
            pass
