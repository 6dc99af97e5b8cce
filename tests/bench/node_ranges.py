"""The operator at a fake API server in another process: from its first list to the last node's ranges."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lifecycle.testing import eventually
from tests.bench.stats import Figure, Sample
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators

NODES = 5_000
KIND = Resource("cilium.io", "ciliumnodes")
ELECTION = {
    "leader-election-lease-duration": "300s",
    "leader-election-renew-deadline": "240s",
    "leader-election-retry-period": "2s",
}
"""A long lease: a fake API server that creates a cluster does not answer meanwhile."""


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return the seconds until every CiliumNode has its ranges, and those of the fake API server for it."""
    found = [asyncio.run(_round(folder)) for _ in range(rounds)]
    names = ("until all have theirs", "of the operator's processor", "of the API server's processor")
    return [
        Figure(f"operator: ranges of {NODES} nodes, {name}", "s", Sample(tuple(values)))
        for name, values in zip(names, zip(*found, strict=True), strict=True)
    ]


async def _round(folder: Path) -> tuple[float, float, float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_stand_in, args=(theirs,))
    process.start()
    try:
        port: int = await asyncio.to_thread(ours.recv)
        server = ApiServer()
        server.port = port
        pool = {"cluster-pool-ipv4-cidr": "10.0.0.0/8", **ELECTION}
        worked = time.process_time()
        async with Operators(server, folder).running(pool):
            took, served = await asyncio.to_thread(ours.recv)
            return took, time.process_time() - worked, served
    finally:
        process.kill()
        process.join()


def _stand_in(results: Connection) -> None:
    asyncio.run(_serve(results))


async def _serve(results: Connection) -> None:
    server = ApiServer()
    server.crd_delay = 0
    async with server.serving():
        from cells.operator.crds import definitions

        wanted = definitions(
            endpoints=True,
            endpoint_slices=False,
            local_redirects=False,
            egress_gateways=False,
            bgp=False,
        )
        for one in wanted:
            server.add(one.body)
        await eventually(lambda: server.kinds.get("cilium.io", "v2", "ciliumnodes"), 60)
        for number in range(NODES):
            metadata = {"name": f"node-{number:05}"}
            body = {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": metadata, "spec": {}}
            server.add(body)
        results.send(server.port)
        await eventually(lambda: any("ciliumnodes?" in target for _, target in server.requests), 600)
        began, worked = time.perf_counter(), time.process_time()
        objects = server.store.of(KIND).objects
        await eventually(
            lambda: all((one["spec"].get("ipam") or {}).get("podCIDRs") for one in objects.values()), 600
        )
        results.send((time.perf_counter() - began, time.process_time() - worked))
        await asyncio.sleep(60)
