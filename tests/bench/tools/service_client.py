"""A client that programs services: ``python -m tests.bench.tools.service_client WHO [ARGUMENT ...]``.

Prints what it took as a line of JSON. ``start URL TOKEN COUNT`` is the services of an agent at an API server,
until the last entry is in its map; ``read URL`` reads the bytes that it was sent, and does nothing else;
``memory COUNT`` programs so many services from objects in memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import structlog

from cells import kubernetes
from cells.config import AgentConfig, AgentSettings
from cells.config import shared as service_settings
from cells.kubernetes.client.http import HttpConnection  # noqa: F401  # an agent has it already
from cells.services import FrontendKey, control
from cells.services.control import ServedFrontend, ServiceMaps
from lifecycle import Hive, Lifecycle, Table, invoke, replace, supply
from tests.bench.service_rules import BACKENDS
from tests.bench.service_sync import Ours, kernel
from tests.bench.tools.object_clients import kubeconfig

ENTRIES = 1 << 18
"""Maximum entries of each map."""

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


async def start(url: str, token: str, count: str) -> dict[str, float]:
    """Measure from the hive's start, with everything imported, until every service is in the maps."""
    os.environ["K8S_NODE_NAME"] = "node-0"
    known = AgentConfig(AgentSettings(), Lifecycle("bench"), structlog.get_logger())

    def needed(_: Table[FrontendKey, ServedFrontend]) -> None: ...

    needed.__annotations__ = {"_": Table[FrontendKey, ServedFrontend], "return": None}
    wanted = int(count)
    with tempfile.TemporaryDirectory() as folder, kernel(ENTRIES) as maps:
        hive = Hive(
            kubernetes.cell,
            service_settings.cell,
            control.cell,
            supply(known),
            replace(ServiceMaps, maps),
            invoke(needed),
            settings={"k8s-kubeconfig-path": kubeconfig(folder, url, token)},
        )
        gc.collect()
        gc.freeze()  # as an agent does
        began, computed = time.perf_counter(), time.process_time()
        async with hive.started():
            served = hive.get(Table[FrontendKey, ServedFrontend])
            await served.wait_initialized()
            took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - computed}
            backends = {one.address for row in served.all() for one in row.in_maps.backends}
            if len(backends) < wanted * BACKENDS:  # the API server has one of its own
                raise RuntimeError(f"{len(backends)} backends are served, not {wanted * BACKENDS}")
    return took


def read(url: str) -> dict[str, float]:
    """Read what the server answered to others, over one connection for each, in turn."""
    address = urlsplit(url).netloc
    answered: dict[str, int] = json.loads(_get(address, "/answered"))
    began, computed, size = time.perf_counter(), time.process_time(), 0
    for target, length in answered.items():
        connection = HTTPConnection(address, timeout=60)
        connection.connect()
        connection.sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode("ascii"))
        left = length
        while left and (part := connection.sock.recv(min(left, 1 << 18))):
            left -= len(part)
        size += length - left
        connection.close()
    wall, cpu = time.perf_counter() - began, time.process_time() - computed
    return {"wall": wall, "cpu": cpu, "bytes": float(size)}


def _get(address: str, target: str) -> bytes:
    connection = HTTPConnection(address, timeout=60)
    connection.request("GET", target)
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def memory(count: str) -> dict[str, float]:
    """Return the KB of this process for each service: decoded objects, derived rows, state of the maps."""
    with kernel(ENTRIES) as maps:
        asyncio.run(Ours(maps).measured(1, 0))  # modules that the first one loads do not count
    with kernel(ENTRIES) as maps:
        ours = Ours(maps, weighs=True)
        asyncio.run(ours.measured(int(count), 0))
    return {"memory": ours.grown / int(count)}


def main(who: str, *arguments: str) -> dict[str, float]:
    """Run one of them and print its figures."""
    if who == "start":
        return asyncio.run(start(*arguments))
    return {"read": read, "memory": memory}[who](*arguments)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201
