"""A table follows an API server through everything that happens to one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import UnreachableError
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import PODS, Pod
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.reflector import Reflector
from cells.kubernetes.sink import ObjectEvents, Sink, SourceStatus
from lifecycle import HealthTree, Table
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Fault, on
from tests.unit.apiserver.replay import RECORDINGS

pytestmark = pytest.mark.anyio
PODS_PATH = "/api/v1/pods"
DEFINITIONS = RECORDINGS / "fixtures"


def pod(name: str, ip: str = "10.0.0.1", **metadata: Any) -> dict[str, Any]:
    spec = {"nodeName": "node-a", "containers": [{"name": "c", "image": "x"}]}
    meta = {"name": name, "namespace": "default", "labels": {"ip": ip}, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


class World:
    """A stand-in, a reflector, and the table it fills."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.statuses: Table[str, SourceStatus] = Table("sources", key=lambda one: one.kind)
        self.table: Table[tuple[str, str], Pod] = Table("pods", key=lambda one: one.key)
        self.health = HealthTree()
        self.events = ObjectEvents()
        self.client: Client
        self.emptied = False
        """Whether the table was ever seen empty after it had rows."""

    def names(self) -> set[str]:
        return {one.name for one in self.table.all()}

    @property
    def status(self) -> SourceStatus:
        found = self.statuses.get("pods")
        assert found is not None
        return found

    def change(self, obj: dict[str, Any]) -> None:
        """Write an object over what there is, as another client would."""
        kind = self.server.kinds.get("", "v1", "pods")
        assert kind is not None
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        live = self.server.store.get(kind.storage, key) or {}
        self.server.store.put(
            kind.storage, key, {**live, "metadata": {**live["metadata"], **obj["metadata"]}}
        )

    def delete(self, name: str) -> None:
        kind = self.server.kinds.get("", "v1", "pods")
        assert kind is not None
        self.server.store.delete(kind.storage, ("default", name))


async def reach(wanted: Callable[[], bool]) -> None:
    await eventually(wanted, within=30)


@asynccontextmanager
async def following(
    server: ApiServer,
    url: str,
    kind: Kind[Any] = PODS,
    *,
    others: tuple[str, ...] = (),
    patience: float = 30,
    first_pause: float = 0.01,
    longest_pause: float = 0.1,
) -> AsyncIterator[World]:
    world = World(server)
    reporter, log = world.health.reporter("k8s"), structlog.get_logger()
    sink: Sink[Any] = Sink(kind, world.table, world.statuses, reporter, log, events=world.events)
    sink.begin()
    client = connect(Access(servers=(*others, url), token=ADMIN_TOKEN), qps=0, timeout=patience)
    world.client = client
    reflector = Reflector(client, kind, sink, first_pause=first_pause, longest_pause=longest_pause)
    task = asyncio.create_task(reflector.run())
    watcher = asyncio.create_task(_watch_for_gaps(world))
    try:
        yield world
    finally:
        for one in (task, watcher):
            one.cancel()
        results = await asyncio.gather(task, watcher, return_exceptions=True)
        await client.reset()
        assert all(isinstance(one, asyncio.CancelledError) for one in results), results


async def _watch_for_gaps(world: World) -> None:
    filled = False
    async for _ in world.table.changes():
        filled = filled or bool(len(world.table))
        world.emptied = world.emptied or (filled and not len(world.table))


@pytest.fixture
async def server() -> ApiServer:
    one = ApiServer()
    one.future_wait = 0.2
    return one


async def test_existing_objects_come_before_changes(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url) as world:
        await world.table.wait_initialized()
        assert world.names() == {"a"}
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})
        world.change(pod("a", "10.0.0.9"))
        await reach(
            lambda: (row := world.table.get(("default", "a"))) is not None and row.labels["ip"] == "10.0.0.9"
        )
        world.delete("b")
        await reach(lambda: world.names() == {"a"})
        assert world.events.processed == {
            ("Pod", "create", "success"): 2,
            ("Pod", "update", "success"): 1,
            ("Pod", "delete", "success"): 1,
        }
        assert world.status.state == "watching"
        assert world.status.changed > 0


async def test_an_older_server_is_listed_page_by_page(server: ApiServer) -> None:
    for number in range(1203):
        server.add(pod(f"p{number}"))
    refused = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}
    streams = server.faults.add(
        Fault(lambda request: "sendInitialEvents" in request.query, times=-1, status=422, body=refused)
    )
    async with server.serving() as url, following(server, url) as world:
        await world.table.wait_initialized()
        assert len(world.table) == 1203
        assert streams.hits == 1
        assert sum("limit=500" in target for _, target in server.requests) == 3
        server.add(pod("late"))
        await reach(lambda: "late" in world.names())


async def test_pages_that_expire_faster_than_they_are_read_come_all_in_one(server: ApiServer) -> None:
    for number in range(1203):
        server.add(pod(f"p{number}"))
    server.faults.add(Fault(lambda request: "sendInitialEvents" in request.query, times=-1, status=422))
    expired = {"kind": "Status", "code": 410, "reason": "Expired", "metadata": {"continue": "later"}}
    server.faults.add(Fault(lambda request: "continue" in request.query, times=-1, status=410, body=expired))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: len(world.table) == 1203)
        lists = [target for _, target in server.requests if "watch=" not in target]
        assert ["limit=" in target for target in lists] == [True, True, False]


async def test_a_streaming_list_without_an_end_bookmark_falls_back_to_pages(server: ApiServer) -> None:
    server.add(pod("a"))
    endless = Fault(lambda request: "sendInitialEvents" in request.query, times=-1, end_after=1)
    server.faults.add(endless)
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.names() == {"a"} and world.status.state == "watching")
        assert endless.hits == 1
        assert not world.status.error


async def test_a_version_that_no_server_can_read_is_let_go(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.status.state == "watching")
        server.faults.add(
            Fault(
                lambda request: "watch" in request.query and "sendInitialEvents" not in request.query,
                times=5,
                status=500,
            )
        )
        before = len(server.requests)
        await server.hang_up()
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"} and world.status.state == "watching")
        assert any("sendInitialEvents" in target for _, target in server.requests[before:])
        assert not world.emptied


TROUBLE = {
    "closed without an answer": Fault(on(PODS_PATH), times=3, close=True),
    "500": Fault(on(PODS_PATH), times=3, status=500),
    "503": Fault(on(PODS_PATH), times=3, status=503),
    "504 without a Status": Fault(on(PODS_PATH), times=3, status=504, body="Gateway Timeout"),
    "429 with Retry-After": Fault(
        on(PODS_PATH), times=2, status=429, headers={"Retry-After": "0.05"}, body="busy"
    ),
    "401": Fault(on(PODS_PATH), times=3, status=401),
    "409": Fault(on(PODS_PATH), times=2, status=409),
    "410 as a status": Fault(on(PODS_PATH), times=2, status=410),
    "garbage instead of JSON": Fault(on(PODS_PATH), times=3, status=200, body=b"\x00\xff{{{ no JSON"),
    "JSON that is not a list": Fault(on(PODS_PATH), times=3, status=200, body=b'{"items": 7}'),
    "an empty body": Fault(on(PODS_PATH), times=3, status=200, body=b""),
    "a redirect": Fault(on(PODS_PATH), times=2, status=302, body=b""),
    "garbage in the stream": Fault(on(PODS_PATH, watch=True), times=3, insert=b"\x00 garbage\n"),
    "an event of no kind": Fault(
        on(PODS_PATH, watch=True), times=3, insert=b'{"type":"BOGUS","object":{}}\n'
    ),
    "an error that is not a Status": Fault(
        on(PODS_PATH, watch=True), times=3, insert=b'{"type":"ERROR","object":[]}\n'
    ),
    "cut in the middle of a line": Fault(on(PODS_PATH, watch=True), times=3, cut_after=0),
    "ended at once": Fault(on(PODS_PATH, watch=True), times=3, end_after=0),
}


@pytest.mark.parametrize("what", TROUBLE)
@pytest.mark.parametrize("when", ["at the start", "later"])
async def test_the_reflector_recovers_from_each_fault(server: ApiServer, what: str, when: str) -> None:
    known = TROUBLE[what]
    fault = Fault(**{**known.__dict__, "hits": 0})
    server.add(pod("a"))
    if when == "at the start":
        server.faults.add(fault)
    async with server.serving() as url, following(server, url) as world:
        if when == "later":
            await world.table.wait_initialized()
            server.faults.add(fault)
            await server.hang_up()
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})
        await reach(lambda: fault.hits == known.times and world.status.state == "watching")
        world.delete("a")
        await reach(lambda: world.names() == {"b"})
        assert not world.emptied


@pytest.mark.parametrize(
    "fault",
    [
        Fault(lambda one: {"watch", "resourceVersion"} <= one.query.keys(), times=-1, end_after=0),
        Fault(
            lambda one: {"watch", "resourceVersion"} <= one.query.keys(),
            times=-1,
            insert=b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n',
        ),
    ],
    ids=["ended at once", "expired"],
)
async def test_watches_that_fail_at_once_are_repeated_with_growing_pauses(
    server: ApiServer, fault: Fault
) -> None:
    server.add(pod("a"))
    server.faults.add(fault)
    async with server.serving() as url, following(server, url, longest_pause=60) as world:
        await reach(lambda: world.status.state == "failing")
        assert world.names() == {"a"}
        asked = len(server.requests)
        over = time.monotonic() + 1.0
        await reach(lambda: time.monotonic() > over)
        assert len(server.requests) - asked < 30
        fault.times = 0
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})


async def test_a_server_that_wants_to_be_left_alone_for_a_day_is_asked_again_before(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kubernetes.reflector.LONGEST_RETRY", 0.1)
    server.faults.add(
        Fault(
            lambda one: {"watch", "resourceVersion"} <= one.query.keys(),
            status=429,
            headers={"Retry-After": "86400"},
        )
    )
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.status.state == "failing")
        server.add(pod("a"))
        await reach(lambda: world.names() == {"a"})


async def test_a_restart_that_forgets_versions_makes_it_list_again_without_a_gap(server: ApiServer) -> None:
    server.add(pod("a"))
    server.add(pod("b"))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.status.state == "watching" and len(world.table) == 2)
        world.delete("a")
        server.restart()
        await server.hang_up()
        server.add(pod("c"))
        await reach(lambda: world.names() == {"b", "c"})
        assert not world.emptied


async def test_without_a_server_known_objects_stay(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url) as world:
        await world.table.wait_initialized()
        server.faults.add(Fault(times=-1, close=True))
        await server.hang_up()
        await reach(lambda: world.status.state == "failing")
        assert world.names() == {"a"}
        assert "degraded" in {one.level for one in world.health.snapshot()}
        server.faults.clear()
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})
        assert {one.level for one in world.health.snapshot() if one.module == "k8s.pods"} == {"ok"}


def watches(server: ApiServer) -> int:
    return sum("watch=1&resourceVersion=" in target for _, target in server.requests)


async def test_a_watch_that_is_never_answered_is_asked_for_again(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url, patience=0.5) as world:
        await reach(lambda: watches(server) == 1)
        stalled = server.faults.add(Fault(on(PODS_PATH, watch=True), times=1, stall=True))
        await server.hang_up()
        await reach(lambda: stalled.hits == 1)
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})


async def test_a_server_that_was_long_away_and_has_to_start_is_asked_again_soon(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = 12
    server.add(pod("a"))
    async with server.serving() as url, following(server, url, first_pause=0.2, longest_pause=30) as world:
        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == away:  # its caches are not filled yet, and then of another history
                server.faults.add(Fault(on(PODS_PATH), times=1, status=429, headers={"Retry-After": "1"}))
                server.faults.add(Fault(on(PODS_PATH), times=1, status=410))

        monkeypatch.setattr(world.client.reach, "pause", pause)
        server.faults.add(Fault(on(PODS_PATH), times=away, close=True))
        await reach(lambda: world.names() == {"a"})
    before, after = pauses[:away], pauses[away:]
    assert max(before) >= 15
    assert after
    assert max(after) <= 1.25


async def test_an_unanswered_heartbeat_replaces_the_connections_of_watches(server: ApiServer) -> None:
    silent = server.faults.add(Fault(on("/healthz"), delay=600, close=True))
    async with server.serving() as url, following(server, url, patience=2) as world:
        await reach(lambda: watches(server) > 0)
        before = watches(server)
        with pytest.raises(UnreachableError, match="silent for 2 s"):
            await world.client.heartbeat(0)
        assert silent.hits == 1
        await reach(lambda: watches(server) > before)


async def test_a_server_that_refuses_healthz_keeps_its_connections(server: ApiServer) -> None:
    refused = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403}
    asked = server.faults.add(Fault(on("/healthz"), status=403, body=refused))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: watches(server) == 1)
        await world.client.heartbeat(0)
        assert asked.hits == 1
        server.add(pod("a"))
        await reach(lambda: world.names() == {"a"})
        assert watches(server) == 1


async def test_another_server_is_asked_when_one_does_not_answer(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url, others=("http://127.0.0.1:1",)) as world:
        await world.table.wait_initialized()
        assert world.names() == {"a"}


async def test_an_object_that_cannot_be_read_keeps_its_last_good_row(server: ApiServer) -> None:
    server.add(pod("a"))
    server.add(pod("b"))
    async with server.serving() as url, following(server, url) as world:
        await world.table.wait_initialized()
        kind = server.kinds.get("", "v1", "pods")
        assert kind is not None
        live = server.store.get(kind.storage, ("default", "a"))
        assert live is not None
        server.store.put(kind.storage, ("default", "a"), {**live, "spec": {"nodeName": 5}})
        await reach(lambda: bool(world.status.broken))
        assert "pods/default/a" in world.status.broken[0]
        assert "nodeName" in world.status.broken[0]
        row = world.table.get(("default", "a"))
        assert row is not None
        assert row.spec.node_name == "node-a"
        server.restart()
        await server.hang_up()
        server.add(pod("c"))
        await reach(lambda: world.names() == {"a", "b", "c"})
        server.store.put(kind.storage, ("default", "a"), live)
        await reach(lambda: not world.status.broken)


@pytest.mark.parametrize("streams", [True, False])
async def test_what_is_null_is_absent_in_lists_and_in_changes(server: ApiServer, streams: bool) -> None:
    def null(name: str) -> dict[str, Any]:
        spec = {"nodeName": "node-a", "hostNetwork": None, "serviceAccountName": None}
        metadata = {"name": name, "namespace": "default", "uid": None, "labels": {"ip": "10.0.0.1"}}
        return {**pod(name), "metadata": metadata, "spec": spec, "status": None}

    kind = server.kinds.get("", "v1", "pods")
    assert kind is not None
    if not streams:
        server.faults.add(Fault(lambda request: "sendInitialEvents" in request.query, times=-1, status=422))
    server.add(pod("a"))
    server.store.put(kind.storage, ("default", "b"), null("b"))
    async with server.serving() as url, following(server, url) as world:
        await world.table.wait_initialized()
        assert world.names() == {"a", "b"}
        server.store.put(kind.storage, ("default", "c"), null("c"))
        await reach(lambda: world.names() == {"a", "b", "c"})
        assert not world.status.broken
        row = world.table.get(("default", "c"))
        assert row is not None
        assert (row.labels, row.spec.host_network, row.status.phase) == ({"ip": "10.0.0.1"}, False, "")


def line(type_: str, name: str, **more: Any) -> bytes:
    obj = pod(name, resourceVersion="5000")
    return json.dumps({"type": type_, "object": {**obj, **more}}).encode() + b"\n"


BAD: dict[str, Any] = {"spec": {"nodeName": 5}}
TOGETHER: dict[str, tuple[list[bytes], set[str], bool]] = {
    "deleted after it": ([line("ADDED", "x", **BAD), line("DELETED", "x")], {"a"}, False),
    "mended after it": ([line("ADDED", "x", **BAD), line("MODIFIED", "x")], {"a", "x"}, False),
    "good before it": ([line("ADDED", "x"), line("MODIFIED", "x", **BAD)], {"a", "x"}, True),
    "made again as it": ([line("DELETED", "a"), line("ADDED", "a", **BAD)], set(), True),
}


@pytest.mark.parametrize("what", TOGETHER)
async def test_of_events_that_come_together_the_last_good_one_counts(server: ApiServer, what: str) -> None:
    lines, left, is_broken = TOGETHER[what]
    server.add(pod("a"))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.status.state == "watching")
        server.faults.add(
            Fault(
                lambda request: "watch" in request.query and "sendInitialEvents" not in request.query,
                insert=b"".join(lines) + line("ADDED", "last"),
            )
        )
        await server.hang_up()
        await reach(lambda: "last" in world.names())
        assert world.names() == left | {"last"}
        assert bool(world.status.broken) is is_broken


async def test_an_unserved_kind_delays_no_start_and_is_followed_when_served(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kubernetes.reflector.ABSENT_PAUSE", 0.05)
    async with server.serving() as url, following(server, url, CILIUM_NODES) as world:
        await world.table.wait_initialized()
        found = world.statuses.get("ciliumnodes.cilium.io")
        assert found is not None
        assert found.state == "absent"
        server.add(json.loads((DEFINITIONS / "crd_ciliumnodes.json").read_bytes()))
        await reach(lambda: server.kinds.get("cilium.io", "v2", "ciliumnodes") is not None)
        server.add(
            {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": "n"}, "spec": {}}
        )
        await reach(lambda: world.names() == {"n"})


async def test_a_selector_limits_the_watched_objects(server: ApiServer) -> None:
    server.add(pod("a"))
    other = pod("b")
    other["spec"]["nodeName"] = "node-b"
    server.add(other)
    world = World(server)
    sink: Sink[Pod] = Sink(
        PODS, world.table, world.statuses, world.health.reporter("k8s"), structlog.get_logger()
    )
    async with server.serving() as url:
        client = connect(Access(servers=(url,), token=ADMIN_TOKEN), qps=0)
        reflector = Reflector(client, PODS, sink, query={"fieldSelector": "spec.nodeName=node-a"})
        task = asyncio.create_task(reflector.run())
        await world.table.wait_initialized()
        assert world.names() == {"a"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.reset()


def stated(type_: str, name: str, ip: str, version: str = "5000", **more: Any) -> bytes:
    """An event as the server states it, true or not."""
    obj = pod(name, ip, resourceVersion=version)
    return json.dumps({"type": type_, "object": {**obj, **more}}).encode() + b"\n"


PAST = b'{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"1"}}}\n'
LIES: dict[str, tuple[list[bytes], dict[str, str]]] = {
    "added twice": ([stated("ADDED", "x", "1"), stated("ADDED", "x", "2")], {"a": "0", "x": "2"}),
    "added though it is there": ([stated("ADDED", "a", "3")], {"a": "3"}),
    "changed though it is not there": ([stated("MODIFIED", "x", "2")], {"a": "0", "x": "2"}),
    "deleted though it is not there": ([stated("DELETED", "ghost", "1")], {"a": "0"}),
    "deleted twice": ([stated("DELETED", "a", "1")] * 2, {}),
    "deleted, then changed": ([stated("DELETED", "a", "1"), stated("MODIFIED", "a", "4")], {"a": "4"}),
    "an older version later": (
        [stated("MODIFIED", "a", "9", "9000"), stated("MODIFIED", "a", "1", "3")],
        {"a": "1"},
    ),
    "a version that is not a number": ([stated("MODIFIED", "a", "2", "new")], {"a": "2"}),
    "no version": ([stated("MODIFIED", "a", "2", "")], {"a": "2"}),
    "a bookmark of the past": ([PAST, stated("ADDED", "x", "2")], {"a": "0", "x": "2"}),
    "a pod that was not asked for": (
        [stated("ADDED", "x", "2", spec={"nodeName": "elsewhere"})],
        {"a": "0", "x": "2"},
    ),
}


@pytest.mark.parametrize("what", LIES)
async def test_contradictory_watch_events_affect_only_their_objects(server: ApiServer, what: str) -> None:
    """The last event of an object counts, in any order; what the server has comes back with a new list."""
    lines, left = LIES[what]
    server.add(pod("a", "0"))
    async with server.serving() as url, following(server, url) as world:
        await reach(lambda: world.status.state == "watching")
        server.faults.add(
            Fault(
                lambda request: "watch" in request.query and "sendInitialEvents" not in request.query,
                insert=b"".join(lines) + line("ADDED", "last"),
            )
        )
        await server.hang_up()
        await reach(lambda: "last" in world.names())
        assert {one.name: one.labels["ip"] for one in world.table.all() if one.name != "last"} == left
        assert not world.status.broken
        server.faults.add(Fault(lambda request: "watch" in request.query, status=410))
        await server.hang_up()
        await reach(lambda: world.names() == {"a"})
        (row,) = world.table.all()
        assert row.labels["ip"] == "0"
