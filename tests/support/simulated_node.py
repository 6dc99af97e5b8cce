"""A simulated cluster behind a fake API server in a process of its own, and one real agent that follows it.

The process takes a command a line, as JSON, and answers each with a line. Run as
``python -m tests.support.simulated_node FOLDER SEED SIZE``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from socket import inet_ntoa
from typing import Any

import msgspec

from cells.maps.map import open_map
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from lifecycle.testing import eventually as happens
from tests.support.agents import serving
from tests.support.apiserver import ApiServer
from tests.support.simulation import REMOTE_NODE, Simulation, Size, differences
from tests.support.waiting import eventually
from tests.unit.apiserver.replay import RECORDINGS
from tests.unit.kubernetes.cluster import Cluster, kubeconfig, namespace, pod

PORT = 8001
NODE, RANGE = "node1", "10.0.7.0/24"
CRDS = ("ciliumendpoints", "ciliumidentities", "ciliumnetworkpolicies", "ciliumnodes")
GLOBALS = Path("/sys/fs/bpf/tc/globals")
RESERVED = 256
"""Identities below have a meaning of their own."""
INGRESS, TCP = 0, 6
OF_THE_SERVER = {"10.96.0.1:443": ["192.0.2.10:6443"]}
"""Frontends of services that an API server makes of itself."""
Model = dict[str, Any]
"""Prefixes, frontends and what pods of the node allow, with keys and values as JSON has them."""


# The cluster's process


class SimulatedServer:
    """The cluster and the API server that has its objects; commands change both."""

    def __init__(self, folder: Path, seed: int, size: Size) -> None:
        self._server = ApiServer()
        self._server.crd_delay = 0
        self._objects = Cluster(self._server, "")
        self._size, self._seed, self._folder = size, seed, folder
        self._serving = AsyncExitStack()
        self._simulation: Simulation | None = None

    @property
    def simulation(self) -> Simulation:
        """The cluster, once it has begun."""
        assert self._simulation is not None
        return self._simulation

    async def run(self) -> None:
        """Answer commands until there are no more."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, *given = json.loads(line)
            answer = await getattr(self, f"do_{command}")(*given)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        await self._serving.aclose()

    async def do_begin(self) -> str:
        """Make the cluster and serve it; the kubeconfig."""
        for one in CRDS:
            self._server.add(json.loads((RECORDINGS / "fixtures" / f"crd_{one}.json").read_bytes()))
        await self.do_back()
        await happens(lambda: all(self._objects.serves(one) for one in CRDS))
        self._server.definitions.fresh.clear()
        self._objects.put(namespace("default"))
        self._objects.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        for name in self._size.local:
            self._objects.put(pod(name, NODE, app=name))
        self._simulation = Simulation(self._seed, self._size, self._objects.put, self._objects.delete)
        return kubeconfig(self._folder, f"http://127.0.0.1:{PORT}")

    async def do_take(self, identities: list[int]) -> None:
        """Leave these to who has allocated them."""
        self.simulation.taken.update(identities)

    async def do_step(self, count: int) -> list[str]:
        """Events, one after the other; what happened."""
        return [self.simulation.step() for _ in range(count)]

    async def do_break(self) -> None:
        """End all connections."""
        await self._server.hang_up()

    async def do_away(self) -> None:
        """Stop to serve."""
        await self._serving.aclose()

    async def do_back(self) -> None:
        """Serve, after a restart that has forgotten what happened before."""
        self._server.restart()
        await self._serving.enter_async_context(self._server.serving(port=PORT))

    async def do_compact(self) -> None:
        """Forget the past, and end all connections: who asks from where it was has to list anew."""
        self._server.store.compact()
        await self._server.hang_up()

    async def do_model(self) -> Model:
        """What the node's maps should hold."""
        simulation = self.simulation
        return {
            "prefixes": simulation.prefixes(),
            "frontends": OF_THE_SERVER
            | {frontend: sorted(backends) for frontend, backends in simulation.frontends().items()},
            "allowed": {name: sorted(one) for name, one in simulation.allowed().items()},
        }


# The node


class SimulatedCluster:
    """The process of a cluster, and the agent on a node of it."""

    def __init__(self, lab: Lab, process: subprocess.Popen[bytes], kubeconfig: str, size: Size) -> None:
        self._lab, self._process, self._size = lab, process, size
        self._settings = (
            f"--k8s-kubeconfig-path={kubeconfig}",
            "--k8s-client-qps=0",
            f"--ipv4-range={RANGE}",
            "--routing-mode=tunnel",
            "--kube-proxy-replacement=true",
            "--bpf-lb-map-max=262144",
        )
        self.pid = 0
        self._numbers: dict[str, int] = {}

    def start(self) -> float:
        """Start the agent, and its pods at the first time; seconds until it serves."""
        began = time.monotonic()
        self.pid = serving(self._lab, *self._settings)
        took = time.monotonic() - began
        if not self._numbers:
            for name in self._size.local:
                pods.add(self._lab, name)
            eventually(lambda: min(self._identities().values()) >= RESERVED)
            self.ask("take", list(self._identities().values()))
            self._numbers = {
                one["status"]["external-identifiers"]["k8s-pod-name"]: one["id"] for one in self._endpoints()
            }
        return took

    def kill(self) -> None:
        """End the agent as the kernel does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ask(self, command: str, *given: Any) -> Any:
        """Send the cluster a command; its answer."""
        return answered(self._process, command, *given)

    def settled(self, within: float, what: str) -> float:
        """Wait until the maps hold what the cluster asks for; seconds.

        Raises AssertionError with the first differences.
        """
        model, began = self.ask("model"), time.monotonic()
        wrong: list[str] = []
        while True:
            late = time.monotonic() - began > within
            with self._lab.open() as node:
                found = node.run(in_maps, self._numbers)
            wrong = [f"{part}: {line}" for part in model for line in differences(found[part], model[part])]
            if not wrong:
                return time.monotonic() - began
            assert not late, f"{within} s after {what}: {len(wrong)} differ:\n" + "\n".join(wrong[:12])

    def _endpoints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask("/v1/endpoint", api_socket(self.pid))
        return found

    def _identities(self) -> dict[int, int]:
        return {one["id"]: one["status"]["identity"]["id"] for one in self._endpoints()}


def answered(process: subprocess.Popen[bytes], command: str, *given: Any) -> Any:
    """What a cluster's process answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([command, *given]).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"the cluster ended at {command}"
    return json.loads(line)


@contextmanager
def simulated(lab: Lab, folder: Path, seed: int, size: Size) -> Iterator[SimulatedCluster]:
    """A cluster from a seed, and a node of it whose agent is yet to start."""
    command = [
        sys.executable,
        "-m",
        "tests.support.simulated_node",
        folder,
        str(seed),
        json.dumps(msgspec.to_builtins(size)),
    ]
    with lab.open() as node:
        process = node.popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()
        )
    with process:
        try:
            yield SimulatedCluster(lab, process, answered(process, "begin"), size)
        finally:
            process.kill()


# Maps, as Cilium 1.17 lays them out, read with nothing of the agent's


def in_maps(numbers: dict[str, int]) -> Model:
    """What the maps of the node hold; to be run there."""
    return {
        "prefixes": dict(_prefixes()),
        "frontends": _frontends(),
        "allowed": {name: sorted(_allowed(number)) for name, number in numbers.items()},
    }


def _rows(name: str) -> Iterator[tuple[bytes, bytes]]:
    with open_map(GLOBALS / name) as opened:
        yield from opened.items()


def _prefixes() -> Iterator[tuple[str, list[Any]]]:
    """Those that lead to other nodes, with what identity and tunnel endpoint: of IPv4."""
    for key, value in _rows("cilium_ipcache"):
        length, _, _, family, address = struct.unpack_from("<IHBB4s", key)
        identity, tunnel = struct.unpack_from("<I4s", value)
        if family == 1 and (identity == REMOTE_NODE or (identity >= RESERVED and any(tunnel))):
            yield f"{inet_ntoa(address)}/{length - 32}", [identity, inet_ntoa(tunnel)]


def _frontends() -> dict[str, list[str]]:
    backends = {}
    for key, value in _rows("cilium_lb4_backends_v3"):
        address, port = struct.unpack_from("!4sH", value)
        backends[struct.unpack("<I", key)[0]] = f"{inet_ntoa(address)}:{port}"
    found: dict[str, list[str]] = {}
    for key, value in _rows("cilium_lb4_services_v2"):
        address, port, slot = struct.unpack_from("!4sHH", key)
        slot = int.from_bytes(struct.pack("!H", slot), sys.byteorder)
        of = found.setdefault(f"{inet_ntoa(address)}:{port}", [])
        if slot:
            number = struct.unpack_from("<I", value)[0]
            of.append(backends.get(number, f"backend {number}"))  # read before it was written
    return {frontend: sorted(of) for frontend, of in found.items()}


def _allowed(number: int) -> Iterator[list[int]]:
    """What may reach an endpoint: identity and port of TCP."""
    for key, _ in _rows(f"cilium_policy_{number:05}"):
        _, identity, egress, protocol, port = (
            struct.unpack_from("!I", key)
            + struct.unpack_from("<IBB", key, 4)
            + struct.unpack_from("!H", key, 10)
        )
        if egress == INGRESS and protocol == TCP:
            yield [identity, port]


if __name__ == "__main__":
    place, seed_given, size_given = sys.argv[1:]
    asyncio.run(
        SimulatedServer(Path(place), int(seed_given), msgspec.json.decode(size_given, type=Size)).run()
    )
