"""A reflector that follows a fake API server, and the table that it fills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.objects.core import PODS, Pod
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.reflector import Reflector
from cells.kubernetes.sink import ObjectEvents, Sink, SourceStatus
from lifecycle import HealthTree, Table
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer


def pod(name: str, ip: str = "10.0.0.1", **metadata: Any) -> dict[str, Any]:
    spec = {"nodeName": "node-a", "containers": [{"name": "c", "image": "x"}]}
    meta = {"name": name, "namespace": "default", "labels": {"ip": ip}, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


class World:
    """A fake API server, a reflector, and the table that the reflector fills."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.statuses: Table[str, SourceStatus] = Table("sources", key=lambda one: one.kind)
        self.table: Table[tuple[str, str], Pod] = Table("pods", key=lambda one: one.key)
        self.health = HealthTree()
        self.events = ObjectEvents()
        self.client: Client
        self.emptied = False
        """Whether the table has become empty after it had rows."""

    def names(self) -> set[str]:
        return {one.name for one in self.table.all()}

    @property
    def status(self) -> SourceStatus:
        found = self.statuses.get("pods")
        assert found is not None
        return found

    def change(self, obj: dict[str, Any]) -> None:
        """Merge metadata into a stored pod, as another client would."""
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


def new_server() -> ApiServer:
    """Return a server that answers quickly when a future version is requested."""
    server = ApiServer()
    server.future_wait = 0.2
    return server
