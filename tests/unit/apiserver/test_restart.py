"""Clients of the fake API server after a lost history or a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.apiserver import ApiServer
from tests.unit.apiserver.requests import CONFIGMAPS, configmap, definition, get, watch

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with one.serving():
        yield one


def event(name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": name}}
    made |= {"eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal"}
    words = dict.fromkeys(("reportingController", "reportingInstance", "action", "reason"), "x")
    return {**made, **words, "regarding": {"kind": "Pod", "namespace": "default", "name": "p"}}


async def test_a_watch_from_before_a_restart_gets_status_410(server: ApiServer) -> None:
    version = server.add(configmap("a"))["metadata"]["resourceVersion"]
    server.restart()
    stream = watch(server, CONFIGMAPS, resourceVersion=version)
    assert await stream.over()
    assert [one["type"] for one in stream.events] == ["ERROR"]
    assert stream.events[0]["object"]["code"] == 410
    assert stream.events[0]["object"]["reason"] == "Expired"
    assert stream.ended == "last chunk"


async def test_a_bookmark_comes_after_all_that_happened_before_it() -> None:
    server = ApiServer(bookmark_every=0.1)
    async with server.serving():
        stream = watch(server, CONFIGMAPS, resourceVersion=server.store.revision, allowWatchBookmarks="true")
        assert await stream.until(1)
        seen = len(stream.events)
        loop = asyncio.get_running_loop()
        loop.call_later(0.12, server.add, configmap("a"))
        loop.call_soon(time.sleep, 0.2)  # a bookmark, and then the event, fall due in one turn of the loop
        assert await stream.until(seen + 2)
        await stream.close()
    assert [one["type"] for one in stream.events[seen : seen + 2]] == ["ADDED", "BOOKMARK"]


async def test_a_list_goes_on_from_the_cache_after_a_compaction_but_not_after_a_restart(
    server: ApiServer,
) -> None:
    for name in "abc":
        server.add(configmap(name))
    page = (await get(server, CONFIGMAPS, limit=1)).json
    server.add(configmap("d"))
    server.store.compact()
    token = page["metadata"]["continue"]
    again = await get(server, CONFIGMAPS, **{"continue": token})
    assert [one["metadata"]["name"] for one in again.json["items"]] == ["b", "c"]
    server.restart()
    vanished = await get(server, CONFIGMAPS, **{"continue": token})
    assert (vanished.status, vanished.json["reason"]) == (410, "Expired")
    fresh = await get(server, CONFIGMAPS, **{"continue": vanished.json["metadata"]["continue"]})
    assert [one["metadata"]["name"] for one in fresh.json["items"]] == ["b", "c", "d"]


async def test_events_have_no_cache_so_compaction_ends_their_lists_at_once(server: ApiServer) -> None:
    for name in "abc":
        server.add(event(name))
    page = (await get(server, EVENTS, limit=1)).json
    server.add(event("d"))
    server.store.compact()
    vanished = await get(server, EVENTS, **{"continue": page["metadata"]["continue"]})
    assert vanished.status == 410
    exact = await get(
        server,
        EVENTS,
        resourceVersion=page["items"][0]["metadata"]["resourceVersion"],
        resourceVersionMatch="Exact",
    )
    assert exact.json["message"] == "The resourceVersion for the provided list is too old."


async def test_the_first_request_for_a_custom_resource_after_a_restart_is_to_be_repeated(
    server: ApiServer,
) -> None:
    server.add(definition())
    path = "/apis/example.io/v1/things"
    async with asyncio.timeout(30):
        while (await get(server, path)).status != 200:  # noqa: ASYNC110  # the server has no event for it
            await asyncio.sleep(0.01)
    server.restart()
    refused = await get(server, path)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert (await get(server, path)).status == 200
