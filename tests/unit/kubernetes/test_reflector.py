"""A reflector's table follows an API server through lists, watches, errors and restarts."""

from __future__ import annotations

import time

import pytest

from cells.kubernetes.client.errors import UnreachableError
from tests.support.apiserver import ApiServer, Fault, on
from tests.unit.kubernetes.reflected import following, new_server, pod, reach

pytestmark = pytest.mark.anyio
PODS_PATH = "/api/v1/pods"


@pytest.fixture
async def server() -> ApiServer:
    return new_server()


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


async def test_a_list_with_expired_pages_is_read_in_one_request(server: ApiServer) -> None:
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


async def test_a_version_that_the_server_answers_with_500_is_dropped(server: ApiServer) -> None:
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
        sent = len(server.requests)
        over = time.monotonic() + 1.0
        await reach(lambda: time.monotonic() > over)
        assert len(server.requests) - sent < 30
        fault.times = 0
        server.add(pod("b"))
        await reach(lambda: world.names() == {"a", "b"})


async def test_a_retry_after_of_a_day_is_shortened(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kubernetes.reflector.MAX_RETRY_AFTER", 0.1)
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


async def test_a_restart_that_drops_old_versions_leaves_no_gap(
    server: ApiServer,
) -> None:
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


async def test_objects_stay_while_no_server_answers(server: ApiServer) -> None:
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


async def test_the_first_errors_of_a_server_that_is_back_are_retried_soon(
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

        monkeypatch.setattr(world.client.reachability, "pause", pause)
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


async def test_the_next_server_is_used_when_one_does_not_answer(server: ApiServer) -> None:
    server.add(pod("a"))
    async with server.serving() as url, following(server, url, others=("http://127.0.0.1:1",)) as world:
        await world.table.wait_initialized()
        assert world.names() == {"a"}
