"""Thousands of CiliumNetworkPolicies that an API server adds at once, until the last is in a policy map.

Needs: root, the lab, the compiled plugin.   Gives: measure.
A running agent with pods gets them as one batch of its watch. Meanwhile its probe is asked without a pause: a
liveness probe that is not answered would restart it. Time counts from the request to the server, whose own
work on so many objects (``tests.support.apiserver``, on another processor) is in it; the agent's processor
time is not the server's.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cells.maps.map import open_map
from hive.lab import pods
from tests.bench.nodes import PluginNode, lab, serving_node
from tests.bench.startup import add_later, api_server, compiled
from tests.bench.stats import Figure, Sample

SIZES = {1_000: 1.0, 10_000: 8.0}
"""Policies, and seconds that they are to be in force within."""
PODS = 20
ANSWERED = 100.0
"""ms that the probe is to be answered within."""
FIRST_PORT = 1_000
WITHIN = 120.0
GLOBALS = Path("/sys/fs/bpf/tc/globals")


def pod(number: int) -> dict[str, Any]:
    """A pod's object."""
    metadata = {"name": f"p{number}", "namespace": "default", "labels": {"app": f"a{number}"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "c", "image": "c"}]},
    }


def policy(number: int) -> dict[str, Any]:
    """One that allows one more port of one pod to another."""
    peer = [{"matchLabels": {"app": f"a{(number + 1) % PODS}"}}]
    port = {"port": str(FIRST_PORT + number // PODS), "protocol": "TCP"}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": f"c{number}", "namespace": "default"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": f"a{number % PODS}"}},
            "ingress": [{"fromEndpoints": peer, "toPorts": [{"ports": [port]}]}],
        },
    }


class Probe(threading.Thread):
    """Asks again and again until it is stopped.

    ``slowest`` is in ms, ``work`` the most ms that the agent's loop had a processor for meanwhile: what other
    programs on the machine take is in the one alone.
    """

    def __init__(self, agent: int) -> None:
        super().__init__(daemon=True)
        self._agent = Path(f"/proc/{agent}/schedstat")
        """Of its first thread."""
        self.slowest = self.work = 0.0
        self.failure = ""
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.002):
            worked = self._worked()
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", 9879, timeout=WITHIN)
            try:
                connection.request("GET", "/healthz")
                status = connection.getresponse().status
            except OSError as error:
                self.failure = str(error)
                return
            finally:
                connection.close()
            self.slowest = max(self.slowest, (time.perf_counter() - began) * 1000)
            self.work = max(self.work, self._worked() - worked)
            if status != 200:
                self.failure = f"the probe is answered {status}"

    def _worked(self) -> float:
        return int(self._agent.read_text(encoding="ascii").split()[0]) / 1e6

    def stop(self) -> None:
        """Raises RuntimeError where it was not answered well."""
        self._over.set()
        self.join(WITHIN)
        if self.failure:
            raise RuntimeError(self.failure)


def entries() -> Iterator[int]:
    """How many each policy map has."""
    for path in GLOBALS.glob("cilium_policy_*"):
        if path.name.rpartition("_")[2].isdigit():
            with open_map(path) as table:
                yield sum(1 for _ in table.items())


def burst(folder: Path, count: int, agent: int) -> tuple[float, float, float]:
    """Seconds until all are in force; of the slowest answer ms, and those that the agent worked."""
    probe = Probe(agent)
    probe.start()
    began = time.perf_counter()
    add_later(folder)
    while sum(1 for found in entries() if found >= count // PODS) < PODS:
        if time.perf_counter() - began > WITHIN:
            raise RuntimeError(f"after {WITHIN:.0f} s the maps have {sorted(entries())[-PODS:]} entries")
        time.sleep(0.1)
    seconds = time.perf_counter() - began
    probe.stop()
    return seconds, probe.slowest, probe.work


def _measured(node: PluginNode, folder: Path, count: int) -> tuple[float, ...]:
    assert node.agent is not None
    before = node.agent_cpu()
    found = node.namespaces.run(partial(burst, folder, count, node.agent))
    return *found, (node.agent_cpu() - before) / 1e9


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Of each size: the time, the slowest answer and the agent's processor time; a new agent each round."""
    compiled()
    figures = []
    for count, within in SIZES.items():
        found: list[tuple[float, ...]] = []
        later = [policy(number) for number in range(count)]
        for _ in range(min(rounds, 3)):
            with (
                lab("bench-bursts") as made,
                api_server(made, folder, later, [pod(number) for number in range(PODS)]) as settings,
                serving_node(folder, made, 0, *settings) as node,
            ):
                for number in range(PODS):
                    pods.add(made, f"p{number}")
                found.append(_measured(node, folder, count))
        what = f"{count:,} CiliumNetworkPolicies at once, {PODS} pods"
        targets = {
            "in force": ("s", within),
            "slowest probe": ("ms", ANSWERED),
            "the agent's work in a probe": ("ms", ANSWERED),
            "processor": ("s", None),
        }
        for (name, (unit, target)), values in zip(targets.items(), zip(*found, strict=True), strict=True):
            figures.append(Figure(f"{what}: {name}", unit, Sample(values), target))
    return figures
