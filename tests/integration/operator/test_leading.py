"""One operator leads and registers the CRDs; the others wait and answer probes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any
from urllib.request import urlopen

import anyio.to_thread
import pytest

from cells.operator.leader import LeaderHive, Leadership
from lifecycle import GraphError, Hive, HiveError
from lifecycle.testing import eventually
from tests.integration.operator.recordings import load
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL, at_work

pytestmark = pytest.mark.anyio
CRDS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
LEASES = Resource("coordination.k8s.io", "leases")
LEASE = ("kube-system", "cilium-operator-resource-lock")
OPTIONS = [
    (json.loads(step["do"].removeprefix("start with ")), set(step["crds_after"]))
    for step in load("crd_options_per_crd")["steps"]
]
REFUSED_HERE = "enable-envoy-config"


def stored(server: ApiServer, resource: Resource, key: tuple[str, str]) -> dict[str, Any]:
    found = server.store.get(resource, key)
    assert found is not None
    return dict(found)


async def get(hive: Hive, path: str) -> tuple[int, str]:
    where = next(one.value for one in hive.settings() if one.option.name == "operator-api-serve-addr")

    def ask() -> tuple[int, str]:
        with urlopen(f"http://{where}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()

    return await anyio.to_thread.run_sync(ask)


@pytest.mark.parametrize(("options", "recorded"), OPTIONS, ids=[",".join(one) for one, _ in OPTIONS])
async def test_the_leader_registers_the_recorded_definitions_and_no_more(
    options: dict[str, str], recorded: set[str], server: ApiServer, operators: Operators
) -> None:
    if REFUSED_HERE in options:
        with pytest.raises(GraphError, match=REFUSED_HERE):
            async with operators.running(POOL | options):
                pass
        return
    async with operators.running(POOL | options):
        assert names(server) == recorded


async def test_definitions_follow_options_at_the_next_start(server: ApiServer, operators: Operators) -> None:
    async with operators.running():
        before = names(server)
    async with operators.running({**POOL, "enable-local-redirect-policy": "true"}):
        assert names(server) - before == {"ciliumlocalredirectpolicies.cilium.io"}


def names(server: ApiServer) -> set[str]:
    found = server.store.of(CRDS).objects.values()
    return {one["metadata"]["name"] for one in found if one["spec"]["group"] == "cilium.io"}


async def test_the_lease_of_one_operator_is_the_recorded_one(server: ApiServer, operators: Operators) -> None:
    """While it leads, and after it has stopped; holders and times are its own."""
    leads, stopped = (step["objects_after"] for step in load("leader_single")["steps"][:2])
    (path,) = leads
    usual = {
        "leader-election-lease-duration": "15s",
        "leader-election-renew-deadline": "10s",
        "leader-election-retry-period": "2s",
    }
    async with operators.running(POOL | usual) as hive:
        held = dict(stored(server, LEASES, LEASE)["spec"])
        await hive.stop()
        left = stored(server, LEASES, LEASE)["spec"]
    assert re.fullmatch(rf"{re.escape(socket.gethostname())}-[a-z0-9]{{10}}", held.pop("holderIdentity"))
    for found, recorded in ((held, leads[path]["spec"]), (left, stopped[path]["spec"])):
        times = {"acquireTime", "renewTime"}
        assert times <= found.keys()
        assert {key: found[key] for key in found.keys() - times}.items() <= recorded.items()
        assert recorded.keys() - found.keys() <= {"holderIdentity"}


async def test_one_of_two_operators_leads_until_it_stops(server: ApiServer, operators: Operators) -> None:
    async with operators.running() as one:
        async with operators.running(leads=False) as two:
            leader = one.get(Leadership).identity
            await eventually(lambda: two.get(Leadership).leader == leader)
            assert not two.get(Leadership).leads
            assert two.get(LeaderHive).current is None
            assert await get(two, "/healthz") == (200, "ok")
            state = json.loads((await get(two, "/hive/status"))[1])
            assert (state["leader"], state["leads"]) == (leader, False)
            await one.stop()
            await eventually(lambda: at_work(two), 30)
        lease = stored(server, LEASES, LEASE)["spec"]
        assert lease["holderIdentity"] == ""


async def test_a_leader_that_loses_its_lease_stops_and_exits(server: ApiServer, operators: Operators) -> None:
    before = set(asyncio.all_tasks())
    with pytest.raises(HiveError, match="leader election lost: somebody-else"):  # noqa: PT012  # it ends it
        async with operators.running() as hive:
            async with operators.client() as client:
                await client.raw(
                    "PATCH",
                    f"/apis/coordination.k8s.io/v1/namespaces/{LEASE[0]}/leases/{LEASE[1]}",
                    body=json.dumps({"spec": {"holderIdentity": "somebody-else"}}).encode(),
                    media=b"application/merge-patch+json",
                )
            await eventually(lambda: hive.get(LeaderHive).current is None)
            await anyio.sleep_forever()
    assert stored(server, LEASES, LEASE)["spec"]["holderIdentity"] == "somebody-else"
    await eventually(
        lambda: not {one for one in asyncio.all_tasks() - before if "Connection" not in str(one)}
    )


async def test_a_definition_is_replaced_by_a_newer_schema_only(
    server: ApiServer, operators: Operators
) -> None:
    label = "io.cilium.k8s.crd.schema.version"
    async with operators.running():
        pass
    changes = {
        "ciliumnodes": "1.0.0",
        "ciliumidentities": "1.99.0",
        "ciliumendpoints": "abc",
        "ciliumpodippools": None,
    }
    async with operators.client() as client:
        for plural, version in changes.items():
            body = {
                "metadata": {"labels": {label: version, "team": "x"}, "annotations": {"note": "y"}},
                "spec": {"names": {"shortNames": ["own"]}},
            }
            await client.raw(
                "PATCH",
                f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.cilium.io",
                body=json.dumps(body).encode(),
                media=b"application/merge-patch+json",
            )
    async with operators.running():
        for plural in changes:
            found = stored(server, CRDS, ("", f"{plural}.cilium.io"))
            replaced = plural != "ciliumidentities"
            assert (found["spec"]["names"].get("shortNames") == ["own"]) is not replaced
            assert ("team" in found["metadata"]["labels"]) is not replaced
            assert found["metadata"]["annotations"]["note"] == "y"
            if replaced:
                assert found["metadata"]["labels"] == {label: "1.30.1"}


async def test_each_invalid_input_is_reported_in_one_line() -> None:
    from hive.operator.command import build

    hive = build(
        ["--ipam=nonsense", "--leader-election-lease-duration=5s", "--operator-api-serve-addr=nowhere"], {}
    )
    with pytest.raises(Exception) as raised:  # noqa: PT011
        hive.check()
    text = str(raised.value)
    assert "ipam=nonsense: expected cluster-pool" in text
    assert "leader-election-lease-duration=5s: expected more than leader-election-renew-deadline=10s" in text
    assert "operator-api-serve-addr=nowhere: expected host:port" in text
