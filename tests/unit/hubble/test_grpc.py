"""The gRPC server with grpcio as an independent client, and with invalid frames."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from anyio.abc import ByteStream, SocketStream

from cells.hubble.rpc.grpc import GrpcLimits, GrpcServer
from cells.hubble.rpc.messages import (
    Answers,
    ClientStream,
    MessageReader,
    Method,
    Requests,
    RpcCode,
    RpcError,
    decode_message,
    encode_message,
    framed,
    server_streaming,
    unary,
)
from lifecycle.process.logs import logger_for
from tests.support.waiting import eventually


class Service:
    """Methods that answer as their tests want them to."""

    def __init__(self) -> None:
        self.batches = 0
        """How many of an endless stream were made."""
        self.ended = threading.Event()
        """The endless stream has ended."""

    async def echo(self, request: bytes) -> bytes:
        return request

    async def fail(self, request: bytes) -> bytes:
        raise RpcError(RpcCode.INVALID_ARGUMENT, request.decode())

    async def crash(self, request: bytes) -> bytes:
        raise LookupError(request)

    async def wait(self, request: bytes) -> bytes:
        await anyio.sleep_forever()
        return request

    async def count(self, request: bytes) -> Answers:
        for number in range(int(request)):
            yield [b"%d" % number, b""]

    async def endless(self, request: bytes) -> Answers:
        try:
            while True:
                self.batches += 1
                yield [request]
        finally:
            self.ended.set()

    async def talk(self, requests: Requests) -> Answers:
        async for request in requests:
            yield [request.upper()]

    def methods(self) -> list[Method]:
        calls = [
            unary("test.T", call.__name__, call) for call in (self.echo, self.fail, self.crash, self.wait)
        ]
        streams = [server_streaming("test.T", call.__name__, call) for call in (self.count, self.endless)]
        return [*calls, *streams, Method("test.T", "talk", self.talk, "bidi_stream")]


StreamOf = Callable[[socket.socket], Awaitable[ByteStream]]
STREAMS = pytest.mark.parametrize(
    "stream_of",
    [ClientStream.of, SocketStream.from_socket],
    ids=["sends at once", "sends later, as TLS does"],
)


@asynccontextmanager
async def serving(server: GrpcServer, stream_of: StreamOf = ClientStream.of) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:

            async def serve(connected: socket.socket) -> None:
                await server.serve(await stream_of(connected), "client")

            async def accept() -> None:
                while True:
                    connected, _ = await asyncio.get_running_loop().sock_accept(listener)
                    tasks.start_soon(serve, connected)

            tasks.start_soon(accept)
            yield listener.getsockname()[1]
            tasks.cancel_scope.cancel()


async def until_closed(stream: anyio.abc.ByteReceiveStream) -> None:
    """Read until the server has closed the connection."""
    with anyio.fail_after(10), suppress(anyio.BrokenResourceError):
        async for _ in stream:
            pass


def run(
    check: Callable[[grpc.Channel], None],
    service: Service | None = None,
    *,
    stream_of: StreamOf = ClientStream.of,
    **limits: int,
) -> GrpcServer:
    """Let a check call the methods from a thread; every call has ended afterwards."""
    service = service or Service()
    server = GrpcServer(service.methods(), log=logger_for("test"), limits=GrpcLimits(**limits))

    async def main() -> None:
        async with serving(server, stream_of) as port:

            def client() -> None:
                # A window that stays as it is: by default the client lets it grow to what the network takes.
                options = [("grpc.http2.bdp_probe", 0)]
                with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                    check(channel)

            await anyio.to_thread.run_sync(client)
            await anyio.to_thread.run_sync(eventually, lambda: not server.clients)

    asyncio.run(main())
    assert (server.calls, server.held) == (0, 0)
    return server


def call(channel: grpc.Channel, name: str, request: bytes = b"", **options: object) -> bytes:
    answer: bytes = channel.unary_unary(f"/test.T/{name}")(request, **{"timeout": 10, **options})
    return answer


@STREAMS
def test_calls_and_streams_are_answered_and_counted(stream_of: StreamOf) -> None:
    def check(channel: grpc.Channel) -> None:
        assert call(channel, "echo", b"x" * 300_000) == b"x" * 300_000
        assert call(channel, "echo") == b""
        numbers = list(channel.unary_stream("/test.T/count")(b"30000"))
        assert numbers == [part for number in range(30000) for part in (b"%d" % number, b"")]
        assert list(channel.stream_stream("/test.T/talk")(iter([b"a", b"b"]))) == [b"A", b"B"]

    counts = run(check, stream_of=stream_of).counts
    assert counts.started == {
        ("unary", "test.T", "echo"): 2,
        ("server_stream", "test.T", "count"): 1,
        ("bidi_stream", "test.T", "talk"): 1,
    }
    assert counts.sent["server_stream", "test.T", "count"] == 60000
    assert counts.received["bidi_stream", "test.T", "talk"] == 2
    assert counts.handled["unary", "test.T", "echo", "OK"] == 2


@pytest.mark.parametrize(
    ("path", "request_", "code", "text"),
    [
        ("/test.T/fail", "bad: 100 % ü\n".encode(), grpc.StatusCode.INVALID_ARGUMENT, "bad: 100 % ü\n"),
        ("/test.T/absent", b"", grpc.StatusCode.UNIMPLEMENTED, "unknown method absent for service test.T"),
        ("/test.U/echo", b"", grpc.StatusCode.UNIMPLEMENTED, "unknown service test.U"),
        ("/echo", b"", grpc.StatusCode.UNIMPLEMENTED, 'malformed method name: "/echo"'),
        ("/test.T/crash", b"", grpc.StatusCode.INTERNAL, "the agent failed; its log has more"),
        (
            "/test.T/echo",
            b"x" * 5000,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "message larger than max (5000 vs. 4096)",
        ),
    ],
)
def test_a_call_that_fails_has_a_status_and_leaves_the_connection(
    path: str, request_: bytes, code: grpc.StatusCode, text: str
) -> None:
    def check(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary(path)(request_, timeout=10)
        assert (failed.value.code(), failed.value.details()) == (code, text)
        assert call(channel, "echo", b"still there") == b"still there"

    run(check, request=4096)


def test_a_compressed_request_is_refused() -> None:
    def check(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as failed:
            call(channel, "echo", b"x" * 3000, compression=grpc.Compression.Gzip)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(check)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (1, "grpc: compressed flag set with identity or empty encoding"),
        (2, "grpc: received unexpected payload format 2"),
    ],
)
def test_an_invalid_compressed_flag_of_a_message_is_an_internal_error(flag: int, text: str) -> None:
    def build(client: h2.connection.H2Connection) -> None:
        client.send_headers(1, request_headers())
        client.send_data(1, bytes([flag, 0, 0, 0, 1, 0]), end_stream=True)

    answer = next(each for each in exchange(frames_of(build)) if isinstance(each, h2.events.ResponseReceived))
    headers = dict(answer.headers or ())
    assert (headers[b"grpc-status"], headers[b"grpc-message"]) == (b"13", text.encode())


def test_a_call_ends_at_its_deadline() -> None:
    def check(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as failed:
            call(channel, "wait", timeout=0.2)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(check)


@STREAMS
def test_an_unread_grpc_stream_pauses_and_ends_when_cancelled(stream_of: StreamOf) -> None:
    service = Service()

    def check(channel: grpc.Channel) -> None:
        stream = channel.unary_stream("/test.T/endless")(b"x" * 10_000)
        assert next(stream) == b"x" * 10_000
        made = [-1]

        def settled() -> bool:
            """The client's windows are full."""
            made.append(service.batches)
            return made[-1] == made[-2]

        eventually(settled, every=0.3)
        assert made[-1] < 2000, "megabytes are queued for a client that reads nothing"
        stream.cancel()
        assert service.ended.wait(10)

    run(check, service, stream_of=stream_of)


def test_more_calls_than_the_server_takes_are_refused() -> None:
    def check(channel: grpc.Channel) -> None:
        waiting = channel.unary_unary("/test.T/wait").future(b"", timeout=30)
        streams = [channel.unary_stream("/test.T/endless")(b"x") for _ in range(3)]
        with pytest.raises(grpc.RpcError) as failed:
            list(map(next, streams))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in (waiting, *streams):
            each.cancel()

    run(check, all_calls=2)


def test_a_connection_without_calls_gives_its_place_to_another() -> None:
    server = GrpcServer(Service().methods(), log=logger_for("test"), limits=GrpcLimits(connections=2))

    async def main() -> None:
        async with serving(server) as port, anyio.create_task_group() as tasks:
            first = await anyio.connect_tcp("127.0.0.1", port)
            await anyio.to_thread.run_sync(eventually, lambda: server.clients)
            others = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
            await until_closed(first)
            assert server.clients <= 2
            for each in (first, *others):
                await each.aclose()
            tasks.cancel_scope.cancel()

    asyncio.run(main())


def frames_of(build: Callable[[h2.connection.H2Connection], None]) -> bytes:
    client = h2.connection.H2Connection(
        h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
    )
    client.initiate_connection()
    build(client)
    return client.data_to_send()


def request_headers(**changes: str) -> list[tuple[str, str]]:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":authority": "localhost",
        ":path": "/test.T/wait",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return list(
        (headers | {f":{name}" if name == "method" else name: text for name, text in changes.items()}).items()
    )


def exchange(data: bytes, **limits: int) -> list[h2.events.Event]:
    """What the server answers to these frames, until it closes or has answered one call."""
    server = GrpcServer(Service().methods(), log=logger_for("test"), limits=GrpcLimits(**limits))
    events: list[h2.events.Event] = []

    async def main() -> None:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, request_headers())
        ends = (h2.events.ConnectionTerminated, h2.events.StreamEnded, h2.events.TrailersReceived)
        async with serving(server) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(data)
            with anyio.fail_after(10):
                while not any(isinstance(event, ends) for event in events):
                    events.extend(client.receive_data(await stream.receive()))

    asyncio.run(main())
    return events


def test_a_client_that_cancels_calls_without_end_is_disconnected() -> None:
    def build(client: h2.connection.H2Connection) -> None:
        for number in range(1, 400, 2):
            client.send_headers(number, request_headers())
            client.reset_stream(number)

    last = exchange(frames_of(build), cancelled=20)[-1]
    assert isinstance(last, h2.events.ConnectionTerminated)
    assert last.error_code == 11  # ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    ("change", "status"), [({"method": "GET"}, "405"), ({"content-type": "text/html"}, "415")]
)
def test_a_request_that_is_not_grpc_is_refused(change: dict[str, str], status: str) -> None:
    events = exchange(
        frames_of(lambda client: client.send_headers(1, request_headers(**change), end_stream=True))
    )
    answer = next(event for event in events if isinstance(event, h2.events.ResponseReceived))
    assert (b":status", status.encode()) in (answer.headers or [])


def test_bytes_that_are_no_http2_end_the_connection() -> None:
    server = GrpcServer(Service().methods(), log=logger_for("test"))

    async def main() -> None:
        async with serving(server) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
            await until_closed(stream)

    asyncio.run(main())


def many_calls(calls: int, window: int) -> h2.connection.H2Connection:
    """A client that has made so many calls, and takes so many bytes of all their answers."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.increment_flow_control_window(window - 65_535)
    for stream in range(1, 2 * calls, 2):
        client.send_headers(stream, request_headers(**{":path": "/test.T/large"}))
        client.send_data(stream, framed([b""]), end_stream=True)
    return client


def read_window(client: h2.connection.H2Connection, connection: socket.socket, window: int) -> None:
    """Read the window's bytes and what comes behind them: FlowControlError, if it is more of the answers."""
    got = 0
    while True:
        for event in client.receive_data(connection.recv(65536)):
            if isinstance(event, h2.events.PingAckReceived):
                return
            if isinstance(event, h2.events.DataReceived):
                got += len(event.data)
                if got == window:
                    client.ping(b"the last")
                    connection.sendall(client.data_to_send())


@STREAMS
def test_calls_that_wait_for_their_client_stay_within_its_window_together(stream_of: StreamOf) -> None:
    """More is a flow control error, for which the client ends the connection: a relay's has many calls."""
    window, calls = 80_000, 12
    made = 0

    async def small_stream(connected: socket.socket) -> ByteStream:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return await stream_of(connected)

    async def main() -> None:
        asked = asyncio.Event()

        async def large(_request: bytes) -> Answers:
            nonlocal made
            await asked.wait()
            while True:
                made += 1
                yield [b"x" * 6000]

        server = GrpcServer([server_streaming("test.T", "large", large)], log=logger_for("test"))
        loop = asyncio.get_running_loop()

        def read(port: int) -> None:
            client, counts = many_calls(calls, window), [-1]

            def settled() -> bool:
                counts.append(made)
                return 0 < counts[-1] == counts[-2]

            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", port))
                connection.settimeout(10)
                connection.sendall(client.data_to_send())
                eventually(lambda: server.calls == calls)
                loop.call_soon_threadsafe(asked.set)
                eventually(settled, every=0.3)  # all wait: the client has read nothing
                read_window(client, connection, window)

        async with serving(server, small_stream) as port:
            await anyio.to_thread.run_sync(read, port)

    asyncio.run(main())


@STREAMS
def test_a_client_that_reads_no_answers_to_its_pings_is_not_heard_for_long(stream_of: StreamOf) -> None:
    """Else the answers would fill the agent's memory."""
    server = GrpcServer(Service().methods(), log=logger_for("test"))
    pings = frames_of(lambda client: client.ping(b"12345678"))
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 4096), (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def small_stream(connected: socket.socket) -> ByteStream:
        for option in small:
            connected.setsockopt(*option)
        return await stream_of(connected)

    async def main() -> None:
        async with serving(server, small_stream) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.settimeout(1)  # for which the server reads nothing
                for option in small:
                    client.setsockopt(*option)

                def send() -> int:
                    sent = client.send(pings)
                    with suppress(TimeoutError):
                        while sent < 2 << 20:
                            client.sendall(pings[-17:] * 60)
                            sent += 17 * 60
                    return sent

                assert await anyio.to_thread.run_sync(send) < 2 << 20

    asyncio.run(main())


@pytest.mark.parametrize("text", ["plain", "a%b", "ü\n", ""])
def test_a_status_text_survives_its_encoding(text: str) -> None:
    assert decode_message(encode_message(text)) == text
    assert encode_message(text).isascii()


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_read_in_pieces_of_any_size(size: int) -> None:
    messages = [b"a", b"", b"x" * 500]
    reader, found = MessageReader(500), []
    for piece in pieces(framed(messages), size):
        reader.feed(piece)
        while (message := reader.take()) is not None:
            found.append(message)
    assert (found, reader.held) == (messages, 0)
