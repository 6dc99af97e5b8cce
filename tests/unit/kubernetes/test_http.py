"""HTTP responses of faulty servers and proxies are complete, or an error before the deadline."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import CredentialsError, UnreachableError
from lifecycle.testing import eventually
from tests.support.apiserver.certificates import Authority
from tests.unit.kubernetes.listening import Serve, listening

pytestmark = pytest.mark.anyio
BODY = b'{"kind":"Test"}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


def saying(*parts: bytes) -> Serve:
    """Answers the first request with these bytes, each sent apart, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    return serve


@asynccontextmanager
async def client_of(port: int, **more: Any) -> AsyncIterator[Client]:
    timeout = more.pop("timeout", 5.0)
    access = Access(**{"servers": (f"http://127.0.0.1:{port}",), **more})
    made = connect(access, qps=0, timeout=timeout)
    try:
        yield made
    finally:
        await made.reset()


async def ask(serve: Serve, **more: Any) -> bytes:
    """The body of one answer to a request that is not repeated."""
    async with listening(serve) as port, client_of(port, **more) as client:
        return await client.raw("POST", "/test")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SOUND = {
    "a length": [WHOLE],
    "byte by byte": [bytes((one,)) for one in WHOLE],
    "chunks": [CHUNKED, b"5\r\n" + BODY[:5] + b"\r\n", b"a;why=not\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"],
    "chunks byte by byte": [
        bytes((one,)) for one in CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n"
    ],
    "until the end": [b"HTTP/1.1 200 OK\r\n\r\n" + BODY[:4], BODY[4:]],
    "an interim answer first": [b"HTTP/1.1 100 Continue\r\nHint: x\r\n\r\n" + WHOLE],
    "two of them": [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 102 Processing\r\n\r\n", WHOLE],
    "HTTP/1.0": [b"HTTP/1.0 200 OK\r\n\r\n" + BODY],
    "more than was asked for": [WHOLE + WHOLE],
}


@pytest.mark.parametrize("how", SOUND)
async def test_an_answer_is_read_however_it_comes(how: str) -> None:
    assert await ask(saying(*SOUND[how])) == BODY


BROKEN = {
    "nothing": ([], "without an answer"),
    "half a head": ([b"HTTP/1.1 200 OK\r\nContent-"], "without an answer"),
    "half a body": ([WHOLE[:-3]], "in the middle of an answer"),
    "a chunk cut off": ([CHUNKED, b"f\r\n" + BODY[:4]], "in the middle of an answer"),
    "no last chunk": ([CHUNKED, b"f\r\n" + BODY + b"\r\n"], "in the middle of an answer"),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP/1.1"),
    "a chunk's size that is none": ([CHUNKED, b"zz\r\n"], "not HTTP/1.1"),
    "two lengths": (
        [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"],
        "not HTTP/1.1",
    ),
    "a length and chunks": (
        [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        "not HTTP/1.1",
    ),
    "another protocol": (
        [b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"],
        "not HTTP/1.1",
    ),
    "one header too long": ([b"HTTP/1.1 200 OK\r\nA: ", b"a" * 500_000], "a head longer than"),
    "too many headers": ([b"HTTP/1.1 200 OK\r\n", b"A: 0123456789\r\n" * 50_000], "a head longer than"),
    "a trailer too long": ([CHUNKED, b"0\r\nA: ", b"a" * 500_000], "a head longer than"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_an_answer_that_is_not_whole_is_an_error(how: str) -> None:
    parts, message = BROKEN[how]
    with pytest.raises(UnreachableError, match=message), anyio.fail_after(30):
        await ask(saying(*parts))


async def test_a_refusal_counts_though_the_request_was_not_read(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        while await reader.read(1 << 20):  # lest the answer is lost with what was not read
            pass

    async with listening(refuse) as port, client_of(port) as client:
        assert await client.raw("POST", "/test", None, b"x" * 3_000_000) == b"{}"


async def test_a_connection_is_used_again_unless_the_server_has_let_go_of_it() -> None:
    connections = 0
    end = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            close = b"/last " in head
            writer.write(WHOLE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n") if close else WHOLE)
            await writer.drain()
            if b"/then-gone " in head and number == 1:
                await end.wait()
                return
            if close:
                await asyncio.Event().wait()  # the client must not wait for the server to hang up

    async with listening(serve) as port, client_of(port) as client:
        for path in ("/a", "/b", "/then-gone"):
            assert await client.raw("POST", path) == BODY
        assert connections == 1
        end.set()
        await asyncio.sleep(0)
        for _ in range(3):  # whenever the end is noticed, a write is not lost with it
            await asyncio.sleep(0.01)
        assert await client.raw("POST", "/c") == BODY
        assert connections == 2
        assert await client.raw("POST", "/last") == BODY
        assert await client.raw("POST", "/d") == BODY
        assert connections == 3


async def test_a_request_given_up_leaves_its_turn_to_others() -> None:
    held = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/hold " in head:
                held += 1
                await asyncio.Event().wait()
            writer.write(WHOLE)

    async with listening(serve) as port, client_of(port) as client:
        for _ in range(3):  # as many as there may be connections, and again
            before = held
            async with anyio.create_task_group() as group:
                for _ in range(64):
                    group.start_soon(client.raw, "POST", "/hold")
                await eventually(lambda: held == before + 64)  # noqa: B023
                group.cancel_scope.cancel()
        assert await client.raw("POST", "/test") == BODY


async def test_a_request_queued_past_its_timeout_raises_unreachable_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        await asyncio.Event().wait()

    async with listening(serve) as port, client_of(port, timeout=0.5) as client:
        errors: list[str] = []

        async def one() -> None:
            try:
                await client.raw("POST", "/test")
            except UnreachableError as error:
                errors.append(str(error))

        async with anyio.create_task_group() as group:
            for _ in range(65):
                group.start_soon(one)
        assert len(errors) == 65
        why = (
            "silent for 0.5 s",
            "64 requests are under way",
            "no connection within 0.5 s",
        )  # on a busy machine
        assert all(any(one in text for one in why) for text in errors), errors


async def test_a_refused_connection_is_reported_with_the_system_error() -> None:
    async with listening(saying()) as port:
        pass
    async with client_of(port) as client:
        with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}: Connection refused"):
            await client.raw("POST", "/test")


async def test_a_key_of_impersonation_may_have_any_letter() -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(WHOLE)
        await writer.drain()

    extra = (("example.org/scopes", "a"), ("50% ok", "b"))
    await ask(serve, impersonate_user="jane", impersonate_extra=extra)
    lines = [line for line in heads[0].decode().splitlines() if line.startswith("Impersonate-Extra-")]
    assert lines == ["Impersonate-Extra-example.org%2Fscopes: a", "Impersonate-Extra-50%25%20ok: b"]


async def test_a_header_cannot_smuggle_another_one() -> None:
    async with listening(saying(WHOLE)) as port, client_of(port, impersonate_user="a\r\nX-Evil: 1") as client:
        with pytest.raises(CredentialsError, match="line break"):
            await client.raw("POST", "/test")


# ---- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_records_of_tls_are_read_as_they_come_and_a_cut_is_noticed(authority: Authority) -> None:
    parts = [b"%x\r\n%s\r\n" % (40_000, bytes((one,)) * 40_000) for one in range(65, 75)]
    for whole, end in ((True, b"0\r\n\r\n"), (False, b"")):
        async with (
            listening(saying(CHUNKED, *parts, end), authority.serving()) as port,
            client_of(port, servers=(f"https://localhost:{port}",), ca_file=authority.certificate) as client,
        ):
            if whole:
                assert await client.raw("POST", "/test") == b"".join(
                    bytes((one,)) * 40_000 for one in range(65, 75)
                )
            else:
                with pytest.raises(UnreachableError, match=r"in the middle of an answer|EOF|ended"):
                    await client.raw("POST", "/test")


async def test_a_server_that_does_not_speak_tls_is_left(authority: Authority) -> None:
    async def rubbish(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()
        await asyncio.Event().wait()

    async with (
        listening(rubbish) as port,
        client_of(port, servers=(f"https://127.0.0.1:{port}",), ca_file=authority.certificate) as client,
    ):
        with pytest.raises(UnreachableError, match=r"(?i)wrong.version|record"):
            await client.raw("POST", "/test")


# ---- proxies


async def splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Carry bytes between a client and a server until either ends."""
    far_reader, far_writer = await asyncio.open_connection(host, port)

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    tasks = [
        asyncio.ensure_future(carry(reader, far_writer)),
        asyncio.ensure_future(carry(far_reader, writer)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        far_writer.transport.abort()


class HttpProxy:
    """Opens tunnels, or refuses."""

    def __init__(self, status: bytes = b"200 OK") -> None:
        self.status = status
        self.heads: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        writer.write(b"HTTP/1.1 " + self.status + b"\r\n\r\n")
        if self.status.startswith(b"200"):
            host, _, port = head.split()[1].rpartition(":")
            await splice(reader, writer, host, int(port))


async def test_tls_goes_through_a_tunnel_of_a_proxy(authority: Authority) -> None:
    proxy = HttpProxy()
    async with (
        listening(saying(WHOLE), authority.serving()) as port,
        listening(proxy) as way,
        client_of(
            port,
            servers=(f"https://localhost:{port}",),
            ca_file=authority.certificate,
            proxy_url=f"http://me:a%20b@127.0.0.1:{way}",
        ) as client,
    ):
        assert await client.raw("POST", "/test") == BODY
    assert proxy.heads[0].splitlines()[:3] == [
        f"CONNECT localhost:{port} HTTP/1.1",
        f"Host: localhost:{port}",
        "Proxy-Authorization: Basic bWU6YSBi",
    ]


async def test_a_refusing_proxy_is_reported(authority: Authority) -> None:
    async with (
        listening(HttpProxy(b"407 Proxy Authentication Required")) as way,
        client_of(
            0,
            servers=("https://api.test:6443",),
            ca_file=authority.certificate,
            proxy_url=f"http://127.0.0.1:{way}",
        ) as client,
    ):
        with pytest.raises(UnreachableError, match=r"answers 407 to CONNECT api\.test:6443"):
            await client.raw("POST", "/test")


class SocksProxy:
    """SOCKS 5, for clients with the right password if there is one."""

    def __init__(self, password: bytes = b"", refuse: int = 0) -> None:
        self._password = password
        self._refuse = refuse

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        method = 2 if self._password else 0
        writer.write(bytes((5, method if method in methods else 255)))
        if self._password:
            _, size = await reader.readexactly(2)
            await reader.readexactly(size)
            given = await reader.readexactly((await reader.readexactly(1))[0])
            writer.write(bytes((1, given != self._password)))
        _, _, _, kind = await reader.readexactly(4)
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
            assert set(host) - set("0123456789.:"), "an address is no name"
        else:
            host = str(ip_address(await reader.readexactly({1: 4, 4: 16}[kind])))
        port = int.from_bytes(await reader.readexactly(2))
        writer.write(bytes((5, self._refuse, 0, 1, 127, 0, 0, 1, 0, 0)))
        await writer.drain()
        if not self._refuse:
            await splice(reader, writer, host, port)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
@pytest.mark.parametrize("user", ["", "me:secret@"])
async def test_a_proxy_may_speak_socks(user: str, host: str) -> None:
    async with (
        listening(saying(WHOLE), host="::1" if "::1" in host else "127.0.0.1") as port,
        listening(SocksProxy(b"secret" if user else b"")) as way,
        client_of(
            port, servers=(f"http://{host}:{port}",), proxy_url=f"socks5://{user}127.0.0.1:{way}"
        ) as client,
    ):
        assert await client.raw("POST", "/test") == BODY


@pytest.mark.parametrize(
    ("proxy", "user", "message"),
    [
        (SocksProxy(refuse=5), "", "connection refused"),
        (SocksProxy(b"secret"), "me:wrong@", "refuses me"),
        (SocksProxy(b"secret"), "", "rejects the credentials"),
    ],
)
async def test_a_refusal_of_a_socks_proxy_is_reported(proxy: SocksProxy, user: str, message: str) -> None:
    async with (
        listening(proxy) as way,
        client_of(1, proxy_url=f"socks5://{user}127.0.0.1:{way}") as client,
    ):
        with pytest.raises(UnreachableError, match=message):
            await client.raw("POST", "/test")


async def test_a_request_that_is_cancelled_at_any_moment_leaves_no_socket_open() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        for turns in range(40):
            async with listening(saying(WHOLE)) as port, client_of(port) as client:
                asked = asyncio.ensure_future(client.raw("POST", "/test"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait({asked})
                del asked
            gc.collect()
    assert not [str(one.message) for one in found]


@pytest.mark.parametrize("abort", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_ends_as_it_is_used_again_fails_no_request_that_may_be_repeated(
    abort: bool,
) -> None:
    connections = dropped = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lets go of the connection as the second request comes."""
        nonlocal connections, dropped
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(WHOLE)
        await reader.readuntil(b"\r\n\r\n{}")
        dropped += 1
        if abort:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async with listening(serve) as port, client_of(port) as client:
        assert await client.raw("GET", "/first", None, b"{}") == BODY
        media = b"application/merge-patch+json"
        for number, method in enumerate(("GET", "PUT", "DELETE", "PATCH"), 1):
            assert await client.raw(method, "/test", None, b"{}", media) == BODY
            assert connections == number + 1
            assert not client.reachability.unreachable
        for method, media in (("POST", b"application/json"), ("PATCH", b"application/json-patch+json")):
            before = dropped
            with pytest.raises(UnreachableError):  # it may have been done
                await client.raw(method, "/test", None, b"{}", media)
            assert dropped == before + 1
            assert await client.raw("GET", "/first", None, b"{}") == BODY
