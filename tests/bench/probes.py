"""Processor time for probing the nodes of a cluster.

The agent's prober probes a hundred nodes with a health endpoint each, one round; all addresses are in the
loopback network of a namespace, where another process answers. Only the prober's time counts.
"""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from cells.health.endpoint import answer_probe
from cells.health.paths import ClusterReport, ProbedNode, ProbeResults
from cells.health.prober import NodeProber, SocketTransport
from hive.lab.children import Stop
from hive.lab.namespaces import new_node
from lifecycle.http import HttpServer
from tests.bench.stats import Figure, Sample

NODES: Final = 100
INTERVAL: Final = 4.0
"""Seconds of a round here; in a cluster it is a minute."""
PORT: Final = 4240
_FIRST: Final = IPv4Address("127.1.0.1")


def answering(stop: Stop) -> None:
    """Answer probes until the end."""

    async def serve() -> None:
        server = HttpServer(answer_probe, grace=1.0)
        await server.serve(socket.create_server(("", PORT)))
        await anyio.to_thread.run_sync(partial(stop.wait, 600))
        await server.close()

    anyio.run(serve)


async def spent() -> float:
    """Return the ms of processor time of one round in which all probes are answered."""
    results, transport = ProbeResults(), SocketTransport()
    addresses = [str(_FIRST + number) for number in range(2 * NODES)]
    results.update(
        ProbedNode(f"kind/n{number}", (addresses[number],), (addresses[NODES + number],))
        for number in range(NODES)
    )
    reports: asyncio.Queue[tuple[float, ClusterReport]] = asyncio.Queue()

    def publish(report: ClusterReport) -> None:
        reports.put_nowait((time.process_time(), report))

    prober = NodeProber(results, transport, publish, port=PORT, requests=3, interval=INTERVAL)
    prober.wake()
    async with anyio.create_task_group() as running:
        running.start_soon(prober.run)
        began, _ = await reports.get()  # the first round may begin before the first answer
        ended, report = await reports.get()
        running.cancel_scope.cancel()
    failed = [node.name for node in report.nodes or () if not node.reachable]
    assert not failed, f"no answer of {failed}"
    return (ended - began) * 1000


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return a value a round."""
    del folder
    with new_node() as node:
        answers = node.start(answering)
        try:
            values = [node.run(anyio.run, spent) for _ in range(rounds)]
        finally:
            answers.kill()
    what = "processor time of probing 100 nodes and their health endpoints once, ICMP and HTTP"
    return [Figure(what, "ms", Sample(tuple(values)))]
