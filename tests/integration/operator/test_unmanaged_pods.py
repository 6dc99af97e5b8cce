"""Pods that run without an endpoint are started again; the recorded scenario without its wait."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from cells.operator.unmanaged_pods import UnmanagedPodSettings
from lifecycle.testing import eventually
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
