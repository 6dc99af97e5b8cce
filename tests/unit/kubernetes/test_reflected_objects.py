"""How a reflector handles invalid, null, contradictory and unserved objects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import PODS, Pod
from cells.kubernetes.reflector import Reflector
from cells.kubernetes.sink import Sink
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Fault
from tests.unit.apiserver.replay import RECORDINGS
from tests.unit.kubernetes.reflected import World, following, new_server, pod, reach

pytestmark = pytest.mark.anyio
DEFINITIONS = RECORDINGS / "fixtures"


@pytest.fixture
async def server() -> ApiServer:
    return new_server()


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
async def test_null_fields_are_absent_in_lists_and_in_changes(server: ApiServer, streams: bool) -> None:
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
async def test_of_events_in_one_block_the_last_valid_one_counts(server: ApiServer, what: str) -> None:
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
    """A watch event that may contradict what the server stores."""
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
    """The last event of an object counts, in any order; the next list restores what the server stores."""
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
