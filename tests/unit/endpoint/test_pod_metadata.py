"""Pod labels: derived as by Cilium, read from a folder or an API server, waited for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from cells import kubernetes
from cells.base.labels import pod_labels, texts
from cells.config import AgentConfig, AgentSettings
from cells.endpoint import MAC_ANNOTATION, KubernetesPods, PodFacts, PodName
from cells.endpoint import pods as waits
from cells.kubernetes.objects.core import Pod
from lifecycle import Hive, Lifecycle, Table, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.apiserver import Fault, on
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
WEB = PodName("default", "web", "uid-web")
DERIVED = (
    "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=default",
    "k8s:io.cilium.k8s.policy.cluster=default",
    "k8s:io.cilium.k8s.policy.serviceaccount=default",
    "k8s:io.kubernetes.pod.namespace=default",
)


def test_a_pod_cannot_claim_a_namespace_a_service_account_or_a_cluster_of_its_own() -> None:
    own = {
        "app": "web",
        "io.kubernetes.pod.namespace": "kube-system",
        "io.cilium.k8s.policy.cluster": "other",
        "io.cilium.k8s.policy.serviceaccount": "admin",
        "io.cilium.k8s.namespace.labels.team": "red",
    }
    every = pod_labels(
        own, namespace="default", namespace_labels={"team": "blue"}, service_account="", cluster="default"
    )
    blue = "k8s:io.cilium.k8s.namespace.labels.team=blue"
    assert set(texts(every)) == {"k8s:app=web", blue, *DERIVED[:2], DERIVED[3]}


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")


@asynccontextmanager
async def following(**settings: str) -> AsyncIterator[Hive]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def needed(_: KubernetesPods, __: Table[tuple[str, str], Pod]) -> None: ...

    options = {name.replace("_", "-"): value for name, value in settings.items()}
    async with Hive(
        kubernetes.cell, provide(KubernetesPods), supply(known), invoke(needed), settings=options
    ).started() as hive:
        yield hive


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Cluster, KubernetesPods]]:
    async with cluster() as one, following(k8s_kubeconfig_path=kubeconfig(tmp_path, one.url)) as hive:
        table = hive.get(Table[tuple[str, str], Pod])
        await eventually(lambda: table.initialized)
        yield one, hive.get(KubernetesPods)


def shown(pod: PodFacts | None) -> tuple[str, ...] | None:
    return None if pod is None else texts(pod.labels)


async def test_a_pod_that_the_watch_brings_late_is_waited_for(served: tuple[Cluster, KubernetesPods]) -> None:
    one, pods = served
    assert pods.lookup(WEB) is None
    found: list[Any] = []

    async def resolve() -> None:
        found.append(shown(await pods.resolve(WEB)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(resolve)
        await anyio.wait_all_tasks_blocked()
        one.put(pod("web", app="web"))
    assert found == [("k8s:app=web", *DERIVED)]
    assert shown(pods.lookup(WEB)) == found[0]


async def test_a_pods_annotation_names_its_mac_address(served: tuple[Cluster, KubernetesPods]) -> None:
    one, pods = served
    body = pod("web", app="web")
    body["metadata"]["annotations"] = {MAC_ANNOTATION: "0a:00:00:00:00:77"}
    one.put(body)
    found = await pods.resolve(WEB)
    assert found is not None
    assert found.mac == "0a:00:00:00:00:77"


async def test_a_pod_of_the_same_name_and_another_uid_is_not_meant(
    served: tuple[Cluster, KubernetesPods],
) -> None:
    one, pods = served
    one.put(pod("web", app="web"))
    await eventually(lambda: pods.lookup(WEB) is not None)
    assert pods.lookup(WEB._replace(uid="another")) is None
    static = pod("web", app="web")
    static["metadata"]["annotations"] = {waits.STATIC_POD: "another"}
    one.put(static)
    await eventually(lambda: pods.lookup(WEB._replace(uid="another")) is not None)


async def test_the_api_server_is_asked_when_its_watch_is_silent(
    served: tuple[Cluster, KubernetesPods], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, pods = served
    monkeypatch.setattr(waits, "WATCH_SECONDS", 0.05)
    one.put(pod("web", node="elsewhere", app="web"))  # the watch asks for this node's pods only
    assert shown(await pods.resolve(WEB)) == ("k8s:app=web", *DERIVED)
    assert await pods.resolve(PodName("default", "nobody")) is None


async def test_without_an_answer_it_waits_and_then_gives_up(
    served: tuple[Cluster, KubernetesPods], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, pods = served
    monkeypatch.setattr(waits, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(waits, "METADATA_SECONDS", 0.1)
    one.server.faults.add(Fault(on("/api/v1/namespaces/default/pods"), times=-1, status=500))
    assert await pods.resolve(WEB) is None


async def test_a_pod_missing_from_a_manifest_folder_is_not_waited_for(tmp_path: Path) -> None:
    web = pod("web", app="web")
    del web["spec"]["serviceAccountName"]
    (tmp_path / "web.yaml").write_text(json.dumps(web), encoding="utf-8")
    async with following(manifests_dir=str(tmp_path)) as hive:
        pods = hive.get(KubernetesPods)
        assert shown(pods.lookup(WEB)) == ("k8s:app=web", *DERIVED)
        other = PodName("default", "other")
        with anyio.fail_after(1):
            assert await pods.resolve(other) is None, "its endpoint is reserved:init"
        assert pods.of("default", "other", "") is None, "an endpoint there is keeps its labels"
        (tmp_path / "other.yaml").write_text(json.dumps(pod("other", app="other")), encoding="utf-8")
        await eventually(lambda: pods.lookup(other) is not None)


async def test_without_a_source_nothing_is_followed() -> None:
    async with following() as hive:
        assert not hive.get(KubernetesPods).followed
