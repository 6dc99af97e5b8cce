"""Cold start to serving, the agent's memory, and the memory of its maps in the kernel.

A start is cold: new node, no maps, no programs; only Python's bytecode is compiled, as in an installed
package. The agent serves once the API answers Ok and the runtime has the network configuration. Rounds are
interleaved.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from compileall import compile_dir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from hive.lab import agent_process
from hive.lab.node import Lab
from tests.bench.nodes import lab, our_node, serving_node
from tests.bench.podadd import run
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool
from tests.unit.apiserver.replay import RECORDINGS

PODS = 100
TARGET = 8
"""Limit, as a multiple of the start of a Python that imports asyncio."""
CILIUM_START = 3070.0
"""ms until Cilium's agent served with the same API server, measured in November 2026."""
MEMORY_EMPTY, MEMORY_POD = 60 * 1024, 20
"""KiB: an agent without pods, and what each adds."""
CHART = Path(__file__).resolve().parents[2] / "configs" / "manifests" / "configmap.yaml"
OF_CONTAINERS = {"write-cni-conf-when-ready", "cni-log-file"}
"""Settings of the chart with paths that only its containers have."""
IN_A_CLUSTER = ("--ipam=kubernetes", "--kube-proxy-replacement=true", "--k8s-client-qps=0")
CILIUM_MAPS = 144.0
"""MiB of kernel memory of Cilium's maps on an IPv4 node, measured in November 2026."""
LOOK_EVERY = 0.0005
SERVES_WITHIN = 60.0


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SERVES_WITHIN)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def answers(path: Path, asked: str) -> bytes:
    """Return the agent's answer to a GET on its API socket; empty without one."""
    connection = _Connection(path)
    try:
        connection.request("GET", asked, headers={"Brief": "true"})
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def answers_ok(path: Path) -> bool:
    """Return whether the agent reports on its API socket that it is healthy."""
    return b'"state":"Ok"' in answers(path, "/v1/healthz").replace(b" ", b"")


def wait_serving(made: Lab, pid: int, began: float) -> float:
    """Return the seconds from ``began`` (monotonic) until the agent serves, to half a millisecond."""
    path = agent_process.api_socket(pid)
    while not (made.cni_conf.exists() and answers_ok(path)):
        if time.monotonic() - began > SERVES_WITHIN:
            raise RuntimeError(f"the agent does not serve:\n{agent_process.log_end(made)}")
        time.sleep(LOOK_EVERY)
    return time.monotonic() - began


def compiled() -> None:
    """Compile the agent's bytecode, as in an installed package."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for package in ("lifecycle", "cells", "hive"):
        found = find_spec(package)
        if found is not None:
            for folder in found.submodule_search_locations or ():
                compile_dir(folder, quiet=1)


def cold_start() -> tuple[float, float]:
    """Return the ms from starting the process to serving on a new node, and its CPU time."""
    with lab("bench-start") as made:
        return start(made)


def cold_start_in_a_cluster(folder: Path) -> tuple[float, float]:
    """Return the same with an API server, the chart's settings and kube-proxy replacement."""
    with lab("bench-start-k8s") as made, api_server(made, folder) as settings:
        return start(made, *settings)


def start(made: Lab, *settings: str) -> tuple[float, float]:
    """Return the ms from starting an agent with these settings to serving, and its CPU time."""
    began = time.monotonic()
    pid = agent_process.start(made, *settings, "--ipv4-range=10.200.0.0/16")
    took = wait_serving(made, pid, began)
    return took * 1000, cpu(pid)


def cpu(pid: int) -> float:
    """Return the ms of processor time, user and kernel, of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def asyncio_start() -> tuple[float, float]:
    """Return the ms, and CPU time, of a Python that imports asyncio and ends."""
    before = os.times()
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import asyncio"], check=True)  # with a time-out it would poll
    took = time.monotonic() - began
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return took * 1000, spent * 1000


def memory(pid: int) -> dict[str, float]:
    """Return a process's memory in KiB: PSS divides pages among their users, RSS does not."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): float(row[1]) for row in rows}


def starts(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure the time until it serves."""
    compiled()
    cold_start()  # warms the file cache: what is measured is the agent
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "cluster": [], "asyncio": []}
    for _ in range(rounds):
        found["ours"].append(cold_start())
        found["cluster"].append(cold_start_in_a_cluster(folder))
        found["asyncio"].append(asyncio_start())
    took, spent = (Sample(values) for values in zip(*found["ours"], strict=True))
    in_cluster, spent_in_cluster = (Sample(values) for values in zip(*found["cluster"], strict=True))
    their_time, their_cpu = (Sample(values) for values in zip(*found["asyncio"], strict=True))
    peer = 'python -c "import asyncio"'
    return [
        Row("cold start to serving", "ms", took, peer, their_time, TARGET, faster=False),
        Row("cold start to serving, CPU", "ms", spent, peer, their_cpu, None, faster=False),
        Figure("cold start to serving, API server", "ms", in_cluster, CILIUM_START),
        Figure("cold start to serving, API server, CPU", "ms", spent_in_cluster),
    ]


def maps_memory(pid: int) -> float:
    """Return the MiB that the kernel charges for an agent's open maps, each once."""
    found = {}
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        rows = dict(line.split(":", 1) for line in entry.read_text(encoding="ascii").splitlines())
        if "map_id" in rows:
            found[rows["map_id"]] = int(rows["memlock"])
    return sum(found.values()) / (1 << 20)


@contextlib.contextmanager
def api_server(
    made: Lab,
    folder: Path,
    later: Sequence[Sequence[dict[str, Any]]] = (),
    more: Sequence[dict[str, Any]] = (),
) -> Iterator[tuple[str, ...]]:
    """Run the fake API server in a node's network, over TLS; yield the settings of an agent in a cluster, the
    chart's.

    It has ``more`` objects from the beginning; add_later() adds one batch of ``later``.
    """
    kubeconfig, objects, settings = folder / "kubeconfig", folder / "objects.yaml", folder / "config"
    definitions = [json.loads(path.read_bytes()) for path in sorted(RECORDINGS.glob("fixtures/crd_*.json"))]
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": os.uname().nodename}}
    retained = [one for one in definitions if one.get("kind") == "CustomResourceDefinition"]
    objects.write_text(
        "---\n".join(json.dumps(one) + "\n" for one in [node, *retained, *more]), encoding="utf-8"
    )
    settings.mkdir(exist_ok=True)
    for key, value in yaml.safe_load(CHART.read_text(encoding="utf-8"))["data"].items():
        if key not in OF_CONTAINERS:
            (settings / key).write_text(value, encoding="utf-8")
    kubeconfig.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.support.apiserver", "--kubeconfig", str(kubeconfig)]
    batches = ["\n".join(map(json.dumps, batch)) for batch in later]
    (folder / "later").write_text("\n\n".join(batches), encoding="utf-8")
    command += ["--objects", str(objects), "--later", str(folder / "later")]
    with made.open() as inside:
        process = inside.popen(command, stdout=subprocess.PIPE, cwd=Path.cwd())
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the API server ended"
        (folder / "apiserver.pid").write_text(str(process.pid), encoding="ascii")
        yield (f"--config-dir={settings}", f"--k8s-kubeconfig-path={kubeconfig}", *IN_A_CLUSTER)
    finally:
        process.terminate()  # it removes its keys
        process.wait()


def add_later(folder: Path) -> None:
    """Make the server of api_server() add the next batch of objects."""
    os.kill(int((folder / "apiserver.pid").read_text(encoding="ascii")), signal.SIGUSR1)


def memories(folder: Path, rounds: int) -> list[Figure]:
    """Measure without an API server, then with one."""
    return [*alone(folder, rounds), *in_a_cluster(folder, rounds)]


def in_a_cluster(folder: Path, rounds: int) -> list[Figure]:
    """Return the memory of agent and maps with an API server, the chart's settings and kube-proxy
    replacement.
    """
    compiled()
    spawn = tool("spawn", folder)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        with (
            lab("bench-cluster") as made,
            api_server(made, folder) as settings,
            serving_node(folder, made, PODS, *settings) as node,
        ):
            assert node.agent is not None
            for when, pods in (("without pods", 0), (f"with {PODS} pods", PODS)):
                if pods:
                    run(node, spawn, "ADD", pods, 10)
                    node.verify_added(pods)
                held = memory(node.agent)
                found[f"API server, {when}: PSS"].append(held["Pss"])
                found[f"API server, {when}: RSS"].append(held["Rss"])
                found[f"API server, {when}: BPF maps"].append(maps_memory(node.agent))
    return [
        Figure(what, "MiB", Sample(tuple(values)), CILIUM_MAPS)
        if what.endswith("maps")
        else Figure(what, "KiB", Sample(tuple(values)), MEMORY_EMPTY if "without pods: PSS" in what else None)
        for what, values in found.items()
    ]


def alone(folder: Path, rounds: int) -> list[Figure]:
    """Return the agent's memory without, with, and after pods; a new agent each round."""
    compiled()
    spawn = tool("spawn", folder)
    empty, full, emptied = [], [], []
    for _ in range(rounds):
        with our_node(folder, PODS) as node:
            assert node.agent is not None
            empty.append(memory(node.agent))
            run(node, spawn, "ADD", PODS, 10)
            node.verify_added(PODS)
            full.append(memory(node.agent))
            run(node, spawn, "DEL", PODS, 10)
            node.verify_deleted()
            emptied.append(memory(node.agent))

    def sample(figure: Callable[[int], float]) -> Sample:
        return Sample(tuple(figure(index) for index in range(rounds)))

    return [
        Figure("memory without pods, PSS", "KiB", sample(lambda i: empty[i]["Pss"]), MEMORY_EMPTY),
        Figure("memory without pods, RSS", "KiB", sample(lambda i: empty[i]["Rss"])),
        Figure(f"memory with {PODS} pods, PSS", "KiB", sample(lambda i: full[i]["Pss"])),
        Figure(
            "memory a pod, RSS",
            "KiB",
            sample(lambda i: (full[i]["Rss"] - empty[i]["Rss"]) / PODS),
            MEMORY_POD,
        ),
        Figure(f"memory after {PODS} pods have gone, PSS", "KiB", sample(lambda i: emptied[i]["Pss"])),
    ]
