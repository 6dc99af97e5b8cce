"""Rows that a relist of an emptied API server lacks are retained until its store was refilled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from cells import kubernetes, kvstore
from cells.cluster import allocation, identity
from cells.cluster.identity.identities import Identities
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes import sink
from cells.kubernetes.objects.cilium_endpoint import CiliumIdentity
from cells.kubernetes.objects.core import Namespace, Pod
from cells.kubernetes.sink import MissingObject
from cells.node.addresses import address_table
from lifecycle import HealthTree, Hive, Lifecycle, Table, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.apiserver import Fault, on
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
NODE = "node1"
OWN = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
WEB = ("k8s:app=web",)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "SETTLE", 0.3)
    monkeypatch.setenv("K8S_NODE_NAME", NODE)


class Agent:
    def __init__(self, hive: Hive) -> None:
        self.pods = hive.get(Table[tuple[str, str], Pod])
        self.namespaces = hive.get(Table[tuple[str, str], Namespace])
        self.identities = hive.get(Identities)
        self.objects = hive.get(Table[tuple[str, str], CiliumIdentity])
        self.missing = hive.get(Table[tuple[str, str, str], MissingObject])
        self.health = hive.get(HealthTree)

    def names(self) -> set[str]:
        return {one.name for one in self.pods.all()}

    def health_message(self) -> str:
        return next(one.message for one in self.health.snapshot() if one.module == "kubernetes.missing")


@asynccontextmanager
async def agent(folder: Path, url: str) -> AsyncIterator[Agent]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def needed(
        _: Table[tuple[str, str], Pod],
        __: Table[tuple[str, str], Namespace],
        ___: Identities,
        ____: Table[tuple[str, str], CiliumIdentity],
        _____: Table[tuple[str, str, str], MissingObject],
        ______: HealthTree,
    ) -> None: ...

    cells = (kubernetes.cell, kvstore.cell, identity.cell, allocation.cell)
    options = {"k8s-kubeconfig-path": kubeconfig(folder, url), "k8s-client-qps": "0"}
    async with Hive(
        *cells, supply(known), provide(address_table), invoke(needed), settings=options
    ).started() as hive:
        found = Agent(hive)
        await found.pods.wait_initialized()
        await found.namespaces.wait_initialized()
        await found.objects.wait_initialized()
        yield found


def fill(one: Cluster, *names: str) -> None:
    one.put(OWN)
    for name in names:
        one.put(pod(name, NODE))


async def test_what_is_lost_stays_in_force_until_the_store_is_filled(tmp_path: Path) -> None:
    async with cluster("ciliumidentities") as one:
        fill(one, "a", "b", "c")
        port, url = one.server.port, one.url
        serving = agent(tmp_path, url)
        node = await serving.__aenter__()
        number = (await node.identities.acquire(WEB)).id
        await eventually(lambda: node.objects.get(("", str(number))) is not None)
    try:
        async with cluster("ciliumidentities", port=port) as one:
            missing = {("nodes", "", NODE), *(("pods", "default", name) for name in "abc")}
            await eventually(lambda: all(one in node.missing for one in missing), within=30)
            assert "a relist lacks" in node.health_message()
            await eventually(lambda: one.get("CiliumIdentity", str(number)) is not None)
            assert node.names() == {"a", "b", "c"}
            assert node.identities.is_current(number, WEB)
            one.put(pod("a", NODE))
            one.put(pod("d", NODE))
            await eventually(lambda: node.names() == {"a", "b", "c", "d"})
            await eventually(lambda: ("pods", "default", "a") not in node.missing)
            assert ("pods", "default", "b") in node.missing, "the store lacks this node's Node"
            one.put(OWN)
            await eventually(lambda: node.names() == {"a", "d"})
            assert node.health_message() == "no objects are missing"
            assert node.identities.is_current(number, WEB)
            one.delete("Pod", "a", "default")
            await eventually(lambda: node.names() == {"d"})
    finally:
        await serving.__aexit__(None, None, None)


async def test_a_list_that_lacks_a_few_is_believed_at_once(tmp_path: Path) -> None:
    async with cluster("ciliumidentities") as one:
        fill(one, "a", "b", "c", "d")
        async with agent(tmp_path, one.url) as node:
            one.delete("Pod", "a", "default")
            one.server.restart()
            await one.server.hang_up()
            await eventually(lambda: node.names() == {"b", "c", "d"})
            assert not len(node.missing)


async def test_a_forbidden_kind_does_not_keep_lost_objects_in_force(tmp_path: Path) -> None:
    async with cluster("ciliumidentities") as one:
        fill(one, "a", "b", "c")
        one.server.faults.add(Fault(on("/apis/cilium.io/v2/ciliumnodeconfigs"), times=-1, status=403))
        async with agent(tmp_path, one.url) as node:
            for name in "ab":
                one.delete("Pod", name, "default")
            one.server.restart()
            await one.server.hang_up()
            await eventually(lambda: len(node.missing) == 2 or node.names() == {"c"})
            await eventually(lambda: node.names() == {"c"})


async def test_another_store_is_noticed_and_its_long_list_taken_in_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kubernetes.sink.PART", 3)
    names = [f"pod-{number}" for number in range(20)]
    async with cluster("ciliumidentities") as one:
        for _ in range(3):  # the other store has fewer changes behind it: that is how it is known for another
            fill(one, *names)
        port, url = one.server.port, one.url
        serving = agent(tmp_path, url)
        node = await serving.__aenter__()
        one.put(pod("watched", NODE))
        await eventually(lambda: node.names() == {*names, "watched"})
    try:
        async with cluster("ciliumidentities", port=port) as one:
            fill(one, *names[:15], "late")
            await eventually(lambda: node.names() == {*names[:15], "late"}, within=30)
            assert node.health_message() == "no objects are missing"
    finally:
        await serving.__aexit__(None, None, None)
