"""The agent needs exactly the RBAC rules of its role. Over fakes of the kernel."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import yaml
from click.testing import CliRunner

from cells.agent import agent
from cells.cluster import kubernetes_events
from cells.cluster.allocation.objects import HEARTBEAT
from cells.endpoint import Endpoints, pods
from cells.kubernetes.api_server import KubernetesAPI
from cells.operator.crds.definitions import definitions
from hive.main import cli
from lifecycle.testing import eventually, started
from tests.support import chart
from tests.support.apiserver import ApiServer, Fault, User
from tests.support.apiserver.errors import Resource
from tests.support.apiserver.wire import Request
from tests.support.rights import rights, unused
from tests.unit.agent.fakes import fakes, settings, without_links
from tests.unit.endpoint.fakes import FakeKernel, request
from tests.unit.kubernetes.cluster import Cluster, namespace, pod

__all__ = ["settings"]
pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.anyio
ACCOUNT = "system:serviceaccount:kube-system:cilium"
TOKEN = "agent-token"  # of the fake API server
IDENTITIES = "/apis/cilium.io/v2/ciliumidentities"
CILIUM_ENDPOINTS = "/apis/cilium.io/v2/namespaces/default/ciliumendpoints"
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "node1", "labels": {"edge": "yes"}},
    "spec": {"podCIDRs": ["10.0.1.0/24"]},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]},
}

ODD_SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "name": "odd",
        "namespace": "default",
        "annotations": {"service.cilium.io/type": "None"},
    },
    "spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 80, "protocol": "TCP"}]},
}

BGP_NODE_CONFIG: dict[str, Any] = {
    "apiVersion": "cilium.io/v2alpha1",
    "kind": "CiliumBGPNodeConfig",
    "metadata": {"name": "node1"},
    "spec": {"bgpInstances": [{"name": "without-an-asn"}]},
    "status": {"bgpInstances": [{"name": "of-an-earlier-agent"}]},
}
"""No speaker is started for it, and its status is written."""

NODE_CONFIG = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNodeConfig",
    "metadata": {"name": "edge", "namespace": "kube-system"},
    "spec": {"defaults": {"mtu": "1400"}, "nodeSelector": {"matchLabels": {"edge": "yes"}}},
}


def roles(**values: object) -> list[dict[str, Any]]:
    """The agent's, as the chart renders them."""
    return [
        one
        for one in chart.objects(values).values()
        if one["apiVersion"].startswith("rbac.")
        and one["metadata"]["name"] in {"cilium", "cilium-config-agent", "cilium-bgp-control-plane-secrets"}
    ]


def kubeconfig(folder: Path, url: str) -> str:
    """Of an agent with its own token, and no more."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


async def build(folder: Path, url: str) -> Path:
    """Run the init container ``config`` as the chart has it; the config-dir that it makes."""
    found = chart.objects({})
    mounted, made = folder / "mounted", folder / "made"
    mounted.mkdir()
    for key, text in found["ConfigMap/cilium-config"]["data"].items():
        (mounted / key).write_text(text)
    containers = found["DaemonSet/cilium"]["spec"]["template"]["spec"]["initContainers"]
    (command,) = (one["command"] for one in containers if one["name"] == "config")
    here = [word.replace("/etc/cilium/config-map", str(mounted)) for word in command[1:]]
    here += [f"--dest={made}", f"--k8s-kubeconfig-path={kubeconfig(folder, url)}"]
    env = {"K8S_NODE_NAME": "node1", "CILIUM_K8S_NAMESPACE": "kube-system"}
    built = await anyio.to_thread.run_sync(partial(CliRunner().invoke, cli, here, env=env))
    assert built.exit_code == 0, built.output
    return made


class Rival:
    """A client that makes the same object as the agent, a moment earlier, once."""

    def __init__(self, there: Cluster, path: str) -> None:
        self._there = there
        self._path = path
        self.came = False

    def __call__(self, request: Request) -> bool:
        """No fault: the request goes on."""
        if not self.came and request.method == "POST" and request.path == self._path:
            self.came = True
            self._there.put(json.loads(request.body))
        return False


@asynccontextmanager
async def cluster_with(given: list[Any], *, every: bool = False, bgp: bool = False) -> AsyncIterator[Cluster]:
    """A server with these rights and definitions of custom resources; ``every``: of optional ones, too."""
    wanted = definitions(
        endpoints=True, endpoint_slices=every, local_redirects=every, egress_gateways=every, bgp=bgp
    )
    server = ApiServer({TOKEN: User(ACCOUNT)})
    server.crd_delay = 0
    for body in [*given, *(one.body for one in wanted)]:
        server.add(body)
    async with server.serving() as url:
        there = Cluster(server, url)
        await eventually(lambda: all(there.serves(one.plural) for one in wanted))
        server.definitions.fresh.clear()  # their storage is ready at once
        yield there


async def test_nothing_is_denied_and_no_right_is_unused(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")
    monkeypatch.setattr(pods, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(kubernetes_events, "PAUSE", 0.1)
    given = roles(annotateK8sNode=True)
    async with cluster_with(given, every=True) as there:
        server, url = there.server, there.url
        for body in (NODE, namespace("default"), pod("web-7", app="web"), pod("web-8", "elsewhere")):
            there.put(body)
        there.put(NODE_CONFIG)
        made = await build(tmp_path, url)
        assert (made / "routing-mode").read_text() == "tunnel"
        assert (made / "mtu").read_text() == "1400", "what a CiliumNodeConfig says of this node counts"
        options = {
            **settings,
            "ipam": "kubernetes",
            "annotate-k8s-node": "true",
            "k8s-kubeconfig-path": kubeconfig(tmp_path, url),
            "k8s-client-qps": "0",
        }
        cells = fakes(tmp_path, FakeKernel(), without_links())
        async with started(agent, *cells, settings=options) as hive:
            await everything(there, hive.get(Endpoints))
            calls = hive.get(KubernetesAPI).calls
            assert calls is not None
            assert {status for _, _, status in calls.returned} & {"401", "403"} == set()
    assert unused(given, server.requests) == set(), "rights that are not used"


async def test_bgp_needs_the_rights_that_it_adds(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")
    given = roles(bgpControlPlane={"enabled": True})
    added = set(rights(given)) - set(rights(roles()))
    assert ("", "secrets", "list") in added
    async with cluster_with(given, every=True, bgp=True) as there:
        server, url = there.server, there.url
        for body in (NODE, namespace("default"), BGP_NODE_CONFIG):
            there.put(body)
        options = {
            **settings,
            "ipam": "kubernetes",
            "k8s-kubeconfig-path": kubeconfig(tmp_path, url),
            "enable-bgp-control-plane": "true",
            "bgp-secrets-namespace": "kube-system",
        }
        async with started(agent, *fakes(tmp_path, FakeKernel(), without_links()), settings=options) as hive:
            await eventually(lambda: not added & unused(given, server.requests), 20)
            calls = hive.get(KubernetesAPI).calls
            assert calls is not None
            assert {status for _, _, status in calls.returned} & {"401", "403"} == set()


def test_node_objects_are_written_to_only_where_it_is_asked_for() -> None:
    assert set(rights(roles(annotateK8sNode=True))) - set(rights(roles())) == {("", "nodes/status", "patch")}


SOURCES = "config-map:kube-system/cilium-config,cilium-node-config:kube-system,node:"


async def test_the_sources_of_settings_need_the_rights_that_they_add(tmp_path: Path) -> None:
    given = roles(daemon={"configSources": SOURCES})
    added = set(rights(given)) - set(rights(roles()))
    assert added == {("", "configmaps", "get")}
    async with cluster_with(given) as there:
        server, url = there.server, there.url
        there.put(NODE)
        there.put(chart.objects({})["ConfigMap/cilium-config"])
        made = [
            "build-config",
            f"--source={SOURCES}",
            "--node-name=node1",
            f"--dest={tmp_path / 'made'}",
            f"--k8s-kubeconfig-path={kubeconfig(tmp_path, url)}",
        ]
        built = await anyio.to_thread.run_sync(CliRunner().invoke, cli, made)
        assert built.exit_code == 0, built.output
        assert (tmp_path / "made" / "routing-mode").read_text() == "tunnel"
        hidden = await anyio.to_thread.run_sync(
            CliRunner().invoke, cli, [*made, "--source=config-map:kube-system/another"]
        )
        assert hidden.exit_code == 1
        assert "403" in hidden.output or "forbidden" in hidden.output, hidden.output
    assert added & unused(given, server.requests) == set(), "rights that are not used"


def events(there: Cluster) -> list[dict[str, Any]]:
    return list(there.server.store.of(Resource("events.k8s.io", "events")).objects.values())


async def everything(there: Cluster, endpoints: Endpoints) -> None:
    """Have the agent do one of everything, some of it a moment after another client."""

    def get(kind: str, name: str, namespace: str = "") -> dict[str, Any]:
        return deepcopy(there.get(kind, name, namespace) or {})

    def annotations(kind: str, name: str) -> dict[str, str]:
        return get(kind, name)["metadata"].get("annotations") or {}

    there.put(ODD_SERVICE)
    await eventually(lambda: len(events(there)) == 1)
    (event,) = events(there)
    there.put({**event, "eventTime": "2025-01-01T00:00:00.000000Z"})
    other = deepcopy(ODD_SERVICE)
    other["metadata"]["annotations"] = {"service.cilium.io/type": "Nothing"}
    there.put(other)
    await eventually(lambda: len(events(there)) == 2)
    there.put(ODD_SERVICE)  # the same again, long after
    await eventually(lambda: {(one.get("series") or {}).get("count") for one in events(there)} == {2, None})

    rivals = [Rival(there, path) for path in (IDENTITIES, CILIUM_ENDPOINTS)]
    for rival in rivals:
        there.server.faults.add(Fault(rival))
    await endpoints.create(request(7, pod_uid="uid-web-7"))
    await eventually(lambda: get("CiliumEndpoint", "web-7", "default").get("status"), 30)
    await endpoints.create(request(8, pod_uid="uid-web-8"))
    assert all(rival.came for rival in rivals)

    endpoint, node = get("CiliumEndpoint", "web-7", "default"), get("CiliumNode", "node1")
    number = endpoint["status"]["identity"]["id"]
    identity = get("CiliumIdentity", str(number))
    endpoint["status"]["identity"] = {"id": 4}
    identity["metadata"]["annotations"] = {HEARTBEAT: "2025-01-01T00:00:00Z"}
    node["spec"]["addresses"] = []
    for body in (endpoint, identity, node):
        there.put(body)
    await eventually(
        lambda: (
            get("CiliumEndpoint", "web-7", "default")["status"]["identity"]["id"] == number
            and HEARTBEAT not in annotations("CiliumIdentity", str(number))
            and get("CiliumNode", "node1")["spec"]["addresses"]
            and annotations("Node", "node1")
        ),
        20,
    )
    (first,) = (one for one in endpoints.all() if one.pod_name == "web-7")
    assert endpoints.delete(first) == ()
    await eventually(lambda: not get("CiliumEndpoint", "web-7", "default"), 30)
