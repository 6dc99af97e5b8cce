"""Kubernetes Events about objects that are not served as written, over a fake API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from cells import kubernetes
from cells.cluster import kubernetes_events
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.object_events import (
    LONGEST,
    EventDraft,
    EventRecorder,
    EventSource,
    Regarding,
    event_name,
)
from cells.kubernetes.objects.core import NODES, SERVICES
from lifecycle import Hive, Lifecycle, Member, ReadTable, Table, provide, supply
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Fault, on
from tests.support.apiserver.errors import Resource
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig

pytestmark = pytest.mark.anyio
START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def events_of(server: ApiServer) -> list[dict[str, Any]]:
    return list(server.store.of(Resource("events.k8s.io", "events")).objects.values())


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with one.serving():
        yield one


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    made = connect(Access(servers=(f"http://127.0.0.1:{server.port}",), token=ADMIN_TOKEN), qps=0)
    yield made
    await made.reset()


async def test_two_writers_of_the_same_write_one_event_and_count_it_when_it_happens_again(
    server: ApiServer, client: Client
) -> None:
    clock = Clock()
    one, two = (EventRecorder(client, "cilium.io/agent", name, clock) for name in ("node-a", "node-b"))
    about = Regarding(SERVICES, "web", "default", "uid-web")
    for recorder in (one, two, one):
        await recorder.report(about, "AddressRefused", "no", action="Serve", kind="Warning")
    (event,) = events_of(server)
    assert "series" not in event or not event["series"], "all of it is one moment"
    assert event["regarding"] == {
        "apiVersion": "v1", "kind": "Service", "name": "web", "namespace": "default", "uid": "uid-web",
    }  # fmt: skip
    assert event["metadata"]["name"] == event_name(about, "AddressRefused", "no")
    clock.now += timedelta(hours=1)
    for recorder in (two, one):
        await recorder.report(about, "AddressRefused", "no", action="Serve", kind="Warning")
    (event,) = events_of(server)
    assert event["series"]["count"] == 2
    await one.report(about, "AddressRefused", "another", action="Serve")
    assert len(events_of(server)) == 2


async def test_long_names_and_notes_are_cut(server: ApiServer, client: Client) -> None:
    recorder = EventRecorder(client, "cilium.io/agent", "node-a")
    await recorder.report(Regarding(NODES, "n" * 253), "Refused", "x" * 2000, action="Route")
    (event,) = events_of(server)
    assert len(event["note"]) == LONGEST
    assert event["metadata"]["namespace"] == "default"


class Row(msgspec.Struct, frozen=True):
    """Something about a Service."""

    number: int
    name: str
    note: str
    shared: bool = True
    reason: str = "Refused"


def drafts(row: Row) -> Iterator[EventDraft]:
    about = Regarding(SERVICES, row.name, "default", f"uid-{row.name}")
    if row.note:
        yield EventDraft(about, row.reason, row.note, "Serve", shared=row.shared)


def rows() -> Table[int, Row]:
    return Table("rows", key=lambda row: row.number)


def source(table: Table[int, Row]) -> Member[EventSource]:
    return EventSource("rows", table, drafts, lambda row: bool(row.note))


class Agent:
    """The cell, and the table that it reports of."""

    def __init__(self, hive: Hive) -> None:
        self.table = hive.get(Table[int, Row])

    def put(self, *found: Row) -> None:
        with self.table.txn() as txn:
            txn.replace_all(found)


@asynccontextmanager
async def running(one: Cluster, folder: Path, others: Sequence[str] = ()) -> AsyncIterator[Agent]:
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def nodes() -> ReadTable[str, ClusterNode]:
        table: Table[str, ClusterNode] = Table("nodes", key=lambda node: node.full_name)
        with table.txn() as txn:
            for name in others:
                txn.put(ClusterNode(cluster="default", name=name, source=Source.KUBERNETES))
        return table

    hive = Hive(
        kubernetes.cell,
        kubernetes_events.cell,
        provide(rows, source, nodes),
        supply(known),
        settings={"k8s-client-qps": "0", "k8s-kubeconfig-path": kubeconfig(folder, one.url)},
    )
    async with hive.started():
        yield Agent(hive)


@pytest.fixture
async def there() -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


def messages(there: Cluster) -> dict[str, str]:
    return {one["regarding"]["name"]: one["note"] for one in events_of(there.server)}


async def test_of_an_object_and_a_reason_there_is_one_event_with_all_notes(
    there: Cluster, tmp_path: Path
) -> None:
    async with running(there, tmp_path) as agent:
        many = [Row(10 + n, "busy", f"address {n}") for n in range(9)]
        agent.put(Row(1, "web", "second"), Row(2, "web", "first"), Row(3, "quiet", ""), *many)
        await eventually(lambda: len(messages(there)) == 2)
        shown = "; ".join(f"address {n}" for n in range(5))
        assert messages(there) == {"web": "first; second", "busy": f"{shown}; and 4 more"}
        assert {one["type"] for one in events_of(there.server)} == {"Warning"}


async def test_what_changes_at_once_again_waits_for_its_turn(
    there: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_events, "PAUSE", 0.5)
    async with running(there, tmp_path) as agent:
        agent.put(Row(1, "web", "note 0"))
        await eventually(lambda: len(events_of(there.server)) == 1)
        for number in range(1, 20):
            agent.put(Row(1, "web", f"note {number}"))
        agent.put(Row(1, "web", "note 19"), Row(2, "db", "other"))
        await eventually(lambda: "db" in messages(there))
        assert len(events_of(there.server)) == 2
        await eventually(lambda: len(events_of(there.server)) == 3)
        assert messages(there)["web"] == "note 19", "what was in between is of no interest"


async def test_what_is_right_again_is_not_reported_later(
    there: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_events, "PAUSE", 0.2)
    async with running(there, tmp_path) as agent:
        agent.put(Row(1, "web", "note"))
        await eventually(lambda: len(events_of(there.server)) == 1)
        agent.put(Row(1, "web", "another"))
        agent.put(Row(2, "db", "other"))
        agent.put(Row(3, "end", "last"))
        await eventually(lambda: "end" in messages(there))
        agent.put(Row(4, "web", "again"))
        await eventually(lambda: messages(there)["web"] == "again")
        assert "another" not in [one["note"] for one in events_of(there.server)]


async def test_what_all_agents_find_is_reported_by_a_few(there: Cluster, tmp_path: Path) -> None:
    others = [f"n{number}" for number in range(40)]
    async with running(there, tmp_path, others) as agent:
        agent.put(
            *(Row(n, f"web-{n}", "shared") for n in range(20)), Row(99, "last", "of this node", shared=False)
        )
        await eventually(lambda: "last" in messages(there))
        assert len(messages(there)) < 10, "3 of 41 nodes report each"


async def test_a_server_that_refuses_events_is_in_the_log_and_the_next_one_is_written(
    there: Cluster, tmp_path: Path
) -> None:
    refused = Fault(on("/apis/events.k8s.io/v1/namespaces/default/events", method="POST"), status=403)
    there.server.faults.add(refused)
    with structlog.testing.capture_logs() as logged:
        async with running(there, tmp_path) as agent:
            agent.put(Row(1, "web", "first"))
            await eventually(lambda: any(one["event"] == "Kubernetes event not written" for one in logged))
            agent.put(Row(2, "db", "second"))
            await eventually(lambda: messages(there) == {"db": "second"})
