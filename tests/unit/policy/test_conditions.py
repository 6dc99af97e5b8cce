"""What became of a policy is told in its status at the API server, and only where it is not told yet."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cells.kubernetes import CILIUM_NETWORK_POLICIES, CiliumNetworkPolicy
from cells.kubernetes.client import Access, Client, connect
from cells.policy.control import PolicyObject
from cells.policy.control.conditions import write_condition
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer

pytestmark = pytest.mark.anyio
DEFINITION = Path(__file__).parents[2] / "conformance_data/kubernetes/fixtures/crd_ciliumnetworkpolicies.json"
OBJECT = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {"endpointSelector": {}, "ingress": [{}]},
}
GOOD = PolicyObject(
    kind="CiliumNetworkPolicy",
    namespace="shop",
    name="web",
    valid=True,
    message="Policy validation succeeded",
)
BAD = PolicyObject(
    kind="CiliumNetworkPolicy",
    namespace="shop",
    name="web",
    valid=False,
    message="no such port",
    path="spec.ingress[0]",
)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    server = ApiServer()
    async with server.serving():
        server.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
        server.add(json.loads(DEFINITION.read_bytes()))
        await eventually(lambda: server.kinds.get("cilium.io", "v2", "ciliumnetworkpolicies") is not None)
        made = connect(Access(servers=(f"http://127.0.0.1:{server.port}",), token=ADMIN_TOKEN), qps=0)
        yield made
        await made.reset()


async def live(client: Client) -> CiliumNetworkPolicy:
    return await client.get(CILIUM_NETWORK_POLICIES, "web", "shop")


async def conditions(client: Client) -> list[Any]:
    return [
        (one.type, one.status, one.message, one.last_transition_time)
        for one in (await live(client)).status.conditions or ()
    ]


async def test_a_condition_says_where_it_is_wrong_and_keeps_its_time(client: Client) -> None:
    await client.create(CILIUM_NETWORK_POLICIES, OBJECT, "shop")
    await write_condition(client, CILIUM_NETWORK_POLICIES, GOOD)
    ((kind, status, message, since),) = await conditions(client)
    assert (kind, status, message) == ("Valid", "True", "Policy validation succeeded")
    assert since
    await write_condition(client, CILIUM_NETWORK_POLICIES, BAD)
    ((_, status, message, _),) = await conditions(client)
    assert (status, message) == ("False", "no such port (at spec.ingress[0])")
    assert (await live(client)).spec == OBJECT["spec"]


async def test_what_is_right_already_is_not_written_and_what_is_of_others_stays(client: Client) -> None:
    await client.create(CILIUM_NETWORK_POLICIES, OBJECT, "shop")
    other = {"type": "Other", "status": "True", "message": "of somebody else"}
    await client.patch(
        CILIUM_NETWORK_POLICIES, "web", {"status": {"conditions": [other]}}, "shop", subresource="status"
    )
    await write_condition(client, CILIUM_NETWORK_POLICIES, GOOD)
    assert [one[0] for one in await conditions(client)] == ["Other", "Valid"]
    written = client.calls.returned["PUT", "200"]
    await write_condition(client, CILIUM_NETWORK_POLICIES, GOOD)
    assert client.calls.returned["PUT", "200"] == written == 1


async def test_an_object_that_is_gone_has_no_condition(client: Client) -> None:
    await write_condition(client, CILIUM_NETWORK_POLICIES, GOOD)
    assert client.calls.returned["PUT", "200"] == 0
