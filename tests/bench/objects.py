"""Objects of a cluster from the fake API server: lists, changes, identities, memory.

Each client is a process of its own. Lists come from memory: a server repeats what the fake API server
answered, so rendering them is not measured. It shares the processors all
the same, so what clients spend themselves is shown beside seconds.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.nodes import our_node
from tests.bench.podadd import run
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool
from tests.support.apiserver import ADMIN_TOKEN

PODS, NODES, REMOTE = 10_000, 1_000, 50_000
LOCAL = 40
PEERS = ("lightkube", "kubernetes_asyncio")


class Server(NamedTuple):
    """The fake API server, in a process."""

    url: str
    pid: int

    def ask(self, who: str) -> dict[str, float]:
        """Run a client and return its figures."""
        command = [sys.executable, "-m", "tests.bench.tools.object_clients", who, self.url, ADMIN_TOKEN]
        result = subprocess.run(
            [*command, str(self.pid)], capture_output=True, text=True, check=True, timeout=300
        )
        found: dict[str, float] = json.loads(result.stdout)
        return found


@contextlib.contextmanager
def serving(pods: int, nodes: int, endpoints: int, *more: int) -> Iterator[Server]:
    """Serve this number of objects; ``more``: CiliumNodes, identities."""
    counts = map(str, (pods, nodes, endpoints, *more))
    command = [sys.executable, "-m", "tests.bench.tools.object_server", *counts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "url" not in (started := json.loads(process.stdout.readline())):
                pass
            yield Server(started["url"], process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def replaying(server: Server) -> Iterator[Server]:
    """Serve the recorded answers of this server."""
    command = [sys.executable, "-m", "tests.bench.tools.replaying", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(json.loads(process.stdout.readline())["url"], process.pid)
        finally:
            process.kill()


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure everything."""
    return [*lists(rounds), *changes(rounds), *adds(folder, rounds)]


def lists(rounds: int) -> Iterator[Row | Figure]:
    """Measure lists of 10,000 pods and 1,000 nodes: ours, and the peers."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with serving(PODS, NODES, 0) as server, replaying(server) as again:
        for number in range(rounds + 1):
            for who in ("ours", *PEERS):
                took = again.ask(who)
                if number:  # the first time the server is asked
                    found[who].append(took)
            if number:
                found["start"].append(server.ask("start"))
    size = f"{PODS:,} pods, {NODES:,} nodes"
    for what, unit, key, scale in (
        ("until synced", "s", "wall", 1.0),
        ("processor", "ms", "cpu", 1e3),
        ("memory grown", "MiB", "rss", 1.0),
    ):
        for peer in PEERS:
            ours, theirs = (_sample(found[who], key, scale) for who in ("ours", peer))
            yield Row(f"{size}: {what}", unit, ours, peer, theirs, None)
    yield Figure(f"{PODS:,} pods: decoding", "ms", _sample(found["ours"], "decode", 1e3), 150)
    yield Figure(f"{size}: memory grown", "MiB", _sample(found["ours"], "rss"), 40)
    yield Figure(f"every kind, {PODS:,} own pods: start to synced", "s", _sample(found["start"], "wall"))


def changes(rounds: int) -> Iterator[Row | Figure]:
    """Measure pods of other nodes: into the ipcache map, and a change of each; identities."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with serving(10, 10, REMOTE) as server:
        for _ in range(rounds):
            for who in ("follow", "allocate"):
                found[who].append(server.ask(who))
    what = f"{REMOTE:,} remote pods"
    yield Figure(f"{what}: memory a pod", "B", _sample(found["follow"], "bytes"), 1024)
    yield Figure(f"{what}: event to map", "µs", _inverse(found["follow"], "events"), 200)
    yield Figure(f"{what}: event to map, processor", "µs", _inverse(found["follow"], "cpu events"), 200)
    yield Figure(f"{what}: loop lag meanwhile, p99.9", "ms", _sample(found["follow"], "lag", 1e3), 20)
    yield Figure(
        f"{what}: the loop computes at a stretch, p99.9", "ms", _sample(found["follow"], "busy", 1e3), 20
    )
    yield Figure(
        "identity made in the cluster, 50 asked for at once", "ms", _inverse(found["allocate"], "rate", 1e3)
    )


def adds(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure ADDs of pods with known labels, beside an agent without a source of objects."""
    spawn, manifests = tool("spawn", folder), folder / "manifests"
    manifests.mkdir()
    with (
        our_node(folder, LOCAL, "bench-known", f"--manifests-dir={manifests}") as known,
        our_node(folder, LOCAL, "bench-none") as none,
    ):
        objects = [_pod(pod.container) for pod in known.pods]
        (manifests / "pods.yaml").write_text("---\n".join(json.dumps(one) + "\n" for one in objects), "utf-8")
        values: dict[str, list[float]] = defaultdict(list)
        for index in range(rounds + 1):
            for node in (known, none):
                added = run(node, spawn, "ADD", LOCAL, 1)
                node.verify_added(LOCAL)
                run(node, spawn, "DEL", LOCAL, 10)
                node.verify_deleted()
                if index:  # the first round warms up
                    values[node.lab.name].append(added.p50)
    ours, peer = (Sample(tuple(values[name])) for name in ("bench-known", "bench-none"))
    yield Row("ADD with known labels, p50", "ms", ours, "without a source", peer, 1.15, faster=False)


def _pod(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "bench", "labels": {"app": "bench"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def _sample(found: list[dict[str, float]], key: str, scale: float = 1.0) -> Sample:
    return Sample(tuple(one[key] * scale for one in found))


def _inverse(found: list[dict[str, float]], key: str, scale: float = 1e6) -> Sample:
    return Sample(tuple(scale / one[key] for one in found))
