"""HTTP byte by byte: connections, framed bodies, errors, orderly stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from lifecycle.http import MAX_BODY, Handler, HttpServer, Request, Response
from tests.support.apiserver.certificates import Authority

pytestmark = pytest.mark.anyio

DEADLINE = 30.0


@asynccontextmanager
async def served(
    handler: Handler, path: Path, grace: float = 5.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpServer]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    server = HttpServer(handler, grace=grace, tls=None if tls is None else lambda: tls)
    await server.serve(listener)
    try:
        yield server
    finally:
        await server.close()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer with a Content-Length, or in chunks."""
        async with asyncio.timeout(DEADLINE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            if headers.get("transfer-encoding") == "chunked":
                return int(head[0].split()[1]), headers, await self._chunks()
            length = int(headers.get("content-length", "0"))
            return int(head[0].split()[1]), headers, await self.reader.readexactly(length)

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()
        return body

    async def closed(self) -> bool:
        async with asyncio.timeout(DEADLINE):
            return not await self.reader.read(1)


@asynccontextmanager
async def connected(path: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    name = None if tls is None else "api.test"
    reader, writer = await asyncio.open_unix_connection(path, ssl=tls, server_hostname=name)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def echo(request: Request) -> Response:
    """Answers with the request."""
    text = f"{request.method} {request.path} {request.query} {request.headers.get('x-a')} ".encode()
    return Response(200, text + request.body, "text/plain")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


async def test_a_connection_is_reused_for_the_next_request(path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        for number in range(3):
            await client.send(f"GET /{number}?a=%20b&a=c HTTP/1.1\r\nHost: x\r\nX-A: y\r\n\r\n".encode())
            status, headers, body = await client.answer()
            assert (status, body) == (200, f"GET /{number} {{'a': ' b'}} y ".encode())
            assert headers["content-type"] == "text/plain"
            assert headers["date"].endswith(" GMT")


async def test_requests_may_come_before_the_answer_to_the_one_before(path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[2].startswith(b"GET /1 ")
        assert (await client.answer())[2].startswith(b"GET /2 ")


@pytest.mark.parametrize(
    "parts",
    [
        (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Le", b"ngth: 5\r\n\r\nhe", b"llo"),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",),
        (b"PUT http://localhost/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",),
    ],
)
async def test_a_body_arrives_however_it_is_sent(parts: tuple[bytes, ...], path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(*parts)
        assert (await client.answer())[2] == b"PUT / {} None hello"


async def test_a_client_with_expect_100_continue_gets_100(path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.answer())[0] == 100
        await client.send(b"hello")
        assert (await client.answer())[2].endswith(b"hello")


async def test_a_body_that_is_too_large_is_not_read_to_its_end(path: Path) -> None:
    async def refuse(request: Request) -> Response:
        return Response(413 if request.too_large else 200)

    async with served(refuse, path), connected(path) as client:
        await client.send(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {10 * MAX_BODY}\r\n\r\n".encode())
        await client.send(b"x" * (MAX_BODY + 1))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")


async def test_head_has_the_length_but_not_the_body(path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 15" in head
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_invalid_http_is_refused_and_the_connection_closed(sent: bytes, path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(sent)
        assert 400 <= (await client.answer())[0] < 500
        assert await client.closed()


async def test_with_tls_large_bodies_mistakes_and_ends_are_as_without(path: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", "/CN=server"))
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    body = bytes(range(256)) * (MAX_BODY // 256)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with served(echo, path, tls=context):
        async with connected(path, trusting) as client:
            for _ in range(2):
                await client.send(head, body)
                status, _, got = await client.answer()
                assert (status, got.endswith(body)) == (200, True)
            await client.send(b"NONSENSE\r\n\r\n")
            assert 400 <= (await client.answer())[0] < 500
            assert await client.closed()
        async with connected(path) as plain:
            await plain.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in await plain.reader.read()


async def test_a_client_that_wants_to_close_is_closed(path: Path) -> None:
    async with served(echo, path), connected(path) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.closed()


async def test_a_streamed_answer_is_sent_in_parts_and_ends_at_a_disconnect(path: Path) -> None:
    ended = asyncio.Event()
    go_on = asyncio.Event()

    async def lines() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one\n"
            await go_on.wait()
            while True:
                yield b"more\n" * 1000
        finally:
            ended.set()

    async def stream(_: Request) -> Response:
        return Response(200, lines(), "text/plain")

    async with served(stream, path):
        async with connected(path) as client:
            await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readuntil(b"one\n\r\n") == b"4\r\none\n\r\n"
        go_on.set()
        async with asyncio.timeout(DEADLINE):
            await ended.wait()


async def test_an_answer_of_unknown_length_comes_in_chunks(path: Path) -> None:
    async def lines() -> AsyncGenerator[bytes, None]:
        yield b"one "
        yield b"two"

    async def stream(_: Request) -> Response:
        return Response(200, lines())

    async with served(stream, path), connected(path) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[2] == b"one two"


async def test_a_stop_lets_an_answer_be_finished_and_lets_go_of_the_idle(path: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        asked.set()
        await may_answer.wait()
        return Response(200, b"done")

    async with served(slow, path) as server, connected(path) as idle, connected(path) as busy:
        await busy.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            await asked.wait()
            stopping = asyncio.create_task(server.close())
            assert await idle.closed()
            assert not stopping.done()
            may_answer.set()
            status, headers, body = await busy.answer()
            await stopping
    assert (status, headers["connection"], body) == (200, "close", b"done")


async def test_a_stop_does_not_wait_longer_than_its_grace(path: Path) -> None:
    asked = asyncio.Event()

    async def never(_: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        return Response(200)

    async with served(never, path, grace=0.01) as server, connected(path) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            await asked.wait()
            await server.close()
        assert await client.closed()


async def test_a_handler_can_query_whether_the_client_disconnected(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def handler(request: Request) -> Response:
        await request.disconnected()
        left.set()
        return Response(200)

    async with served(handler, tmp_path / "s"):
        async with connected(tmp_path / "s") as client:
            await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0)
            assert not left.is_set()
        async with asyncio.timeout(DEADLINE):
            await left.wait()


async def test_a_client_that_resets_the_connection_counts_as_disconnected(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.target == "/2":
            await request.disconnected()
            left.set()
        return Response(200, b"never read")

    async with served(handler, tmp_path / "s"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.to_thread(client.recv, 1)
        async with asyncio.timeout(DEADLINE):
            await left.wait()


async def test_what_comes_while_a_handler_asks_for_the_client_is_answered_after(tmp_path: Path) -> None:
    asked: list[str] = []
    first, enough = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        asked.append(request.target)
        if request.target == "/1":

            async def watch() -> None:
                await request.disconnected()

            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                first.set()
                await enough.wait()
                group.cancel_scope.cancel()
        return Response(200, request.target.encode())

    async with served(handler, tmp_path / "s"), connected(tmp_path / "s") as client:
        await client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await first.wait()
        await client.send(b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\nGET /3 HTTP", b"/1.1\r\nHost: x\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        enough.set()
        assert [(await client.answer())[2] for _ in range(3)] == [b"/1", b"/2", b"/3"]
    assert asked == ["/1", "/2", "/3"]
