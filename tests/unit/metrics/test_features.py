"""Feature metrics: each follows from a fact of the cell that has the feature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cells import unsupported
from cells.base.metrics import Collector, features
from cells.cluster.allocation import allocation_features
from cells.cluster.allocation.global_allocator import AllocationMode
from cells.cluster.nodes import peer_features
from cells.cluster.nodes.parse import RulePeerSettings
from cells.cluster.remote_endpoints import EndpointObjects
from cells.clustermesh import mesh_features
from cells.clustermesh.tables import MeshTables, RemoteCluster, RemoteClusterConfig
from cells.config import AgentConfig, drift
from cells.config import shared as service_settings
from cells.config.shared import AnnouncementSettings
from cells.datapath.settings import DatapathSettings, service_programs
from cells.encryption.ipsec.active_key import IpsecKeys
from cells.encryption.wireguard import encryption_features
from cells.encryption.wireguard.settings import EncryptionSettings
from cells.observe import metrics
from cells.policy.control import rule_features
from cells.policy.rules import PolicyOptions
from cells.proxy.envoy import envoy_features
from cells.proxy.envoy.ports import EnvoyProgram
from cells.remote.endpoints import endpoint_features
from cells.services import LoadBalancerOptions
from cells.services.announcements import announcement_features
from cells.services.control import balancer_features
from cells.services.node_ports import ForwardingSettings, NodePortMode, node_port_features
from cells.tunnel.settings import PodTunnel
from lifecycle import Cell, Hive, Member, Sources, Table, config, module, provide, supply
from tests.support.ports import free_port
from tests.support.scrape import Samples, scraped

pytestmark = pytest.mark.anyio


def made(kind: Any, **facts: object) -> Any:
    """One with these attributes, which starts nothing."""
    found = kind.__new__(kind)
    for name, value in facts.items():
        setattr(found, name, value)
    return found


async def features_of(
    *cells: Cell, settings: Mapping[str, object] | None = None, config_dir: Path | None = None
) -> dict[str, Samples]:
    """What the port serves of features, without the names' beginning: label values to number."""
    port = free_port()
    agent = made(AgentConfig, max_connected_clusters=511)
    given = {"prometheus-serve-addr": f":{port}", **(settings or {})}
    flags = [f"--{name}={value}" for name, value in given.items()]
    hive = Hive(metrics.cell, supply(agent), *cells, settings=Sources(flags, config_dir=config_dir))
    async with hive.started():
        found = await scraped(port)
    before = "cilium_feature_"
    return {name.removeprefix(before): each for name, each in found.items() if name.startswith(before)}


def in_use(samples: Samples) -> Samples:
    return {labels: value for labels, value in samples.items() if value}


@pytest.mark.parametrize("on", [False, True])
async def test_features_without_modes_are_0_or_1(on: bool) -> None:
    options = LoadBalancerOptions(
        enable_internal_traffic_policy=on, enable_sctp=on, enable_local_redirect_policy=on
    )
    rules = PolicyOptions(enable_host_firewall=on, enable_non_default_deny_policies=on)
    found = await features_of(
        *map(supply, (options, rules, EndpointObjects(slices=on))),
        provide(balancer_features, rule_features, endpoint_features),
        service_settings.cell,
        module("l2", "L2", config(AnnouncementSettings), provide(announcement_features)),
        settings={"kube-proxy-replacement": on, "enable-l2-announcements": on},
    )
    assert found == {
        name: {(): float(on)}
        for name in (
            "adv_connect_and_lb_k8s_internal_traffic_policy_enabled",
            "adv_connect_and_lb_kube_proxy_replacement_enabled",
            "adv_connect_and_lb_l2_lb_enabled",
            "adv_connect_and_lb_sctp_enabled",
            "controlplane_cilium_endpoint_slices_enabled",
            "network_policies_host_firewall_enabled",
            "network_policies_local_redirect_policy_enabled",
            "network_policies_non_defaultdeny_policies_enabled",
        )
    }


async def test_features_that_the_agent_lacks_are_never_in_use() -> None:
    found = await features_of(unsupported.cell)
    assert found == {
        "adv_connect_and_lb_bandwidth_manager_enabled": {(): 0},
        "adv_connect_and_lb_cilium_envoy_config_enabled": {(): 0},
        "adv_connect_and_lb_l2_pod_announcement_enabled": {(): 0},
        "adv_connect_and_lb_vtep_enabled": {(): 0},
        "network_policies_cilium_clusterwide_envoy_config_total": {("add",): 0, ("delete",): 0},
        "network_policies_cilium_envoy_config_total": {("add",): 0, ("delete",): 0},
        "network_policies_mutual_auth_enabled": {(): 0},
    }


@pytest.mark.parametrize("mode", AllocationMode)
async def test_the_mode_of_identities_is_1_and_the_others_are_0(mode: AllocationMode) -> None:
    found = await features_of(supply(mode), provide(allocation_features))
    assert found == {
        "controlplane_identity_allocation": {(each.value,): float(each is mode) for each in AllocationMode}
    }


async def test_the_node_port_configuration_is_one_of_all_combinations() -> None:
    programs = service_programs(DatapathSettings(bpf_lb_acceleration="native"))
    forwarding = ForwardingSettings(bpf_lb_mode="dsr", bpf_lb_algorithm="maglev")
    mode = NodePortMode(forwarding, programs, PodTunnel(used=False))
    found = await features_of(supply(mode), supply(programs), provide(node_port_features))
    samples = found["adv_connect_and_lb_node_port_configuration"]
    assert len(samples) == 3 * 2 * 4
    assert in_use(samples) == {("dsr", "maglev", "native"): 1}


@pytest.mark.parametrize(
    ("ipsec", "settings", "expected"),
    [
        (False, {}, {}),
        (True, {}, {("ipsec", "false"): 1}),
        (False, {"enable-wireguard": True}, {("wireguard", "false"): 1}),
        (False, {"enable-wireguard": True, "encrypt-node": True}, {("wireguard", "true"): 1}),
    ],
)
async def test_encryption_names_its_kind_and_whether_nodes_are_encrypted(
    ipsec: bool, settings: dict[str, object], expected: Samples
) -> None:
    wireguard = module("encryption", "E.", config(EncryptionSettings), provide(encryption_features))
    found = await features_of(supply(made(IpsecKeys, enabled=ipsec)), wireguard, settings=settings)
    samples = found["adv_connect_and_lb_transparent_encryption"]
    assert (len(samples), in_use(samples)) == (4, expected)


@pytest.mark.parametrize(
    ("external", "path", "expected"),
    [
        (True, None, {("standalone",): 1}),
        (False, Path("/usr/bin/envoy"), {("embedded",): 1}),
        (False, None, {}),
    ],
)
async def test_envoy_is_in_a_mode_if_there_is_one(
    external: bool, path: Path | None, expected: Samples
) -> None:
    program = made(EnvoyProgram, external=external, path=path)
    found = await features_of(supply(program), provide(envoy_features))
    samples = found["adv_connect_and_lb_envoy_proxy_enabled"]
    assert (len(samples), in_use(samples)) == (2, expected)


@pytest.mark.parametrize("modes", ["", "nodes", "nodes,pods"])
async def test_modes_of_networks_in_policies_are_added_to_declared_ones(modes: str) -> None:
    peers = module("peers", "P.", config(RulePeerSettings), provide(peer_features))
    found = await features_of(peers, settings={"policy-cidr-match-mode": modes})
    expected = {(mode,): 1.0 for mode in modes.split(",") if mode}
    assert found == {"network_policies_cidr_policies": {("world",): 0, ("remote-node",): 0, **expected}}


@pytest.mark.parametrize(
    ("mode", "direct"),
    [
        (AllocationMode.CRD, "clustermesh-apiserver"),
        (AllocationMode.KVSTORE, "etcd"),
        (AllocationMode.DOUBLEWRITE_READCRD, "clustermesh-apiserver_or_etcd"),
    ],
)
async def test_connected_clusters_are_counted_by_how_they_publish(mode: AllocationMode, direct: str) -> None:
    clusters: Table[str, RemoteCluster] = Table("remote-clusters", key=lambda row: row.name)
    known = RemoteClusterConfig(retrieved=True)
    cached = RemoteClusterConfig(retrieved=True, kvstoremesh=True)
    with clusters.txn() as rows:
        for name, found in (("a", known), ("b", known), ("c", cached)):
            rows.put(RemoteCluster(name=name, connected=True, config=found))
        rows.put(RemoteCluster(name="lost", config=known))
        rows.put(RemoteCluster(name="new", connected=True, config=RemoteClusterConfig()))
    mesh = made(MeshTables, clusters=clusters)
    served = await features_of(supply(mesh), supply(mode), provide(mesh_features))
    samples = served["adv_connect_and_lb_clustermesh_enabled"]
    assert len(samples) == 4 * 2
    assert in_use(samples) == {(direct, "511"): 2, ("kvstoremesh", "511"): 1}


@pytest.mark.parametrize(
    ("sources", "on"),
    [
        ('[{"kind": "config-map", "namespace": "kube-system", "name": "cilium-config"}]', 0),
        ('[{"kind": "cilium-node-config", "namespace": "kube-system", "name": "gpu"}]', 1),
        (None, 0),
    ],
)
async def test_configs_of_nodes_are_in_use_where_the_configuration_was_made_of_them(
    tmp_path: Path, sources: str | None, on: int
) -> None:
    if sources is not None:
        (tmp_path / "config-sources").write_text(sources)
    found = await features_of(provide(drift.config_features), config_dir=tmp_path)
    assert found == {"adv_connect_and_lb_cilium_node_config_enabled": {(): on}}


@pytest.mark.parametrize(("chosen", "modes"), [("veth", 4), ("odd", 5)])
async def test_an_unknown_mode_is_added_to_known_ones(chosen: str, modes: int) -> None:
    def mode() -> Member[Collector]:
        return features("mode", lambda: {"datapath_config": chosen})

    found = await features_of(provide(mode))
    assert len(found["datapath_config"]) == modes
    assert in_use(found["datapath_config"]) == {(chosen,): 1}
