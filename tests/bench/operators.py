"""The operator in a big cluster: ranges for nodes, collected identities, memory.

Lists come from memory, and writes are accepted at once: the operator, a process of its own, is measured from
its start on. There is no peer: Cilium's operator is not available.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.hostile import memory
from tests.bench.objects import Server, replaying, serving
from tests.bench.startup import cpu
from tests.bench.stats import Figure, Sample
from tests.bench.tools.object_clients import kubeconfig
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.operator.running import settings
from tests.support.ports import free_port

NODES, IDENTITIES, ENDPOINTS = 5_000, 60_000, 100_000
PATIENCE = 300.0
QUICK = {"identity-gc-interval": "1s", "identity-heartbeat-timeout": "1s", "identity-gc-rate-limit": "100000"}


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Measure everything."""
    del folder
    what = f"{NODES:,} nodes: start to all ranges written"
    found = list(written("PATCH", NODES, rounds, (0, 0, 0, NODES), {}))
    figures = [_figure(what, "s", found, 0, 5), _figure(f"{what}, processor", "s", found, 1, 5)]
    what = f"{IDENTITIES:,} identities: start to all deleted"
    found = list(written("DELETE", IDENTITIES, rounds, (0, 0, 0, 0, IDENTITIES), QUICK))
    figures += [_figure(what, "s", found, 0, 3), _figure(f"{what}, processor", "s", found, 1)]
    return [*figures, *held(rounds)]


def written(
    method: str, wanted: int, rounds: int, objects: tuple[int, ...], values: dict[str, str]
) -> Iterator[tuple[float, float]]:
    """Return the seconds, and those of its processor, from an operator's start until this number of objects
    is written.
    """
    with serving(*objects) as server, replaying(server) as again:
        for number in range(rounds + 1):
            ask(again.url, "/forget")
            with running(again, values) as process:
                began = time.monotonic()
                wait(lambda: ask(again.url, "/written").get(method, 0) >= wanted)
                took = time.monotonic() - began, cpu(process.pid) / 1000
            if number:  # the first time the server is asked
                yield took


def held(rounds: int) -> Iterator[Figure]:
    """Return an operator's memory for nodes and endpoints, beyond that in an empty cluster."""
    grown = []
    with serving(0, 0, ENDPOINTS, NODES) as full, replaying(full) as again:
        with serving(0, 0, 0) as empty, running(empty, {}, port := free_port()) as process:
            wait(lambda: "0 ciliumendpoints" in metrics_text(port))
            before = memory(process.pid)
        for _ in range(rounds):
            with running(again, {}, port := free_port()) as process:
                wait(lambda: f"{ENDPOINTS} ciliumendpoints" in metrics_text(port))
                wait(lambda: ask(again.url, "/written").get("PATCH", 0) >= NODES)
                grown.append(memory(process.pid) - before)
    yield Figure(f"{NODES:,} nodes, {ENDPOINTS:,} endpoints: memory grown", "MiB", Sample(tuple(grown)))
    yield Figure("operator of an empty cluster: memory", "MiB", Sample((before,)))


@contextlib.contextmanager
def running(server: Server, values: dict[str, str], port: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run an operator of the cluster."""
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "k8s-kubeconfig-path": kubeconfig(folder, server.url, ADMIN_TOKEN),
            "operator-api-serve-addr": f"127.0.0.1:{port or free_port()}",
            "operator-k8s-client-qps": "0",
            "skip-crd-creation": "true",
            "cluster-pool-ipv4-cidr": "10.0.0.0/8",
            **values,
        }
        settings(given, Path(folder, "config"))
        command = [sys.executable, "-m", "hive", "operator", f"--config-dir={folder}/config"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.kill()


def ask(url: str, path: str) -> Any:
    """Send a GET and decode the JSON answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return json.load(connection.getresponse())


def metrics_text(port: int) -> str:
    """Return the metrics of an operator; empty before it serves."""
    try:
        return json.dumps(ask(f"http://127.0.0.1:{port}", "/hive/status"))
    except OSError:
        return ""


def wait(ready: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    ends = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < ends
        time.sleep(0.05)


def _figure(
    what: str, unit: str, found: list[tuple[float, float]], which: int, target: float | None = None
) -> Figure:
    return Figure(what, unit, Sample(tuple(one[which] for one in found)), target)
