"""Rounds of probes: all addresses, spread over the interval, and a report of what became of each."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import pytest

from cells.health.endpoint import answer_probe
from cells.health.paths import ClusterReport, Outcome, ProbedNode, ProbeResults
from cells.health.prober import NodeProber, SocketTransport
from lifecycle.http import HttpServer

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
