"""Pipelined writes: each ends as it would alone, whatever happens to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import ApiError, ConflictError, NotFoundError, UnreachableError
from cells.kubernetes.objects.core import NODES
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.unit.kubernetes.listening import listening

pytestmark = pytest.mark.anyio
DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}"
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def client_of(url: str, within: float = 5.0) -> AsyncIterator[Client]:
    made = connect(Access(servers=(url,), token=ADMIN_TOKEN), qps=0, timeout=within)
    try:
        yield made
    finally:
        await made.reset()


class Server:
    """Answers each request by its number, from 0 on; an answer of nothing closes the connection."""

    def __init__(self, answer: Callable[[int], bytes]) -> None:
        self._answer = answer
        self.asked: list[str] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                self.asked.append(head.split(b" ")[1].decode().rpartition("/")[2])
                found = self._answer(len(self.asked) - 1)
                writer.write(found)
                if not found or b"close" in found:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()


@asynccontextmanager
async def serving(
    answer: Callable[[int], bytes], within: float = 5.0
) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(answer)
    async with (
        listening(server.serve) as port,
        client_of(f"http://127.0.0.1:{port}", within) as client,
    ):
        yield server, client


async def deleted(client: Client, *names: str) -> list[type[Exception] | None]:
    """How the deletions of these nodes end."""
    ends = await client.send_all([client.deletion(NODES, name, uid=f"u-{name}") for name in names])
    return [None if error is None else type(error) for error in ends]


async def test_a_redirect_is_an_error() -> None:
    moved = b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://b.test/\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(lambda _: moved) as (_, client):
        assert await deleted(client, "a", "b") == [ApiError, ApiError]
        with pytest.raises(
            ApiError, match=r"308 Redirect: to https://b\.test/; set the URL of an API server"
        ):
            await client.delete(NODES, "a")


async def test_each_of_many_writes_ends_as_it_would_alone() -> None:
    server = ApiServer()
    async with server.serving(), client_of(f"http://127.0.0.1:{server.port}") as client:
        for name in "abc":
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await client.create(NODES, body)
        uid = (await client.get(NODES, "a")).metadata.uid
        ends = await client.send_all(
            [
                client.deletion(NODES, "a", uid=uid),
                client.deletion(NODES, "b", uid="another"),
                client.deletion(NODES, "missing"),
                client.merge(NODES, "c", {"metadata": {"labels": {"x": "1"}}}),
            ]
        )
        assert [type(one) for one in ends] == [type(None), ConflictError, NotFoundError, type(None)]
        assert (await client.get(NODES, "c")).labels == {"x": "1"}
        assert (await client.get(NODES, "b")).name == "b"


async def test_they_share_a_connection_and_are_counted_one_by_one() -> None:
    async with serving(lambda number: MISSING if number == 1 else DONE) as (server, client):
        assert await deleted(client, *"abcd") == [None, NotFoundError, None, None]
        assert await deleted(client, "e") == [None]
        assert server.connections == 1
        (path,) = {path for path, _ in client.calls.latency}
        assert path == "/api/v1/nodes/{name}"
        assert sorted((status, n) for (_, _, status), n in client.calls.returned.items()) == [
            ("200", 4),
            ("404", 1),
        ]


@pytest.mark.parametrize("end", [LAST, b""], ids=["with Connection: close", "without"])
async def test_those_that_an_ended_connection_left_are_sent_again(end: bytes) -> None:
    async with serving(lambda number: end if number == 1 else DONE) as (server, client):
        assert await deleted(client, *"abcd") == [None] * 4
        assert server.asked[:2] == ["a", "b"]
        assert server.asked[2:] == (["c", "d"] if end else ["b", "c", "d"])


async def test_what_is_refused_for_a_moment_is_sent_again_by_itself() -> None:
    async with serving(lambda number: BUSY if number == 1 else DONE) as (server, client):
        assert await deleted(client, *"abc") == [None] * 3
        assert server.asked == ["a", "b", "c", "b"]


async def test_without_an_answer_in_time_all_have_failed_and_are_not_repeated() -> None:
    silent = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    async with listening(serve) as port, client_of(f"http://127.0.0.1:{port}", 0.05) as client:
        assert await deleted(client, *"ab") == [UnreachableError] * 2
        assert client.reachability.unreachable
        silent.set()


async def test_an_answer_that_is_not_http_leaves_what_came_before_it() -> None:
    async with serving(lambda number: b"SSH-2.0\r\n" if number == 1 else DONE) as (server, client):
        ends = await deleted(client, *"abc")
        assert ends[0] is None
        assert server.asked.count("a") == 1


async def test_a_server_without_a_store_is_left_for_the_next() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(lambda _: refusal) as (_, client):
        assert await deleted(client, *"ab") == [ApiError] * 2
        assert client.reachability.unreachable
