"""etcd's streams: ends and fragments lose neither leases nor events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import grpc
import pytest
from aetcd import rpc
from grpc import aio

from cells.kvstore.etcd import EtcdClient, StoreMetrics
from cells.kvstore.model import OtherStoreError, StoreUnavailableError
from cells.kvstore.settings import StoreOptions

pytestmark = pytest.mark.anyio

Answers = Callable[[AsyncIterator[Any]], AsyncIterator[Any]]


@asynccontextmanager
async def client_of(
    service: str, method: str, answers: Answers, request: Any, *, pinned: bool = False
) -> AsyncIterator[EtcdClient]:
    """A client of a server with one method, which answers a stream."""

    async def stream(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        async for answer in answers(requests):
            yield answer

    handler = aio.server()
    methods = {
        method: grpc.stream_stream_rpc_method_handler(
            stream,
            request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
    }
    handler.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = handler.add_insecure_port("127.0.0.1:0")
    await handler.start()
    options = StoreOptions(addresses=(f"http://127.0.0.1:{port}",))
    client = EtcdClient(options, StoreMetrics(), pinned=pinned)
    try:
        async with client.open():
            yield client
    finally:
        await handler.stop(None)


async def test_a_renewal_stream_that_ends_without_an_answer_leaves_the_lease() -> None:
    async def ends(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in requests:
            return
        yield

    request = rpc.LeaseKeepAliveRequest
    async with client_of("etcdserverpb.Lease", "LeaseKeepAlive", ends, request) as client:
        with anyio.fail_after(20), pytest.raises(StoreUnavailableError, match="ended without an answer"):
            await client.keep_alive(7)


def event(key: bytes, revision: int) -> Any:
    return rpc.Event(type=rpc.Event.PUT, kv=rpc.KeyValue(key=key, value=b"", mod_revision=revision))


async def test_events_of_a_split_watch_answer_come_together() -> None:
    async def in_parts(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in requests:
            yield rpc.WatchResponse(created=True)
            yield rpc.WatchResponse(fragment=True, events=[event(b"a/1", 4), event(b"a/2", 5)])
            yield rpc.WatchResponse(fragment=True, events=[event(b"a/3", 5)])
            yield rpc.WatchResponse(events=[event(b"a/4", 5)])
            yield rpc.WatchResponse(fragment=True, events=[event(b"a/5", 6)])
            return

    async with (
        client_of("etcdserverpb.Watch", "Watch", in_parts, rpc.WatchRequest) as client,
        aclosing(client.watch("a/", 4)) as changes,
    ):
        with anyio.fail_after(20):
            assert await anext(changes) == []
            assert [one.key for one in await anext(changes)] == ["a/1", "a/2", "a/3", "a/4"]
            with pytest.raises(StoreUnavailableError):
                await anext(changes)


@pytest.mark.parametrize("pinned", [True, False])
async def test_an_answer_of_another_etcd_cluster_ends_a_pinned_watch(*, pinned: bool) -> None:
    async def of_two(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in requests:
            yield rpc.WatchResponse(header=rpc.ResponseHeader(cluster_id=7), created=True)
            other = rpc.ResponseHeader(cluster_id=8)
            yield rpc.WatchResponse(header=other, events=[event(b"a/1", 4)])

    async with (
        client_of("etcdserverpb.Watch", "Watch", of_two, rpc.WatchRequest, pinned=pinned) as client,
        aclosing(client.watch("a/", 4)) as changes,
    ):
        with anyio.fail_after(20):
            assert await anext(changes) == []
            if pinned:
                with pytest.raises(OtherStoreError, match="etcd cluster ID mismatch: expected 7, got 8"):
                    await anext(changes)
            else:
                assert [one.key for one in await anext(changes)] == ["a/1"]
        assert client.cluster_id == 7
