"""Rounds of probes: all addresses, spread over the interval, with a report of each result."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

import anyio
import pytest

from cells.health.endpoint import answer_probe
from cells.health.paths import ClusterReport, Outcome, ProbedNode, ProbeResults
from cells.health.prober import NodeProber, SocketTransport
from lifecycle.http import SCRAPED, HttpServer

pytestmark = pytest.mark.anyio


class FakeNetwork:
    """Answers at once, but for addresses that are down."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.times: list[tuple[float, str]] = []

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    async def icmp(self, ip: str, requests: int) -> Outcome:
        assert requests == 3
        return Outcome(failure="Connection timed out") if ip in self.down else Outcome(100)

    async def http(self, ip: str, port: int) -> Outcome:
        assert port == 4240
        self.times.append((anyio.current_time(), ip))
        return Outcome(200)


def node(number: int) -> ProbedNode:
    return ProbedNode(f"kind/n{number}", (f"10.1.0.{number}",))


async def test_a_round_probes_each_address_once_spread_and_reports_a_failure_with_its_time() -> None:
    results, network = ProbeResults(), FakeNetwork()
    results.update([node(1), node(2)])
    reports: list[ClusterReport] = []
    published = anyio.Event()

    def publish(report: ClusterReport) -> None:
        nonlocal published
        reports.append(report)
        network.down = {"10.1.0.2"}
        published.set()
        published = anyio.Event()

    prober = NodeProber(results, network, publish, port=4240, requests=3, interval=0.2)
    async with anyio.create_task_group() as running:
        running.start_soon(prober.run)
        await anyio.wait_all_tasks_blocked()
        assert network.times == []  # no node is known yet
        prober.wake()
        with anyio.fail_after(30):
            while len(reports) < 3:
                await published.wait()
        running.cancel_scope.cancel()
    (first, one), (second, other) = network.times[:2]
    assert {one, other} == {"10.1.0.1", "10.1.0.2"}
    assert second - first > 0.05
    assert [each.reachable for each in reports[0].nodes or ()] == [True, True]
    good, bad = reports[2].nodes or ()
    assert good.reachable
    assert good.since == reports[0].started
    assert not bad.reachable
    assert bad.since == reports[1].started
    assert bad.host[0].icmp == Outcome(failure="Connection timed out")


async def test_a_removed_node_leaves_the_report_and_its_address_keeps_its_outcomes_for_another() -> None:
    results = ProbeResults()
    results.update([node(1)])
    results.record("10.1.0.1", Outcome(1), Outcome(2))
    results.update([ProbedNode("kind/n9", ("10.1.0.1",))], removed=["kind/n1"])
    (found,) = results.report(1.0).nodes or ()
    assert (found.name, found.host[0].icmp) == ("kind/n9", Outcome(1))
    results.update([], removed=["kind/n9"])
    results.update([node(1)])
    assert (results.report(2.0).nodes or ())[0].host[0].icmp is None


async def test_http_probes_are_answered_by_the_responder_and_failures_are_in_the_words_of_go() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = HttpServer(answer_probe, grace=1.0)
    await server.serve(listener)
    transport = SocketTransport()
    try:
        found = await transport.http("127.0.0.1", port)
        assert not found.failure
        assert found.latency > 0
    finally:
        await server.close()
    refused = await transport.http("127.0.0.1", port)
    where = f'Get "http://127.0.0.1:{port}/hello": dial tcp 127.0.0.1:{port}'
    assert refused.failure == f"{where}: connect: connection refused"


RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 200\r\n\r\n", ""),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "unexpected status code: 404 404 Not Found"),
        (b"", "GET: EOF"),
        (b"HTTP/1", "GET: unexpected EOF"),
        (None, "GET: read tcp CLIENT->SERVER: read: connection reset by peer"),
        (
            b'SSH-2.0-"x"\r\n',
            r'GET: net/http: HTTP/1.x transport connection broken: malformed HTTP response "SSH-2.0-\"x\""',
        ),
    ],
)
async def test_a_probe_names_what_was_wrong_with_the_answer(answer: bytes | None, failure: str) -> None:
    """Only a failure to connect is called one."""
    client = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal client
        await reader.readuntil(b"\r\n\r\n")
        client = "{}:{}".format(*writer.get_extra_info("peername"))
        if answer is None:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        found = await SocketTransport().http("127.0.0.1", port)
    server = f"127.0.0.1:{port}"
    text = found.failure.replace(f'Get "http://{server}/hello"', "GET")
    assert text.replace(server, "SERVER").replace(client, "CLIENT") == failure


async def asked(port: int, request: bytes, *, client: str = "127.0.0.1") -> bytes:
    """All that is answered until the responder closes."""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", port, local_host=client) as stream:
            await stream.send(request)
            found = b""
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    found += await stream.receive()
    return found


async def test_the_responder_answers_one_path_and_a_client_that_floods_it_keeps_no_other_out() -> None:
    """Open to other nodes and to pods, it gives nothing away, reads no body, and has room for others."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = HttpServer(answer_probe, grace=0.0, limits=SCRAPED)
    await server.serve(listener)
    head = b"Host: n1\r\nConnection: close\r\n"
    hello = b"GET /hello HTTP/1.1\r\n" + head + b"\r\n"
    try:
        for target in (b"/", b"/hello/", b"/HELLO", b"//hello", b"/hello/../metrics", b"/healthz", b"*"):
            answer = await asked(port, b"GET " + target + b" HTTP/1.1\r\n" + head + b"\r\n")
            status, _, body = answer.partition(b"\r\n")[0], *answer.partition(b"\r\n\r\n")[1:]
            assert (status.split()[1:2], body) == ([b"404"], b""), target
        for nonsense in (b"\0" * 64, b"HELO\r\n\r\n", b"GET /hello HTTP/1.1\r\nx: " + b"y" * (1 << 20)):
            assert not (await asked(port, nonsense)).startswith(b"HTTP/1.1 2"), nonsense[:20]
        body = b"POST /hello HTTP/1.1\r\nContent-Length: 9999999\r\n" + head + b"\r\n"
        assert (await asked(port, body + bytes(1 << 16))).startswith(b"HTTP/1.1 ")
        greedy = [socket.create_connection(("127.0.0.1", port)) for _ in range(SCRAPED.connections)]
        for one in greedy:
            one.send(b"GET /hello HTTP/1.1\r\n")
        for _ in range(3):
            assert (await asked(port, hello, client="127.0.0.2")).startswith(b"HTTP/1.1 200")
        for one in greedy:
            one.close()
    finally:
        await server.close()


async def test_echo_requests_are_answered_by_the_kernel() -> None:
    with suppress(PermissionError), socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP):
        transport = SocketTransport()
        transport.open()
        try:
            for ip in ("127.0.0.1", "::1"):
                found = await transport.icmp(ip, 3)
                assert not found.failure
                assert found.latency > 0
        finally:
            transport.close()
        return
    pytest.skip("needs CAP_NET_RAW")
