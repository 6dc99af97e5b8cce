"""A simulated cluster in a process of its own, and one real agent in it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import inet_ntoa
from typing import Any

import msgspec

from cells.maps.map import open_map
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.support.agents import serving
from tests.support.simulated_server import Model
from tests.support.simulation import REMOTE_NODE, Size, differences
from tests.support.waiting import eventually

GLOBALS = Path("/sys/fs/bpf/tc/globals")
RESERVED = 256
"""Identities below are reserved."""
INGRESS, TCP = 0, 6


# The node


class SimulatedCluster:
    """The process of a cluster, and the agent on a node of it."""

    def __init__(
        self, lab: Lab, process: subprocess.Popen[bytes], kubeconfig: str, size: Size, operator: str
    ) -> None:
        self._lab, self._process, self._size = lab, process, size
        self.kubeconfig = kubeconfig
        self.server = process.pid
        """The process of the cluster."""
        self._settings = (
            f"--k8s-kubeconfig-path={kubeconfig}",
            "--k8s-client-qps=0",
            f"--enable-cilium-endpoint-slice={str(operator == 'slices').lower()}",
            "--routing-mode=tunnel",
            "--kube-proxy-replacement=true",
            "--bpf-lb-map-max=262144",
        )
        self.pid = 0
        self._numbers: dict[str, int] = {}

    def start(self) -> float:
        """Start the agent, and at the first time its pods; return the seconds until it serves."""
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
        """Kill the agent, as the kernel does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ask(self, command: str, *given: Any) -> Any:
        """Send the cluster a command and return its reply."""
        return answered(self._process, command, *given)

    def settled(self, within: float, what: str) -> float:
        """Wait until the maps hold what the cluster's model demands; return the seconds.

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
    """Return the reply of a cluster's process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([command, *given]).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"the cluster ended at {command}"
    return json.loads(line)


@contextmanager
def simulated(lab: Lab, folder: Path, seed: int, size: Size, operator: str) -> Iterator[SimulatedCluster]:
    """Create a cluster from a seed, and a node of it without a running agent.

    Its operator has agents read ``endpoints``, or ``slices`` of them; see simulated_server.
    """
    command = [
        sys.executable,
        "-m",
        "tests.support.simulated_server",
        folder,
        str(seed),
        json.dumps(msgspec.to_builtins(size)),
        operator,
    ]
    with lab.open() as node:
        process = node.popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()
        )
    with process:
        try:
            yield SimulatedCluster(lab, process, answered(process, "begin"), size, operator)
        finally:
            process.kill()


# Maps, as Cilium 1.17 lays them out, read with nothing of the agent's


def in_maps(numbers: dict[str, int]) -> Model:
    """Return what the node's maps hold; runs in the node."""
    return {
        "prefixes": dict(_prefixes()),
        "frontends": _frontends(),
        "allowed": {name: sorted(_allowed(number)) for name, number in numbers.items()},
    }


def _rows(name: str) -> Iterator[tuple[bytes, bytes]]:
    with open_map(GLOBALS / name) as opened:
        yield from opened.items()


def _prefixes() -> Iterator[tuple[str, list[Any]]]:
    """Return the IPv4 prefixes of other nodes, with identity and tunnel endpoint."""
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
    """Return the identities and TCP ports that may reach an endpoint."""
    for key, _ in _rows(f"cilium_policy_{number:05}"):
        _, identity, egress, protocol, port = (
            struct.unpack_from("!I", key)
            + struct.unpack_from("<IBB", key, 4)
            + struct.unpack_from("!H", key, 10)
        )
        if egress == INGRESS and protocol == TCP:
            yield [identity, port]
