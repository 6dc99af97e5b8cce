"""What became of a policy is told in its status at the API server, and only where it is not told yet."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from cells.kubernetes import CILIUM_NETWORK_POLICIES
from cells.kubernetes.client import Access, Client, connect
from cells.policy.control import PolicyObject
from cells.policy.control.conditions import with_condition
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.unit.policy.test_control import Room, room

pytestmark = pytest.mark.anyio
DEFINITION = Path(__file__).parents[2] / "conformance_data/kubernetes/fixtures/crd_ciliumnetworkpolicies.json"
KEY = ("shop", "web")
OBJECT = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {"endpointSelector": {}, "ingress": [{"toPorts": [{"ports": [{"port": "80"}]}]}]},
}
OTHER = {"type": "Other", "status": "True", "message": "of somebody else"}


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Client, Room]]:
    """A node whose objects are those of an API server that knows policies."""
    server = ApiServer()
    async with server.serving() as url:
        server.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
        server.add(json.loads(DEFINITION.read_bytes()))
        await eventually(lambda: server.kinds.get("cilium.io", "v2", "ciliumnetworkpolicies") is not None)
        config = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "admin", "user": {"token": ADMIN_TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")
        client = connect(Access(servers=(url,), token=ADMIN_TOKEN), qps=0)
        async with room(folder, {"k8s-kubeconfig-path": str(folder / "kubeconfig")}) as node:
            yield client, node
        await client.reset()


def condition(node: Room) -> tuple[str, str] | None:
    """Status and message of the object's condition, as the node hears of it."""
    found = node.resources.table(CILIUM_NETWORK_POLICIES).get(KEY)
    conditions = found.status.conditions if found is not None else None
    return next(((one.status, one.message) for one in conditions or () if one.type == "Valid"), None)


async def test_an_object_tells_whether_it_is_valid_and_where_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (client, node):
        table = node.resources.table(CILIUM_NETWORK_POLICIES)
        await client.create(CILIUM_NETWORK_POLICIES, OBJECT, "shop")
        await eventually(lambda: condition(node) == ("True", "Policy validation succeeded"), on=table)
        assert node.policy.revision == 2  # its status alone is no change of a policy
        bad = {"spec": {"ingress": [{"toPorts": [{"ports": [{"port": "70000"}]}]}]}}
        await client.patch(CILIUM_NETWORK_POLICIES, "web", bad, "shop")
        await eventually(lambda: (condition(node) or ("", ""))[0] == "False", on=table)
        told = condition(node)
        assert told is not None
        assert told[1].endswith("value out of range (at spec.ingress[0].toPorts[0].ports[0])")


def test_what_is_told_already_is_left_alone_and_what_is_of_others_stays() -> None:
    row = PolicyObject(kind="CiliumNetworkPolicy", namespace="shop", name="web", valid=True, message="fine")
    first = with_condition({**OBJECT, "status": {"conditions": [OTHER]}}, row)
    assert first is not None
    other, valid = first["status"]["conditions"]
    assert other == OTHER
    assert with_condition(first, row) is None
    valid["message"] = "in other words"
    again = with_condition(first, row)
    assert again is not None
    assert again["status"]["conditions"][1]["lastTransitionTime"] == valid["lastTransitionTime"]
