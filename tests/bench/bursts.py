"""What an API server adds at once, until the last of it is in the kernel: policies, remote pods, an identity.

Needs: root, the lab, the compiled plugin.   Gives: measure.
A running agent with pods gets the objects as one batch of its watch. Meanwhile its probe is asked without a
pause: a liveness probe that is not answered would restart it. Time counts from the request to the server,
its own work on so many objects (``tests.support.apiserver``, on another processor) is in it; the agent's
processor time is not the server's.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from cells.maps.map import open_map
from cells.maps.records.endpoints import PolicyKey
from hive.lab import pods
from tests.bench.nodes import PluginNode, lab, serving_node
from tests.bench.startup import add_later, api_server, compiled
from tests.bench.stats import Figure, Sample

SIZES = {1_000: 1.0, 10_000: 8.0}
"""Number of policies, and the limit in seconds."""
PODS = 20
ANSWERED = 100.0
"""Limit in ms for the probe's answer."""
FIRST_PORT = 1_000
WITHIN = 120.0
GLOBALS = Path("/sys/fs/bpf/tc/globals")


def pod(number: int) -> dict[str, Any]:
    """Return a Pod of this node: the agent gets no others."""
    metadata = {"name": f"p{number}", "namespace": "default", "labels": {"app": f"a{number}"}}
    spec = {"containers": [{"name": "c", "image": "c"}], "nodeName": socket.gethostname()}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def policy(number: int) -> dict[str, Any]:
    """Return a policy that allows one more port from one pod to another."""
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
    """Repeats a liveness probe until it is stopped.

    ``slowest`` is in ms; ``work`` is the maximum processor time in ms of the agent's loop during a probe:
    only ``slowest`` includes other programs' time on the machine.
    """

    def __init__(self, agent: int) -> None:
        super().__init__(daemon=True)
        self._agent = Path(f"/proc/{agent}/schedstat")
        """The agent's first thread."""
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
        """Stop. Raises RuntimeError if a probe failed."""
        self._over.set()
        self.join(WITHIN)
        if self.failure:
            raise RuntimeError(self.failure)


def policy_maps() -> list[Path]:
    """Return the endpoints' policy maps."""
    return [one for one in GLOBALS.glob("cilium_policy_*") if one.name.rpartition("_")[2].isdigit()]


def have_entries(count: int) -> bool:
    """Return whether each pod's map has this number of entries."""
    full = 0
    for path in policy_maps():
        with open_map(path) as table:
            full += sum(1 for _ in table.items()) >= count
    return full >= PODS


def know_addresses(count: int) -> bool:
    """Return whether the ipcache has this number of addresses."""
    with open_map(GLOBALS / "cilium_ipcache") as table:
        return sum(1 for _ in table.items()) >= count


def admit(identity: int) -> bool:
    """Return whether each pod's map allows the identity."""
    key = PolicyKey(identity, egress=False, protocol=6, port=FIRST_PORT, port_bits=16).pack()
    admitting = 0
    for path in policy_maps():
        with open_map(path) as table:
            admitting += table.lookup(key) is not None
    return admitting >= PODS


def remote_pods(count: int) -> list[dict[str, Any]]:
    """Return nodes with a hundred pods each, and these pods."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        node, pod_ = divmod(number, 100)
        if not pod_:
            spec = {
                "addresses": [{"type": "InternalIP", "ip": str(ip_address("192.0.2.1") + node)}],
                "ipam": {"podCIDRs": [f"10.100.{node}.0/24"]},
            }
            metadata = {"name": f"remote-{node}"}
            found.append(
                {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": metadata, "spec": spec}
            )
        status = {
            "id": pod_ + 1,
            "identity": {"id": 40_000 + number % 200},
            "networking": {
                "addressing": [{"ipv4": f"10.100.{node}.{pod_ + 1}"}],
                "node": str(ip_address("192.0.2.1") + node),
            },
        }
        metadata = {"name": f"remote-{number}", "namespace": "default"}
        found.append(
            {"apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint", "metadata": metadata, "status": status}
        )
    return found


NEW = 50_000
"""The identity that is added."""


def identity() -> list[dict[str, Any]]:
    """Return an identity of a remote pod that a policy of all local pods allows."""
    labels = {
        "k8s:app": "new",
        "k8s:io.cilium.k8s.policy.cluster": "default",
        "k8s:io.kubernetes.pod.namespace": "default",
    }
    metadata = {"name": str(NEW)}
    return [
        {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumIdentity",
            "metadata": metadata,
            "security-labels": labels,
        }
    ]


def admitting() -> dict[str, Any]:
    """Return a policy of all pods that allows the new identity."""
    made = policy(0)
    made["metadata"]["name"] = "admitting"
    made["spec"]["endpointSelector"] = {}
    made["spec"]["ingress"][0]["fromEndpoints"] = [{"matchLabels": {"app": "new"}}]
    return made


class Burst(NamedTuple):
    """Objects that arrive at once, those that exist before, and the condition that the kernel has all."""

    what: str
    later: Sequence[dict[str, Any]]
    done: Callable[[], bool]
    before: Sequence[dict[str, Any]] = ()
    entries: int = 0
    """Number of entries in each pod's map."""
    within: float | None = None
    poll: float = 0.1


def bursts() -> Iterator[Burst]:
    """Return all bursts to measure."""
    for count, within in SIZES.items():
        what = f"{count:,} CiliumNetworkPolicies at once, {PODS} pods"
        later = [policy(number) for number in range(count)]
        yield Burst(what, later, partial(have_entries, count // PODS), within=within)
    remote = 10_000
    yield Burst(f"{remote:,} remote pods at once", remote_pods(remote), partial(know_addresses, remote))
    for count in (PODS, 1_000):
        before = [admitting(), *(policy(number) for number in range(count))]
        what = f"a new identity in {PODS} policy maps, beside {count:,} policies"
        yield Burst(what, identity(), partial(admit, NEW), before, count // PODS, poll=0.0)


def _until(done: Callable[[], bool], poll: float) -> None:
    limit = time.perf_counter() + WITHIN
    while not done():
        if time.perf_counter() > limit:
            raise RuntimeError(f"the kernel has not all of it after {WITHIN:.0f} s")
        time.sleep(poll)


def burst(folder: Path, one: Burst, node: PluginNode) -> tuple[float, ...]:
    """Measure: seconds until all are in the kernel; ms of the slowest answer and of the agent's work in it;
    the agent's processor seconds, probes included.
    """
    assert node.agent is not None
    add_later(folder)  # what is there before
    _until(partial(have_entries, one.entries), 0.1)
    probe = Probe(node.agent)
    before = node.agent_cpu()
    probe.start()
    began = time.perf_counter()
    add_later(folder)
    _until(one.done, one.poll)
    seconds = time.perf_counter() - began
    probe.stop()
    return seconds, probe.slowest, probe.work, (node.agent_cpu() - before) / 1e9


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return for each burst the time, the slowest answer and the agent's processor time; a new agent each
    round.
    """
    compiled()
    figures = []
    for one in bursts():
        found: list[tuple[float, ...]] = []
        there = [pod(number) for number in range(PODS)]
        for _ in range(min(rounds, 3)):
            with (
                lab("bench-bursts") as made,
                api_server(made, folder, (one.before, one.later), there) as settings,
                serving_node(folder, made, 0, *settings) as node,
            ):
                for number in range(PODS):
                    pods.add(made, f"p{number}")
                found.append(node.namespaces.run(partial(burst, folder, one, node)))
        targets = {
            "in the kernel": ("s", one.within),
            "slowest probe": ("ms", ANSWERED),
            "the agent's work in a probe": ("ms", ANSWERED),
            "processor": ("s", None),
        }
        for (name, (unit, target)), values in zip(targets.items(), zip(*found, strict=True), strict=True):
            figures.append(Figure(f"{one.what}: {name}", unit, Sample(values), target))
    return figures
