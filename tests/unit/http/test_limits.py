"""Limits of the HTTP server: no client can exhaust other clients' or the process's resources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lifecycle.http import Handler, HttpServer, Request, Response, ServerLimits
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio

DEADLINE = 30.0
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def served(handler: Handler, limits: ServerLimits) -> AsyncIterator[int]:
    """The port of a server on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    server = HttpServer(handler, grace=0.1, limits=limits)
    await server.serve(listener)
    try:
        yield port
    finally:
        await server.close()


class Client:
    """A connection from an address of the loopback network."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host

    async def __aenter__(self) -> Client:
        async with asyncio.timeout(DEADLINE):
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", self._port, local_addr=(self._host, 0), limit=1 << 12
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def body(self) -> bytes:
        """The body of the next answer."""
        async with asyncio.timeout(DEADLINE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return await self.reader.readexactly(length)

    async def closed(self) -> bool:
        """Return once the server has closed the connection."""
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True


async def name(request: Request) -> Response:
    return Response(200, request.path.encode())


async def test_idle_connections_delay_no_new_client(async_stack: contextlib.AsyncExitStack) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(connections=4)))
    idle = [await async_stack.enter_async_context(Client(port)) for _ in range(50)]
    for client in idle[::2]:
        client.send(b"GET / HT")
    asking = await async_stack.enter_async_context(Client(port))
    asking.send(GET % b"me")
    assert await asking.body() == b"/me"
    for client in idle[:-4]:
        assert await client.closed()


async def test_at_its_connection_share_a_client_loses_its_own_connection(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(connections=8, per_peer=4)))
    other = await async_stack.enter_async_context(Client(port, "127.0.0.3"))
    greedy = [await async_stack.enter_async_context(Client(port, "127.0.0.2")) for _ in range(30)]
    assert await greedy[0].closed()
    other.send(GET % b"other")
    assert await other.body() == b"/other"


async def test_at_the_connection_limit_the_largest_user_loses_one(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(connections=6, per_peer=5)))
    first = await async_stack.enter_async_context(Client(port, "127.0.0.3"))
    many = [await async_stack.enter_async_context(Client(port, "127.0.0.2")) for _ in range(5)]
    for client in (first, *many):  # all have been accepted
        client.send(GET % b"x")
        await client.body()
    newcomer = await async_stack.enter_async_context(Client(port, "127.0.0.4"))
    assert await many[0].closed()
    for client in (first, newcomer):
        client.send(GET % b"here")
        assert await client.body() == b"/here"


async def test_busy_connections_are_not_closed(async_stack: contextlib.AsyncExitStack) -> None:
    started, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.release()
        await go_on.wait()
        return await name(request)

    port = await async_stack.enter_async_context(served(slow, ServerLimits(connections=2)))
    asking = [await async_stack.enter_async_context(Client(port)) for _ in range(2)]
    for client in asking:
        client.send(GET % b"x")
        await started.acquire()
    late = await async_stack.enter_async_context(Client(port))
    assert await late.closed()
    go_on.set()
    assert [await client.body() for client in asking] == [b"/x", b"/x"]


async def test_often_used_connections_are_closed_before_unused_ones(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(connections=2)))
    greedy = [await async_stack.enter_async_context(Client(port)) for _ in range(2)]
    for client in greedy:
        client.send((GET % b"greedy") * 5000)
        assert await client.body() == b"/greedy"
    newcomer = await async_stack.enter_async_context(Client(port))
    newcomer.send(GET % b"me")
    assert await newcomer.body() == b"/me"


async def test_requests_sent_at_once_take_turns_with_those_of_others(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    order: list[str] = []

    async def handler(request: Request) -> Response:
        order.append(request.path)
        return Response(200)

    port = await async_stack.enter_async_context(served(handler, ServerLimits()))
    greedy = await async_stack.enter_async_context(Client(port, "127.0.0.2"))
    others = [await async_stack.enter_async_context(Client(port, f"127.0.0.{n}")) for n in range(3, 8)]
    greedy.send((GET % b"greedy") * 300)
    for client in others:
        client.send(GET % b"other")
    for client in others:
        await client.body()
    assert order.count("/other") == len(others)
    assert order.count("/greedy") < 100


async def test_connections_with_unread_answers_are_closed_for_new_ones(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    async def large(request: Request) -> Response:
        return Response(200, b"x" * (4 << 20) if request.path == "/large" else b"small")

    port = await async_stack.enter_async_context(served(large, ServerLimits(in_flight=1 << 20)))
    deaf = await async_stack.enter_async_context(Client(port, "127.0.0.2"))
    deaf.send(GET % b"large")
    asking = await async_stack.enter_async_context(Client(port, "127.0.0.3"))
    asking.send(GET % b"small")
    assert await asking.body() == b"small"
    assert await deaf.closed()


async def test_large_bodies_are_refused_when_too_many_are_held_and_small_ones_are_not(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(in_flight=60_000)))
    large = [await async_stack.enter_async_context(Client(port)) for _ in range(3)]
    for client in large:
        client.send(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 31000\r\n\r\n" + b"x" * 30_000)
    answers = [asyncio.create_task(client.body()) for client in large]
    done, _ = await asyncio.wait(answers, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
    assert {each.result() for each in done} == {b"too many requests are being read, ask again\n"}
    small = await async_stack.enter_async_context(Client(port))
    small.send(b"PUT /small HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
    assert await small.body() == b"/small"
    for answer in answers:
        answer.cancel()
    await asyncio.wait(answers)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHo", b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"]
)
async def test_a_silent_connection_is_closed(sent: bytes, async_stack: contextlib.AsyncExitStack) -> None:
    limits = ServerLimits(idle_seconds=0.05, request_seconds=0.05)
    port = await async_stack.enter_async_context(served(name, limits))
    client = await async_stack.enter_async_context(Client(port))
    client.send(sent)
    assert await client.closed()


async def test_a_request_sent_byte_by_byte_has_an_end_too(async_stack: contextlib.AsyncExitStack) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits(request_seconds=0.2)))
    client = await async_stack.enter_async_context(Client(port))

    async def drip() -> None:
        while True:
            client.send(b"G")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    try:
        assert await client.closed()
    finally:
        dripping.cancel()


async def test_an_unread_answer_is_aborted_after_the_send_timeout(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    async def large(_: Request) -> Response:
        return Response(200, b"x" * (8 << 20))

    limits = ServerLimits(send_seconds=0.05, send_rate=1 << 30)
    port = await async_stack.enter_async_context(served(large, limits))
    before = open_descriptors()
    client = await async_stack.enter_async_context(Client(port))
    client.send(GET % b"large")
    assert (await client.reader.read(1)) == b"H"
    await eventually(lambda: open_descriptors() <= before + 1)  # the client's own
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.body()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def few_descriptors(limit: int) -> AsyncIterator[None]:
    """The process may open so few files meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_the_last_descriptors_are_left_for_others(async_stack: contextlib.AsyncExitStack) -> None:
    await async_stack.enter_async_context(few_descriptors(400))
    with capture_logs() as logs:
        port = await async_stack.enter_async_context(
            served(name, ServerLimits(connections=1000, per_peer=1000))
        )
        connected = [await async_stack.enter_async_context(Client(port)) for _ in range(160)]
        await eventually(lambda: bool(logs))
        mine = [os.open("/", os.O_RDONLY) for _ in range(20)]
        for fd in mine:
            os.close(fd)
        for client in connected:
            client.writer.close()
        late = await async_stack.enter_async_context(Client(port))
        late.send(GET % b"late")
        assert await late.body() == b"/late"
    assert len(logs) == 1


async def test_without_descriptors_one_line_is_logged_and_later_clients_are_answered(
    async_stack: contextlib.AsyncExitStack,
) -> None:
    port = await async_stack.enter_async_context(served(name, ServerLimits()))
    client = Client(port)
    with capture_logs() as logs:
        taken = []
        connecting = socket.socket()
        connecting.setblocking(False)
        async with few_descriptors(300):
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/", os.O_RDONLY))
            with contextlib.suppress(BlockingIOError):
                connecting.connect(("127.0.0.1", port))
            await eventually(lambda: bool(logs))
            await asyncio.sleep(0.2)  # it tries again in between, and logs nothing
        for fd in taken:
            os.close(fd)
        connecting.close()
        await async_stack.enter_async_context(client)
        client.send(GET % b"later")
        assert await client.body() == b"/later"
    assert [each["log_level"] for each in logs] == ["warning"]
