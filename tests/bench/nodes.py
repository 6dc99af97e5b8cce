"""The nodes on which the benchmark runs plugins: one with our agent, one for the Go reference plugins."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cells.health.endpoint import LINK, OWNER
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import PODS, Lab, create, destroy
from hive.lab.traffic.probe import interfaces
from tests.bench.peers import Pair
from tests.support.waiting import eventually

PTP = Path("/usr/lib/cni/ptp")
UNLIMITED = "endpoint-list=rate-limit:0/s,parallel-requests:0"
"""Without limits, clients list endpoints as fast as they are answered: waiting is not measured."""
LOOKED_INTO = 5  # pods of a round that are inspected; their number and state is checked for all


class BenchPod(NamedTuple):
    """A pod for which a plugin is called."""

    container: str
    netns: Path


def agent_cpu(pid: int) -> int:
    """Return the ns of processor time of a process's threads, user and kernel."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks)


@dataclass(frozen=True, slots=True)
class PluginNode:
    """A node with pods' namespaces, a plugin and its configuration."""

    name: str
    lab: Lab
    namespaces: Namespaces
    plugin: Path
    netconf: Path
    pods: tuple[BenchPod, ...]
    links: str  # what the names of the pods' host links begin with
    agent: int | None = None

    def agent_cpu(self) -> int:
        """Return the ns of processor time of the agent's threads, user and kernel."""
        return 0 if self.agent is None else agent_cpu(self.agent)

    def verify_added(self, count: int) -> None:
        """Raise AssertionError unless ``count`` pods are complete."""
        links = self.host_links()
        if len(links) != count or not all("UP" in link["flags"] for link in links):
            raise AssertionError(f"{self.name}: {len(links)} links instead of {count}, or not all up")
        for pod in self.pods[: count : max(1, count // LOOKED_INTO)]:
            with self.lab.open_pod(pod.netns.name) as inside:
                eth0 = next(link for link in inside.run(interfaces) if link.name == "eth0")
            if not eth0.up or not eth0.addresses:
                raise AssertionError(f"{self.name}: {pod.container} has no address: {eth0}")
        if self.agent is None:
            return
        root = Path(f"/proc/{self.agent}/root")
        endpoints = ask("/v1/endpoint", agent_process.api_socket(self.agent))
        ready = [one for one in endpoints if one["status"]["state"] == "ready"]
        own = sum(one["status"]["networking"]["interface-name"] == LINK for one in endpoints)
        saved = list((root / "run/cilium/state").glob("*/ep_config.json"))
        policies = list((root / "sys/fs/bpf/tc/globals").glob("cilium_policy_*"))
        programs = self.attached(links)
        if not len(ready) == len(saved) == len(policies) == programs + own == count + own:
            raise AssertionError(
                f"{self.name}: {len(ready)} ready, {len(saved)} saved, {len(policies)} policy maps,"
                f" {programs} programs instead of {count}"
            )

    def verify_deleted(self) -> None:
        """Raise AssertionError unless links and addresses are soon released: a DEL is answered before."""
        eventually(lambda: not self.host_links(), within=20)
        if self.agent is not None:
            eventually(lambda: not self.allocated(), within=20)

    def allocated(self) -> list[str]:
        """Return the owners of addresses of our node's range, except the node."""
        assert self.agent is not None
        status = ask("/v1/healthz", agent_process.api_socket(self.agent))
        owners: list[str] = list(status["ipam"]["allocations"].values())
        return [owner for owner in owners if owner not in {"router", "node-ip", OWNER}]

    def host_links(self) -> list[dict[str, Any]]:
        """Return the pods' links on the node, without that of its health endpoint."""
        listed = json.loads(self.output("ip", "-json", "link", "show"))
        return [link for link in listed if link["ifname"].startswith(self.links) and link["ifname"] != LINK]

    def attached(self, links: list[dict[str, Any]]) -> int:
        """Return how many of the links have our program at their ingress."""
        batch = "".join(f"filter show dev {link['ifname']} ingress\n" for link in links)
        return self.output("tc", "-batch", "-", text=batch).count("cil_from_container")

    def output(self, *command: str, text: str | None = None) -> str:
        """Run a command inside the node and return its output."""
        return subprocess.run(
            command,
            preexec_fn=self.namespaces.enter,
            input=text,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout


@contextlib.contextmanager
def lab(name: str) -> Iterator[Lab]:
    """Create a lab node for the block."""
    made = Lab(name)
    destroy(made)
    create(made)
    try:
        yield made
    finally:
        destroy(made)


@contextlib.contextmanager
def our_lab(name: str, *settings: str) -> Iterator[tuple[Lab, int]]:
    """Create a lab node with a serving agent and more settings."""
    with lab(name) as made:
        yield made, _serving(made, *settings)


def _serving(made: Lab, *settings: str) -> int:
    """Start an agent with more settings, wait until it serves, and return its pid."""
    pid = agent_process.start(made, "--ipv4-range=10.200.0.0/16", f"--api-rate-limit={UNLIMITED}", *settings)
    agent_process.wait_ready(made, pid)
    return pid


@contextlib.contextmanager
def our_pair() -> Iterator[Pair]:
    """Create two pods on our datapath."""
    with our_lab("bench-traffic") as (made, _):
        pods.add(made, "a")
        address = pods.add(made, "b").ipv4
        with made.open_pod("a") as client, made.open_pod("b") as server:
            yield Pair(client, server, address)


@contextlib.contextmanager
def our_node(folder: Path, count: int, name: str = "bench-ours", *settings: str) -> Iterator[PluginNode]:
    """Create a node with our agent and plugin."""
    with lab(name) as made, serving_node(folder, made, count, *settings) as node:
        yield node


@contextlib.contextmanager
def serving_node(folder: Path, made: Lab, count: int, *settings: str) -> Iterator[PluginNode]:
    """Return the same for an existing lab node."""
    pid = _serving(made, *settings)
    with made.open() as namespaces:
        netconf = folder / f"{made.name}.json"
        netconf.write_bytes(pods.network_configuration(made))
        yield PluginNode("ours", made, namespaces, pods.PLUGIN, netconf, hold(made, count), "lxc", pid)


@contextlib.contextmanager
def ptp_node(folder: Path, count: int) -> Iterator[PluginNode]:
    """Create a node with Debian's ptp and host-local."""
    with lab("bench-ptp") as made, made.open() as namespaces:
        ipam = {
            "type": "host-local",
            "subnet": "10.202.0.0/16",
            "dataDir": str(made.directory / "host-local"),
        }
        network = {"cniVersion": "0.3.1", "name": "bench", "type": "ptp", "ipam": ipam}
        netconf = folder / "ptp.json"
        netconf.write_text(json.dumps(network), encoding="ascii")
        yield PluginNode("ptp + host-local", made, namespaces, PTP, netconf, hold(made, count), "veth")


def hold(made: Lab, count: int) -> tuple[BenchPod, ...]:
    """Create namespaces for ``count`` pods of the node."""
    names = [f"pod-{number}" for number in range(count)]
    for name in names:
        made.hold_pod(name)
    return tuple(BenchPod(f"{made.name}-{name}", PODS / name) for name in names)
