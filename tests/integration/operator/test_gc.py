"""Garbage collection deletes unused objects and leaves those that are or may be in use."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import NotFoundError, ServerStatus
from cells.kubernetes.objects.cilium_endpoint import CiliumEndpoint
from cells.kubernetes.objects.cilium_node import CiliumNode
from cells.kubernetes.objects.kind import Key, Meta
from cells.operator.api_server import ClusterAPI
from cells.operator.crds import CustomResources
from cells.operator.gc import CiliumEndpointGC, GCSettings
from cells.operator.objects import ClusterObjects, ClusterPod, PodState
from lifecycle import Jobs, Table
from lifecycle.jobs.jobs import Timer
from lifecycle.testing import eventually, fake
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.apiserver.faults import Fault
from tests.support.operator import Operators

pytestmark = pytest.mark.anyio
IDENTITIES = Resource("cilium.io", "ciliumidentities")
ENDPOINTS = Resource("cilium.io", "ciliumendpoints")
NODES = Resource("cilium.io", "ciliumnodes")
POOL = {"cluster-pool-ipv4-cidr": "10.0.0.0/8"}


def identity(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumIdentity",
        "metadata": {"name": str(number)},
        "security-labels": {"k8s:app": str(number)},
    }


def endpoint(name: str, number: int, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "status": {"id": 1, "identity": {"id": number}},
    }


def pod(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": "one", "containers": [{"name": "c", "image": "example.invalid/c"}]},
    }


def names(server: ApiServer, resource: Resource) -> set[str]:
    return {name for _, name in server.store.of(resource).objects}


async def test_identities_are_deleted_at_most_at_the_rate_limit(
    server: ApiServer, operators: Operators
) -> None:
    values = POOL | {
        "identity-gc-interval": "50ms",
        "identity-heartbeat-timeout": "100ms",
        "identity-gc-rate-interval": "1h",
        "identity-gc-rate-limit": 3,
    }
    async with operators.running(values):
        server.add(pod("used"))
        server.add(endpoint("used", 1000))
        for number in range(1000, 1010):
            server.add(identity(number))
        await eventually(lambda: len(names(server, IDENTITIES)) == 7, 30)
        passes = len(server.requests)
        await eventually(lambda: len(server.requests) > passes + 10, 30)
        assert len(names(server, IDENTITIES)) == 7
        assert "1000" in names(server, IDENTITIES)


async def test_a_ciliumnode_that_cannot_be_deleted_keeps_no_other(
    server: ApiServer, operators: Operators
) -> None:
    """As where an admission webhook refuses one deletion, for ever."""
    refused = Fault(
        lambda one: one.method == "DELETE" and one.path.endswith("/ciliumnodes/a"), times=-1, status=403
    )
    server.faults.add(refused)
    async with operators.running(POOL | {"nodes-gc-interval": "50ms"}):
        for name in ("a", "b"):
            body = {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumNode",
                "metadata": {"name": name},
                "spec": {},
            }
            server.add(body)
        await eventually(lambda: names(server, NODES) == {"a"} and refused.hits > 0, 30)


async def test_the_server_is_asked_for_a_pod_that_the_watch_is_late_with() -> None:
    there = {"late": "Running", "ended": "Failed"}
    deleted: list[str] = []

    async def get(_: object, name: str, namespace: str = "") -> ClusterPod:
        if name not in there:
            raise NotFoundError(ServerStatus(404))
        return ClusterPod(Meta(name=name, namespace=namespace), status=PodState(phase=there[name]))

    async def delete(_: object, name: str, __: str = "", *, uid: str = "", version: str = "") -> bool:
        deleted.append(name)
        return True

    pods: Table[Key, ClusterPod] = Table("pods", key=lambda row: row.key)
    nodes: Table[Key, CiliumNode] = Table("nodes", key=lambda row: row.key)
    endpoints: Table[Key, CiliumEndpoint] = Table("endpoints", key=lambda row: row.key)
    tables = {"Pod": pods, "CiliumNode": nodes, "CiliumEndpoint": endpoints}
    collector = CiliumEndpointGC(
        GCSettings(),
        fake(ClusterAPI, client=fake(Client, get=get, delete=delete)),
        fake(
            ClusterObjects,
            resources=fake(CustomResources, endpoints=True),
            table=lambda kind, _="": tables[kind.kind],
        ),
        jobs=fake(Jobs, timer=lambda *_, **__: Timer(0)),
        log=structlog.get_logger(),
    )
    with endpoints.txn() as rows:
        for name in ("late", "ended", "gone"):
            rows.put(CiliumEndpoint(Meta(name=name, namespace="default", uid=name)))
    await collector.collect()
    assert deleted == ["ended", "gone"]


async def test_ciliumendpoints_without_pods_are_deleted(server: ApiServer, operators: Operators) -> None:
    async with operators.running(POOL | {"cilium-endpoint-gc-interval": "50ms"}):
        server.add(pod("there"))
        server.add(endpoint("there", 1))
        server.add(endpoint("gone", 2))
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "there", "uid": "u"}
        server.add(endpoint("of-there", 3, ownerReferences=[owner]))
        await eventually(lambda: names(server, ENDPOINTS) == {"there", "of-there"}, 30)
