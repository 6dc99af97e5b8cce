"""disable-endpoint-crd publishes pods in the kvstore only; without one it has no effect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from cells.cluster.remote_endpoints import ClusterEndpointSettings, endpoint_objects
from cells.kvstore.store import KVStore
from lifecycle import HiveError
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.etcd import Etcd
from tests.support.operator import Operators
from tests.support.operator.running import POOL
from tests.unit.cluster_endpoints.remote import cep

pytestmark = pytest.mark.anyio
ENDPOINTS = Resource("cilium.io", "ciliumendpoints")
CRDS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
PODS = Resource("", "pods")


def settings(etcd: Etcd, **more: str) -> dict[str, object]:
    return {
        **POOL,
        "kvstore": "etcd",
        "kvstore-opt": f"etcd.address={etcd.url}",
        "identity-allocation-mode": "kvstore",
        "disable-endpoint-crd": "true",
        "unmanaged-pod-watcher-interval": 1,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def old_pod() -> dict[str, Any]:
    metadata = {"name": "dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    containers = [{"name": "c", "image": "example.invalid/c"}]
    status = {"phase": "Running", "startTime": "2025-01-01T00:00:00Z"}
    body = {"spec": {"nodeName": "a", "containers": containers}, "status": status}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **body}


async def test_with_disable_endpoint_crd_the_operator_deletes_ciliumendpoints(
    etcd: Etcd, tmp_path: Path
) -> None:
    server = ApiServer()
    server.crd_delay = 0
    operators = Operators(server, tmp_path)
    async with server.serving():
        async with operators.running(POOL):
            for number in range(3):
                endpoint = cep(f"pod-{number}", f"10.0.0.{number}", 300)
                endpoint["metadata"]["namespace"] = "default"
                server.add(endpoint)
            server.add(old_pod())
        async with operators.running(settings(etcd, enable_cilium_endpoint_slice="true")):
            await eventually(lambda: not server.store.of(ENDPOINTS).objects, 30)
            assert ("", "ciliumendpointslices.cilium.io") not in server.store.of(CRDS).objects
        assert ("kube-system", "dns") in server.store.of(PODS).objects, (
            "who has no object may have an endpoint"
        )
        (dns,) = server.store.of(PODS).objects.values()
        assert "deletionTimestamp" not in dns["metadata"]


async def test_with_disable_endpoint_crd_a_new_cluster_gets_no_ciliumendpoint_crd(
    etcd: Etcd, tmp_path: Path
) -> None:
    server = ApiServer()
    server.crd_delay = 0
    async with server.serving(), Operators(server, tmp_path).running(settings(etcd)) as hive:
        names = {item["spec"]["names"]["plural"] for item in server.store.of(CRDS).objects.values()}
        assert "ciliumendpoints" not in names
        assert "ciliumidentities" in names
        await eventually(lambda: not [one for one in hive.health.snapshot() if one.level == "degraded"], 30)


async def test_with_ciliumidentities_disable_endpoint_crd_is_refused(etcd: Etcd, tmp_path: Path) -> None:
    server = ApiServer()
    server.crd_delay = 0
    async with server.serving():
        values = settings(etcd, identity_allocation_mode="crd")
        with pytest.raises(HiveError, match="expected identity-allocation-mode=kvstore"):
            async with Operators(server, tmp_path).running(values):
                pass


def test_without_a_kvstore_disable_endpoint_crd_is_reset() -> None:
    wanted = ClusterEndpointSettings(disable_endpoint_crd=True)
    with capture_logs() as logged:
        assert endpoint_objects(wanted, store(enabled=False), structlog.get_logger()).served
    assert "using false instead" in logged[0]["event"]
    used = store(enabled=True)
    assert not endpoint_objects(wanted, used, structlog.get_logger()).served
    assert endpoint_objects(ClusterEndpointSettings(), used, structlog.get_logger()).served


def store(*, enabled: bool) -> KVStore:
    """The node's way to a store, as far as it is asked."""
    return cast("KVStore", SimpleNamespace(enabled=enabled))
