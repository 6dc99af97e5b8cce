"""The CiliumEndpoints of a node's pods, over a fake API server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from msgspec.structs import replace

from cells import kubernetes
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from cells.cluster.remote_endpoints import EndpointObjects
from cells.config import AgentConfig, AgentSettings
from cells.endpoint import Endpoint, State, ciliumendpoint, endpoint_table
from cells.endpoint.ciliumendpoint import PodEndpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.kubernetes.objects.cilium_endpoint import NODE_NAME, SLIM_ENDPOINTS
from cells.kubernetes.resources import Resources
from cells.policy.maps import RealizedPolicy, realized_table
from lifecycle import Hive, Lifecycle, ReadTable, Table, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.apiserver import Fault, on
from tests.unit.ciliumendpoint.endpoints import endpoint
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
NODE_IP = "192.0.2.1"
PATH = "/apis/cilium.io/v2/namespaces/default/ciliumendpoints"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")


@pytest.fixture
async def one() -> AsyncIterator[Cluster]:
    async with cluster("ciliumendpoints") as found:
        yield found


class Node:
    """The cell, and the tables that it follows."""

    def __init__(self, hive: Hive) -> None:
        self.endpoints = hive.get(Table[int, Endpoint])
        self.policies = hive.get(Table[int, RealizedPolicy])
        self.shown = hive.get(Table[tuple[str, str], PodEndpoint])
        self.objects = hive.get(Resources).table(SLIM_ENDPOINTS)

    def put(self, row: Endpoint) -> None:
        with self.endpoints.txn() as rows:
            rows.put(row)

    def remove(self, number: int) -> None:
        with self.endpoints.txn() as rows:
            rows.delete(number)


@asynccontextmanager
async def running(served: EndpointObjects | None = None, **options: str) -> AsyncIterator[Node]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def nodes() -> ReadTable[str, ClusterNode]:
        table: Table[str, ClusterNode] = Table("nodes", key=lambda node: node.full_name)
        with table.txn() as rows:
            own = NodeIP(INTERNAL_IP, ip_address(NODE_IP))
            rows.put(ClusterNode(cluster="default", name="node1", source=Source.LOCAL, addresses=(own,)))
        return table

    def needed(
        _: Table[tuple[str, str], PodEndpoint], __: Table[int, Endpoint], ___: Table[int, RealizedPolicy]
    ) -> None: ...

    hive = Hive(
        kubernetes.cell,
        ciliumendpoint.cell,
        provide(nodes, endpoint_table, realized_table),
        *([supply(served)] if served is not None else []),
        supply(known),
        supply(ExposedEndpoints.__new__(ExposedEndpoints), ExposedEndpoints),
        invoke(needed),
        settings={"k8s-client-qps": "0", **{key.replace("_", "-"): one for key, one in options.items()}},
    )
    async with hive.started():
        yield Node(hive)


def found(one: Cluster, name: str = "web") -> dict[str, Any]:
    return one.get("CiliumEndpoint", name, "default") or {}


async def test_with_disable_endpoint_crd_no_ciliumendpoint_is_requested(one: Cluster, tmp_path: Path) -> None:
    one.put(pod("web", app="web"))
    kubeconfig_path = kubeconfig(tmp_path, one.url)
    async with running(EndpointObjects(served=False), k8s_kubeconfig_path=kubeconfig_path) as node:
        node.put(endpoint())
        await eventually(lambda: len(node.shown) == 1)
        assert not [path for method, path in one.server.requests if method != "GET"]


async def test_a_pod_has_an_object_that_follows_it_and_goes_with_it(one: Cluster, tmp_path: Path) -> None:
    web = pod("web", app="web")
    web["spec"]["containers"] = [{"name": "c", "ports": [{"name": "http", "containerPort": 80}]}]
    one.put(web)
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        await eventually(lambda: found(one))
        made = found(one)
        assert made["metadata"]["labels"] == {"app": "web"}
        assert made["metadata"]["annotations"] == {NODE_NAME: "node1"}
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "web", "uid-web")
        assert made["status"] == {
            "id": 7,
            "state": "ready",
            "identity": {"id": 300, "labels": ["k8s:app=web"]},
            "networking": {"addressing": [{"ipv4": "10.0.1.7", "ipv6": "fd00::7"}], "node": NODE_IP},
            "encryption": {},
            "external-identifiers": {
                "cni-attachment-id": "cid7:eth0",
                "container-id": "cid7",
                "k8s-namespace": "default",
                "k8s-pod-name": "web",
                "pod-name": "default/web",
            },
            "named-ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        }
        with node.policies.txn() as rows:
            rows.put(RealizedPolicy(endpoint_id=7, revision=2, ingress_enforced=True))
        await eventually(lambda: "policy" in found(one)["status"])
        assert found(one)["status"]["policy"] == {
            "ingress": {"enforcing": True, "state": "enforcing"},
            "egress": {"enforcing": False, "state": "non-enforcing"},
        }
        written = found(one)["metadata"]["resourceVersion"]
        node.put(endpoint(state=State.REGENERATING))
        node.put(endpoint(identity=301))
        await eventually(lambda: found(one)["status"]["identity"]["id"] == 301)
        assert int(found(one)["metadata"]["resourceVersion"]) > int(written)
        for state in (State.WAITING_FOR_IDENTITY, State.READY):
            node.put(endpoint(identity=301, state=state))
            await eventually(lambda state=state: found(one)["status"]["state"] == state.value)  # type: ignore[misc]
        node.remove(7)
        await eventually(lambda: not found(one))


async def test_foreign_changes_of_a_ciliumendpoint_are_reverted(one: Cluster, tmp_path: Path) -> None:
    one.put(pod("web", app="web"))
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        await eventually(lambda: ("default", "web") in node.objects)  # the watch shows it, not only the store
        one.delete("CiliumEndpoint", "web", "default")
        await eventually(lambda: found(one))
        changed = found(one)
        changed["status"] = {**changed["status"], "identity": {"id": 4}}
        one.put(changed)
        await eventually(lambda: found(one)["status"]["identity"]["id"] == 300)


async def test_an_object_of_cilium_gets_the_name_of_its_node_and_keeps_its_annotations(
    one: Cluster, tmp_path: Path
) -> None:
    one.put(pod("web", app="web"))
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        await eventually(lambda: ("default", "web") in node.objects)
        one.put({**found(one), "metadata": {**found(one)["metadata"], "annotations": {"team": "a"}}})
        wanted = {"team": "a", NODE_NAME: "node1"}
        await eventually(lambda: found(one)["metadata"].get("annotations") == wanted)


async def test_after_a_restart_only_what_differs_is_written_and_what_is_left_over_goes(
    one: Cluster, tmp_path: Path
) -> None:
    one.put(pod("web", app="web"))
    one.put(pod("db", app="db"))
    config = kubeconfig(tmp_path, one.url)
    async with running(k8s_kubeconfig_path=config) as node:
        node.put(endpoint())
        node.put(endpoint(8, pod_name="db"))
        await eventually(lambda: found(one) and found(one, "db"))
    before = found(one)["metadata"]["resourceVersion"]
    elsewhere = json.loads(json.dumps(found(one)).replace(NODE_IP, "192.0.2.2").replace("web", "far"))
    one.put(elsewhere)
    changes = one.server.faults.add(Fault(on(PATH, method="PATCH"), status=500, times=-1))
    async with running(k8s_kubeconfig_path=config) as node:
        node.put(endpoint())
        await eventually(lambda: not found(one, "db"))
        assert found(one)["metadata"]["resourceVersion"] == before
        assert changes.hits == 0
        assert found(one, "far")


async def test_the_ciliumendpoint_of_a_previous_pod_of_the_name_is_replaced(
    one: Cluster, tmp_path: Path
) -> None:
    one.put(pod("web", app="web"))
    config = kubeconfig(tmp_path, one.url)
    async with running(k8s_kubeconfig_path=config) as node:
        node.put(endpoint())
        await eventually(lambda: found(one))
    earlier = found(one)
    earlier["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former"
    earlier["status"]["networking"]["node"] = "192.0.2.2"
    one.put(earlier)
    async with running(k8s_kubeconfig_path=config) as node:
        node.put(endpoint())
        await eventually(lambda: found(one)["metadata"]["ownerReferences"][0]["uid"] == "uid-web")
        assert found(one)["metadata"]["uid"] != earlier["metadata"]["uid"]


async def test_an_older_endpoint_of_the_same_pod_neither_changes_nor_takes_its_object(
    one: Cluster, tmp_path: Path
) -> None:
    """A runtime that is killed makes another sandbox for the pod, and never calls DEL for the first."""
    one.put(pod("web", app="web"))
    one.put(pod("db", app="db"))
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        node.put(endpoint(8, created=2.0))
        await eventually(lambda: found(one) and found(one)["status"]["id"] == 8)
        node.put(endpoint(identity=301))
        node.put(endpoint(8, created=2.0, identity=302))
        await eventually(lambda: found(one)["status"]["identity"]["id"] == 302)
        node.remove(7)
        node.put(endpoint(9, pod_name="db"))
        await eventually(lambda: found(one, "db"))
        row = node.shown.get(("default", "web"))
        assert row is not None
        assert row.status.id == 8
        assert found(one)["status"]["identity"]["id"] == 302
        node.remove(8)
        await eventually(lambda: not found(one))


async def test_an_object_has_legacy_identifiers_only_where_its_endpoint_was_made_with_them(
    one: Cluster, tmp_path: Path
) -> None:
    one.put(pod("web", app="web"))
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        node.put(endpoint(8, disable_legacy_identifiers=True))
        await eventually(lambda: found(one) and found(one, "web-eth0"))
        names = {"k8s-namespace": "default", "k8s-pod-name": "web"}
        assert found(one, "web-eth0")["status"]["external-identifiers"] == {
            "cni-attachment-id": "cid8:eth0",
            **names,
        }
        assert found(one)["status"]["external-identifiers"] == {
            "cni-attachment-id": "cid7:eth0",
            "container-id": "cid7",
            "pod-name": "default/web",
            **names,
        }


async def test_a_server_that_refuses_is_asked_again_later(one: Cluster, tmp_path: Path) -> None:
    one.put(pod("web", app="web"))
    refused = one.server.faults.add(Fault(on(PATH, method="POST"), times=1, status=500))
    async with running(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as node:
        node.put(endpoint())
        await eventually(lambda: found(one), within=30)
        assert refused.hits == 1


async def test_from_manifests_it_is_only_shown(tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(json.dumps(pod("web", app="web")), encoding="utf-8")
    async with running(manifests_dir=str(tmp_path)) as node:
        node.put(endpoint(container_name="web-c"))
        node.put(endpoint(8, pod_name="nobody"))
        node.put(replace(endpoint(9, pod_name="web", disable_legacy_identifiers=True), identity=0))
        with anyio.fail_after(30):
            row = await node.shown.wait_for(("default", "web"))
        assert row.status.identity is not None
        assert row.status.identity.id == 300
        assert row.status.external_identifiers is not None
        assert row.status.external_identifiers.container_name == "web-c"
        assert [each.name for each in node.shown.all()] == ["web"]
