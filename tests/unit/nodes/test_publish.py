"""The agent's writes of its own node to an API server, and fields it leaves to others."""

from __future__ import annotations

from copy import deepcopy
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.base.addresses import Family, IPNetwork
from cells.cluster.nodes.node import ClusterNode
from cells.node.ipam.pools import AssignedPodCIDRs, AssignedPools, PoolRequest
from cells.node.ipam.ranges import PodRange
from lifecycle import Hive, ReadTable, Table
from lifecycle.testing import eventually
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig
from tests.unit.nodes.objects import agent, named, ranges

__all__ = ["named"]

pytestmark = pytest.mark.anyio

NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "n1", "labels": {"zone": "a", "beta": "1"}},
    "spec": {"podCIDRs": ["10.1.0.0/24"], "providerID": "kind://n1"},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
}


def against(there: Cluster, folder: Path, **settings: object) -> Hive:
    return agent(None, k8s_kubeconfig_path=kubeconfig(folder, there.url), **settings)


def written(there: Cluster) -> dict[str, Any]:
    return there.get("CiliumNode", "n1") or {}


def addresses(there: Cluster) -> list[tuple[str, str]]:
    return [(one["type"], one["ip"]) for one in written(there).get("spec", {}).get("addresses", ())]


def labels(there: Cluster) -> dict[str, str]:
    found: dict[str, str] = written(there).get("metadata", {}).get("labels", {})
    return found


async def test_the_agent_makes_its_ciliumnode_and_waits_for_the_operator(tmp_path: Path) -> None:
    async with cluster("ciliumnodes") as there, anyio.create_task_group() as tasks:
        there.put(NODE)
        hive = against(there, tmp_path, exclude_node_label_patterns="^beta")
        started, over = anyio.Event(), anyio.Event()

        async def run() -> None:
            async with hive.started():
                started.set()
                await over.wait()

        tasks.start_soon(run)
        await eventually(lambda: ("InternalIP", "192.0.2.1") in addresses(there))
        made = written(there)
        assert made["metadata"]["labels"] == {"zone": "a"}
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", "n1", "uid-n1")
        assert "instance-id" not in made["spec"]  # of IPAM modes of clouds, which are not served
        assert made["spec"]["bootid"]
        assert not started.is_set()
        there.put({**made, "spec": {**made["spec"], "ipam": {"podCIDRs": ["10.7.0.0/24"]}}})
        with anyio.fail_after(30):
            await started.wait()
        assert ranges(hive) == {"ipv4": ["10.7.0.0/24"]}
        await eventually(lambda: ("CiliumInternalIP", "10.1.0.9") in addresses(there))
        assert written(there)["spec"]["ipam"] == {"podCIDRs": ["10.7.0.0/24"]}
        over.set()


async def test_a_ciliumnode_that_is_deleted_comes_back_and_what_others_wrote_stays(tmp_path: Path) -> None:
    async with cluster("ciliumnodes") as there:
        there.put(NODE)
        async with against(there, tmp_path, ipam="kubernetes").started() as hive:
            await eventually(
                lambda: written(there).get("spec", {}).get("ipam") == {"podCIDRs": ["10.1.0.0/24"]}
            )
            there.delete("CiliumNode", "n1")
            await eventually(lambda: len(addresses(there)) == 2)
            mine = written(there)
            mine["metadata"]["annotations"] = {"their": "own"}
            mine["spec"]["addresses"] = []
            there.put(mine)
            await eventually(lambda: len(addresses(there)) == 2)
            assert written(there)["metadata"]["annotations"]["their"] == "own"
            row = hive.get(ReadTable[str, ClusterNode]).get("default/n1")
            assert row is not None
            assert row.local


async def test_a_ciliumnode_follows_labels_and_identity_of_its_node(tmp_path: Path) -> None:
    async with cluster("ciliumnodes") as there:
        there.put(NODE)
        async with against(there, tmp_path, ipam="kubernetes").started():
            await eventually(lambda: labels(there) == {"zone": "a", "beta": "1"})
            again = deepcopy(NODE)
            again["metadata"] |= {"labels": {"zone": "b"}, "uid": "another"}
            there.put(again)
            await eventually(lambda: labels(there) == {"zone": "b"})
            assert [each["uid"] for each in written(there)["metadata"]["ownerReferences"]] == ["another"]
            again["metadata"]["labels"] = {}
            there.put(again)
            await eventually(lambda: not labels(there))


async def test_annotations_of_cilium_go_from_the_ciliumnode_with_those_of_the_node(tmp_path: Path) -> None:
    def annotations() -> dict[str, str]:
        found: dict[str, str] = written(there).get("metadata", {}).get("annotations", {})
        return found

    router = {"cilium.io/bgp-virtual-router.64512": "router-id=192.0.2.1"}
    async with cluster("ciliumnodes") as there:
        node = deepcopy(NODE)
        node["metadata"]["annotations"] = {**router, "unrelated": "x"}
        there.put(node)
        async with against(there, tmp_path, ipam="kubernetes").started():
            await eventually(lambda: annotations() == router)
            mine = written(there)
            mine["metadata"]["annotations"] = {
                **router,
                "their": "own",
                "network.cilium.io/wg-pub-key": "old",
            }
            there.put(mine)
            await eventually(lambda: annotations() == {**router, "their": "own"})
            node["metadata"]["annotations"] = {}
            there.put(node)
            await eventually(lambda: annotations() == {"their": "own"})


async def test_annotations_of_the_node_object_follow_where_they_are_asked_for(tmp_path: Path) -> None:
    async with cluster("ciliumnodes") as there:
        there.put(NODE)
        async with against(there, tmp_path, ipam="kubernetes", annotate_k8s_node="true").started() as hive:
            assert hive.get(AssignedPodCIDRs).current()
            expected = {
                "network.cilium.io/ipv4-cilium-host": "10.1.0.9",
                "network.cilium.io/ipv4-pod-cidr": "10.1.0.0/24",
            }
            await eventually(
                lambda: (there.get("Node", "n1") or {})["metadata"].get("annotations", {}) == expected
            )


async def test_pools_are_asked_for_and_ranges_given_back_without_touching_what_others_wrote(
    tmp_path: Path,
) -> None:
    async with cluster("ciliumnodes") as there:
        there.put(NODE)
        values = {"ipam": "multi-pool", "ipam_cilium_node_update_rate": "10ms"}
        async with against(there, tmp_path, **values).started() as hive:
            requests, ranges = hive.get(Table[str, PoolRequest]), hive.get(Table[IPNetwork, PodRange])

            def pools() -> Any:
                return written(there).get("spec", {}).get("ipam", {}).get("pools")

            def ask(*rows: PoolRequest) -> None:
                with requests.txn() as txn:
                    txn.replace_all(rows)

            red, old = ip_network("10.9.0.0/28"), ip_network("10.1.0.0/24")
            with ranges.txn() as txn:
                txn.replace_all([PodRange(old, "primary", "default"), PodRange(red, "retired", "red")])
            ask(PoolRequest("default", 16), PoolRequest("red", 1, 2))
            await eventually(lambda: pools() is not None)
            there.delete("CiliumNode", "n1")  # what is made anew holds what pods have
            first = {
                "requested": [
                    {"pool": "default", "needed": {"ipv4-addrs": 16}},
                    {"pool": "red", "needed": {"ipv4-addrs": 1, "ipv6-addrs": 2}},
                ],
                "allocated": [
                    {"pool": "default", "cidrs": ["10.1.0.0/24"]},
                    {"pool": "red", "cidrs": ["10.9.0.0/28"]},
                ],
            }
            await eventually(lambda: pools() == first)
            mine = written(there)
            mine["spec"]["ipam"]["pools"]["allocated"][0]["cidrs"].append("10.2.0.0/24")
            there.put(mine)
            ask(PoolRequest("default", 8, released=(old,)), PoolRequest("red", released=(red,)))
            await eventually(
                lambda: (
                    pools()
                    == {
                        "requested": [{"pool": "default", "needed": {"ipv4-addrs": 8}}],
                        "allocated": [{"pool": "default", "cidrs": ["10.2.0.0/24"]}],
                    }
                )
            )
            state = hive.get(AssignedPools)
            await eventually(lambda: (found := state.pools()) is not None and "red" not in found.allocated)
            found = state.pools()
            assert found is not None
            assert found.allocated == {"default": (ip_network("10.2.0.0/24"),)}
            assert found.requested == {"default": {Family.IPV4: 8, Family.IPV6: 0}}


async def test_no_ciliumnode_is_created_where_the_operator_creates_it(tmp_path: Path) -> None:
    async with cluster("ciliumnodes") as there:
        there.put(NODE)
        off = against(there, tmp_path, ipam="kubernetes", auto_create_cilium_node_resource="false")
        async with off.started() as hive:
            table = hive.get(ReadTable[str, ClusterNode])
            await table.wait_initialized()
            assert not written(there)
