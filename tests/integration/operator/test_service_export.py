"""Global services in the kvstore, as agents of other clusters read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cells.cluster.identity.numbers import ClusterNumbers
from cells.clustermesh.keys import RemoteValues
from cells.clustermesh.tables import RemotePort
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.etcd import Etcd, installed
from tests.support.operator import Operators

pytestmark = pytest.mark.anyio

PREFIX = "cilium/state/services/v1/west/"
GLOBAL = {"service.cilium.io/global": "true"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # gRPC's only one


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if not installed():
        pytest.fail("etcd is not installed: install Debian's etcd-server")
    found = Etcd(tmp_path / "etcd")
    found.start()
    yield found
    found.kill()


def mesh(etcd: Etcd, **more: str) -> dict[str, object]:
    """Settings of a cluster that others read."""
    values = {
        "cluster-name": "west", "cluster-id": "1", "kvstore": "etcd", "identity-allocation-mode": "kvstore",
        "kvstore-opt": json.dumps({"etcd.address": etcd.url}), "kvstore-periodic-sync": "200ms",
        "cluster-pool-ipv4-cidr": "10.0.0.0/8",
    }  # fmt: skip
    return {**values, **{name.replace("_", "-"): text for name, text in more.items()}}


def service(name: str, annotations: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": annotations,
            "labels": {"app": name},
        },
        "spec": {
            "selector": {"app": name},
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
            **spec,
        },
    }


def slice_of(name: str, *addresses: str, suffix: str = "1", **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{suffix}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name, **labels},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [one], "conditions": {"ready": True}} for one in addresses],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }


async def annotate(operators: Operators, name: str, annotations: dict[str, str]) -> None:
    async with operators.client() as client:
        body = json.dumps({"metadata": {"annotations": annotations}}).encode()
        path = f"/api/v1/namespaces/default/services/{name}"
        await client.raw("PATCH", path, None, body, b"application/merge-patch+json")


def backends(etcd: Etcd) -> dict[str, list[str]]:
    """The addresses of each exported service."""
    values = {key.removeprefix(PREFIX): json.loads(text) for key, text in etcd.all(PREFIX).items()}
    return {name: sorted(value["backends"]) for name, value in values.items()}


async def test_global_services_are_written_and_follow_their_backends(
    server: ApiServer, operators: Operators, etcd: Etcd
) -> None:
    address = server.add(service("web", GLOBAL))["spec"]["clusterIP"]
    server.add(slice_of("web", "10.1.0.5"))
    server.add(service("own", {}))
    server.add(service("alias", {"io.cilium/global-service": "TRUE"}))
    server.add(service("private", {**GLOBAL, "service.cilium.io/shared": "false"}))
    server.add(service("name", GLOBAL, type="ExternalName", externalName="a.example"))
    of_mesh = {"endpointslice.kubernetes.io/managed-by": "endpointslice-mesh-controller.cilium.io"}
    server.add(slice_of("web", "10.9.0.9", suffix="mesh", **of_mesh))
    async with operators.running(mesh(etcd)):
        await eventually(lambda: backends(etcd) == {"default/web": ["10.1.0.5"], "default/alias": []}, 30)
        raw = etcd.all(PREFIX)[f"{PREFIX}default/web"].encode()
        assert json.loads(raw)["includeExternal"] is True
        read = RemoteValues("west", 1, ClusterNumbers()).service("default/web", raw)
        assert read.shared
        assert read.frontends == {address: {"http": RemotePort("TCP", 80)}}
        assert read.backends == {"10.1.0.5": {"http": RemotePort("TCP", 8080)}}
        server.add(slice_of("web", "10.1.0.6", suffix="2"))
        server.add(service("pods", GLOBAL, clusterIP="None"))
        await annotate(operators, "own", GLOBAL)
        wanted = {"default/web": ["10.1.0.5", "10.1.0.6"]}
        wanted |= {f"default/{name}": [] for name in ("alias", "own", "pods")}
        await eventually(lambda: backends(etcd) == wanted, 30)
        assert json.loads(etcd.all(PREFIX)[f"{PREFIX}default/pods"])["frontends"] == {}
        await annotate(operators, "web", {"service.cilium.io/shared": "false"})
        del wanted["default/web"]
        await eventually(lambda: backends(etcd) == wanted, 30)


async def test_hostnames_of_backends_are_written(server: ApiServer, operators: Operators, etcd: Etcd) -> None:
    """Other clusters' operators write them to EndpointSlices of headless services."""
    server.add(service("db", GLOBAL, clusterIP="None"))
    slice_ = slice_of("db", "10.1.0.5", "10.1.0.6", "10.1.0.7")
    slice_["endpoints"][0]["hostname"] = "db-0"
    slice_["endpoints"][1]["hostname"] = "db-1"
    slice_["endpoints"][1]["conditions"] = {"ready": False, "serving": False}
    server.add(slice_)
    async with operators.running(mesh(etcd)):
        await eventually(lambda: backends(etcd) == {"default/db": ["10.1.0.5", "10.1.0.7"]}, 30)
        assert json.loads(etcd.all(PREFIX)[f"{PREFIX}default/db"])["hostnames"] == {"10.1.0.5": "db-0"}


async def test_what_an_earlier_operator_exported_goes_once_services_are_known(
    server: ApiServer, operators: Operators, etcd: Etcd
) -> None:
    etcd.put(f"{PREFIX}default/gone", "{}")
    other = "cilium/state/services/v1/west-2/default/web"
    etcd.put(other, "{}")
    server.add(service("web", GLOBAL))
    async with operators.running(mesh(etcd)):
        await eventually(lambda: set(etcd.all(PREFIX)) == {f"{PREFIX}default/web"}, 30)
        assert other in etcd.all(other)
        etcd.delete(f"{PREFIX}default/web")
        await eventually(lambda: f"{PREFIX}default/web" in etcd.all(PREFIX), 30)


@pytest.mark.parametrize("more", [{"synchronize_k8s_services": "false"}, {"cluster_id": "0"}])
async def test_nothing_is_exported_outside_of_a_mesh(
    server: ApiServer, operators: Operators, etcd: Etcd, more: dict[str, str]
) -> None:
    server.add(service("web", GLOBAL))
    config = "cilium/cluster-config/west"
    async with operators.running(mesh(etcd, **more)):
        await eventually(lambda: config in etcd.all(config), 30)
        assert etcd.all(PREFIX) == {}
