"""Identity allocation by CiliumIdentity objects, over a fake API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from cells import kubernetes, kvstore
from cells.cluster import allocation, identity
from cells.cluster.allocation.objects import body, candidates, labels_of
from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.identity.numbers import ClusterNumbers
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes.objects.cilium_endpoint import CiliumIdentity
from cells.node.addresses import address_table
from lifecycle import HealthTree, Hive, Lifecycle, Table, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.apiserver import Fault, on
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig

pytestmark = pytest.mark.anyio
PATH = "/apis/cilium.io/v2/ciliumidentities"
WEB = (
    "k8s:app=web",
    "k8s:io.cilium.k8s.namespace.labels.team=blue",
    "k8s:io.kubernetes.pod.namespace=default",
)
DB = ("k8s:app=db", "k8s:empty", "k8s:io.kubernetes.pod.namespace=default")
FIRST = next(candidates(WEB))


@pytest.fixture
async def one() -> AsyncIterator[Cluster]:
    async with cluster("ciliumidentities") as found:
        yield found


class Agent:
    """The cells of an agent that identities need."""

    def __init__(self, hive: Hive) -> None:
        self.identities = hive.get(Identities)
        self.objects = hive.get(Table[tuple[str, str], CiliumIdentity])
        self.health = hive.get(HealthTree)

    async def synced(self) -> None:
        await self.objects.wait_initialized()

    def level(self, name: str) -> str:
        return {one.module: one.level for one in self.health.snapshot()}[name]


@asynccontextmanager
async def agent(folder: Path, one: Cluster | None) -> AsyncIterator[Agent]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def needed(_: Identities, __: Table[tuple[str, str], CiliumIdentity], ___: HealthTree) -> None: ...

    options = (
        {} if one is None else {"k8s-kubeconfig-path": kubeconfig(folder, one.url), "k8s-client-qps": "0"}
    )
    parts = (kubernetes.cell, kvstore.cell, identity.cell, allocation.cell)
    async with Hive(
        *parts, supply(known), provide(address_table), invoke(needed), settings=options
    ).started() as hive:
        yield Agent(hive)


def objects(one: Cluster) -> dict[str, Any]:
    kind = one.server.kinds.get("cilium.io", "v2", "ciliumidentities")
    assert kind is not None
    return {name: found for (_, name), found in one.server.store.of(kind.storage).objects.items()}


async def acquired(of: Agent, labels: tuple[str, ...], previous: int = 0) -> int:
    with anyio.fail_after(30):
        return (await of.identities.acquire(labels, previous)).id


def test_a_ciliumidentity_carries_its_labels() -> None:
    made = body(300, DB)
    assert made["metadata"] == {
        "name": "300",
        "labels": {"app": "db", "empty": "", "io.kubernetes.pod.namespace": "default"},
    }
    assert labels_of(made["security-labels"]) == DB
    assert "io.cilium.k8s.namespace.labels.team" not in body(300, WEB)["metadata"]["labels"]
    assert labels_of(body(300, WEB)["security-labels"]) == WEB


async def test_nodes_that_want_the_same_labels_at_once_get_the_same_number(
    one: Cluster, tmp_path: Path
) -> None:
    async with agent(tmp_path, one) as first, agent(tmp_path, one) as second:
        numbers: list[int] = []

        async def ask(of: Agent) -> None:
            numbers.append(await acquired(of, WEB))

        async with anyio.create_task_group() as tasks:
            for each in (first, second, first):
                tasks.start_soon(ask, each)
        assert numbers == [FIRST] * 3
        assert list(objects(one)) == [str(FIRST)]
        assert objects(one)[str(FIRST)]["security-labels"]["k8s:app"] == "web"
        other = await acquired(first, DB)
        await eventually(lambda: second.identities.get(other) == Identity(other, DB))
        first.identities.release(other)
        assert first.identities.get(other) is not None, "the cluster knows it still"


async def test_a_number_of_another_identity_is_skipped(one: Cluster, tmp_path: Path) -> None:
    async with agent(tmp_path, one) as node:
        await node.synced()
        one.put(body(FIRST, DB))  # the watch may send it before or after
        assert await acquired(node, WEB) == list(candidates(WEB))[1]


async def test_a_restarted_node_keeps_its_numbers_while_the_server_is_away(
    one: Cluster, tmp_path: Path
) -> None:
    one.put(body(4711, WEB))
    away = one.server.faults.add(Fault(times=-1, status=503))
    async with agent(tmp_path, one) as node:
        assert await acquired(node, WEB, previous=4711) == 4711
        assert await acquired(node, DB, previous=4712) == 4712
        with anyio.move_on_after(0.05):
            await node.identities.acquire(("k8s:app=new",))
            raise AssertionError("nobody can give a number")
        assert list(objects(one)) == ["4711"]
        away.times = 0
        await eventually(lambda: "4712" in objects(one), within=30)
        assert node.identities.is_current(4711, WEB)
        assert node.identities.is_current(4712, DB)
        assert await acquired(node, ("k8s:app=new",)) not in (4711, 4712)


async def test_a_number_that_means_something_else_now_is_given_up(one: Cluster, tmp_path: Path) -> None:
    one.put(body(4711, DB))
    one.put(body(4713, WEB))
    away = one.server.faults.add(Fault(times=-1, status=503))
    async with agent(tmp_path, one) as node:
        assert await acquired(node, WEB, previous=4712) == 4712
        assert await acquired(node, ("k8s:app=x",), previous=4711) == 4711
        away.times = 0
        await eventually(lambda: not node.identities.is_current(4711, ("k8s:app=x",)), within=30)
        await eventually(lambda: not node.identities.is_current(4712, WEB))
        assert await acquired(node, WEB) == 4713
        assert await acquired(node, ("k8s:app=x",)) not in (4711, 4712, 4713)


async def test_an_object_in_use_that_goes_comes_back_and_its_mark_goes(one: Cluster, tmp_path: Path) -> None:
    async with agent(tmp_path, one) as node:
        number = await acquired(node, WEB)
        await eventually(lambda: node.objects.get(("", str(number))) is not None)
        one.delete("CiliumIdentity", str(number))
        await eventually(lambda: str(number) in objects(one))
        assert node.identities.is_current(number, WEB)
        marked = body(number, WEB)
        marked["metadata"]["annotations"] = {"io.cilium.heartbeat": "2026-01-01T00:00:00Z"}
        one.put(marked)
        await eventually(lambda: not objects(one)[str(number)]["metadata"].get("annotations"))


async def test_an_object_that_goes_before_the_watch_brings_it_comes_back(
    one: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cluster.allocation.global_allocator.PENDING_TIMEOUT", 0.1)
    monkeypatch.setattr("cells.cluster.allocation.objects.COMPARE", 0.1)
    watch = on(PATH, watch=True)
    one.server.faults.add(Fault(lambda asked: watch(asked) and "resourceVersion" in asked.query, stall=True))
    async with agent(tmp_path, one) as node:
        await node.synced()
        number = await acquired(node, WEB)
        one.delete("CiliumIdentity", str(number))
        await eventually(lambda: str(number) in objects(one))


def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterNumbers, "allocatable", range(256, 260))
    monkeypatch.setattr(ClusterNumbers, "own", range(256, 260))


async def test_without_a_free_number_new_labels_wait_and_known_ones_do_not(
    one: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that creates pods with ever new labels keeps others' new labels waiting, and nothing else."""
    few_numbers(monkeypatch)
    for number in range(256, 260):
        one.put(body(number, DB if number == 256 else (f"k8s:flood={number}",)))
    async with agent(tmp_path, one) as node, anyio.create_task_group() as tasks:
        await node.synced()
        found: list[int] = []

        async def ask() -> None:
            found.append(await acquired(node, WEB))

        tasks.start_soon(ask)
        await eventually(
            lambda: any(
                "no free identity between 256 and 259" in f"{each.message} {each.error}"
                for each in node.health.snapshot()
            )
        )
        assert await acquired(node, DB) == 256
        assert not found
        one.delete("CiliumIdentity", "258")
        await eventually(lambda: found == [258], within=30)


async def test_the_last_free_number_is_found(
    one: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_numbers(monkeypatch)
    monkeypatch.setattr("cells.cluster.allocation.objects.ATTEMPTS", 1)
    last = next(number for number in range(256, 260) if number != next(candidates(WEB)))
    for number in set(range(256, 260)) - {last}:
        one.put(body(number, (f"k8s:flood={number}",)))
    async with agent(tmp_path, one) as node:
        await node.synced()
        assert await acquired(node, WEB) == last


async def test_a_failed_allocation_degrades_health_and_is_retried(one: Cluster, tmp_path: Path) -> None:
    async with agent(tmp_path, one) as node:
        await node.synced()
        refusal = one.server.faults.add(Fault(on(PATH, method="POST"), times=-1, status=403))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acquired, node, WEB)
            await eventually(lambda: node.level("identity-allocation.allocate") == "degraded")
            refusal.times = 0
        assert node.level("identity-allocation.allocate") == "ok"


async def test_without_an_api_server_numbers_are_the_nodes_own(tmp_path: Path) -> None:
    async with agent(tmp_path, None) as node:
        assert await acquired(node, WEB) == 256


async def test_many_objects_at_a_start_leave_the_event_loop_to_others_in_between(
    one: Cluster, tmp_path: Path
) -> None:
    many = range(1000, 5000)
    for number in many:
        one.put(body(number, (f"k8s:app=a{number}", "k8s:io.kubernetes.pod.namespace=default")))
    async with agent(tmp_path, one) as node:
        left, batches = set(many), 0
        async for changes in node.identities.table.changes(node.identities.table.revision):
            left -= (found := {change.key for change in changes})
            batches += bool(found)
            if not left:
                break
        assert batches > 1
