"""The HTTP server with arbitrary bytes: a response or a closed connection; other clients are served."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from anyio.from_thread import start_blocking_portal
from hypothesis import example, given
from hypothesis import strategies as st

from lifecycle.http import HttpServer, Request, Response
from tests.unit.fuzz.inputs import bounded, odd_bytes

lines = st.sampled_from(
    [
        b"GET / HTTP/1.1",
        b"GET http://host/x HTTP/1.1",
        b"GET / HTTP/1.0",
        b"CONNECT a:1 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"HEAD //%00%ff HTTP/1.1",
        b"GET \xff HTTP/1.1",
        b"POST / HTTP/2.0",
        b"PRI * HTTP/2.0",
    ]
)
headers = st.lists(
    st.sampled_from(
        [
            b"Host: x",
            b"Host: y",
            b"Connection: close",
            b"Connection: upgrade",
            b"Upgrade: h2c",
            b"Content-Length: 3",
            b"Content-Length: 5",
            b"Content-Length: -1",
            b"Content-Length: 99999999999",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
            b"Expect: 100-continue",
            b"X: \xff",
            b" folded",
            b"X:" + b"a" * 100_000,
        ]
    ),
    max_size=4,
)
bodies = (
    st.sampled_from([b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"fffffffff\r\n", b"-1\r\n", b"x" * 5000])
    | odd_bytes
)
messages = st.builds(
    lambda line, given_headers, body: b"\r\n".join([line, *given_headers, b"", body]), lines, headers, bodies
)


async def served(request: Request) -> Response:
    return Response(200, request.method.encode() + request.path.encode() + request.body[:10])


async def exchange(path: Path, sent: bytes) -> bytes:
    """What comes back until the server closes; we send no more."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            writer.write(sent)
            writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def start(server: HttpServer, path: Path, faults: list[str]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(str(context)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    await server.serve(listener)


def test_any_bytes_are_answered_or_hung_up_on(tmp_path: Path) -> None:
    faults: list[str] = []
    server = HttpServer(served, grace=1.0)
    with start_blocking_portal("asyncio") as portal:
        portal.call(start, server, tmp_path / "sock", faults)

        @bounded(300)
        @example(b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        @example(b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        @given(messages | odd_bytes | st.builds(bytes.__add__, messages, messages))
        def is_answered(sent: bytes) -> None:
            got = portal.call(exchange, tmp_path / "sock", sent)
            assert not got or got.startswith(b"HTTP/1.1 ")
            assert not faults, faults

        is_answered()
        assert b" 200 " in portal.call(exchange, tmp_path / "sock", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        portal.call(server.close)
