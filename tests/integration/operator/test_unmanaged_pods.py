"""Pods without an endpoint are restarted, as in the recorded scenario without its wait."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import structlog

from cells.kubernetes.objects.cilium_endpoint import CiliumEndpoint
from cells.kubernetes.objects.kind import Key, LabelSelector, Meta
from cells.operator.api_server import ClusterAPI
from cells.operator.crds import CustomResources
from cells.operator.objects import ClusterObjects, ClusterPod, PodState
from cells.operator.unmanaged_pods import UnmanagedPods, UnmanagedPodSettings
from lifecycle import Jobs, Table
from lifecycle.testing import eventually, fake
from tests.integration.operator.recordings import load
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL

pytestmark = pytest.mark.anyio
PODS = Resource("", "pods")
STEP = next(step for step in load("unmanaged_pods")["steps"] if "pods_after" in step)


async def test_only_old_pods_of_dns_without_an_endpoint_are_deleted(
    server: ApiServer, operators: Operators
) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def going() -> set[str]:
        pods = server.store.of(PODS).objects
        known = {f"{namespace}/{name}" for namespace, name in pods}
        dying = {f"{k[0]}/{k[1]}" for k, one in pods.items() if "deletionTimestamp" in one["metadata"]}
        return dying | ({name for name, _ in STEP["pods_after"]} - known)

    async with operators.running({**POOL, "unmanaged-pod-watcher-interval": 0}):
        async with operators.client() as client:
            for request in STEP["by_test"]:
                text = json.dumps(request.get("body")).replace("<TIME>", now)
                media = request.get("content_type") or "application/json"
                await client.raw(request["method"], request["path"], None, text.encode(), media.encode())
        assert going() == set()
    async with operators.running({**POOL, "unmanaged-pod-watcher-interval": 1}):
        wanted = {name for name, vanished in STEP["pods_after"] if vanished}
        await eventually(lambda: going() == wanted, 30)


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", {"dns", "web"}),
        ("k8s-app in (kube-dns,coredns)", {"dns"}),
        ("!k8s-app", {"web"}),
    ],
)
def test_which_pods_are_looked_for_is_a_label_selector(text: str, selected: set[str]) -> None:
    selector = UnmanagedPodSettings(pod_restart_selector=text).pods()
    labels = {"dns": {"k8s-app": "kube-dns"}, "web": {"app": "web"}}
    assert {name for name, one in labels.items() if selector.matches(one)} == selected


async def test_a_pass_looks_at_selected_pods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    matches = LabelSelector.matches

    def counted(selector: LabelSelector, labels: dict[str, str]) -> bool:
        asked.append(labels["k8s-app"])
        return matches(selector, labels)

    monkeypatch.setattr(LabelSelector, "matches", counted)
    pods: Table[Key, ClusterPod] = Table("pods", key=lambda row: row.key)
    endpoints: Table[Key, CiliumEndpoint] = Table("endpoints", key=lambda row: row.key)
    tables = {"Pod": pods, "CiliumEndpoint": endpoints}
    resources = fake(CustomResources, endpoints=True)
    looking = UnmanagedPods(
        UnmanagedPodSettings(),
        fake(ClusterAPI),
        fake(ClusterObjects, resources=resources, table=lambda kind, _="": tables[kind.kind]),
        jobs=fake(Jobs, timer=lambda *_, **__: None),
        log=structlog.get_logger(),
    )
    with pods.txn() as rows:
        for number in range(1000):
            labels = {"k8s-app": "kube-dns" if number < 2 else "web"}
            rows.put(
                ClusterPod(
                    Meta(name=f"pod-{number}", namespace="a", labels=labels), status=PodState(phase="Running")
                )
            )
    await looking.restart_one()
    assert looking.found == 0, "they are young"
    asked.clear()
    await looking.restart_one()
    assert not asked
