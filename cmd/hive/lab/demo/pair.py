"""``hive lab demo``, the second part: two nodes, with routes and then a tunnel; each claim is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.cluster.manifests import namespace_object
from hive.lab.cluster.store import Store
from hive.lab.demo.teardown import removed_afterwards
from hive.lab.demo.traffic_checks import TrafficChecks
from hive.lab.demo.transcript import Transcript
from hive.lab.demo.wait import eventually
from hive.lab.namespaces import inside
from hive.lab.node import Lab, LabError
from hive.lab.pods import Attached
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import routes

RATE = 1000.0
"""UDP packets per second."""
SETTINGS = ("--identity-change-grace-period=1s",)
TEAM = "k8s:io.cilium.k8s.namespace.labels.team=blue"


def run(cluster: Cluster, transcript: Transcript) -> None:
    """Run the demo on two nodes, then remove them, even after an error."""
    if any(agent_process.running(lab) is not None for lab in cluster.nodes()):
        name = cluster.name
        raise LabError(f"nodes of {name} are running: remove them (hive lab down --name {name})")
    last = ("nothing left of both", "Both nodes are taken down", "With them goes the network between.")
    pair = Pair(cluster, transcript)
    with removed_afterwards(cluster, transcript, *last):
        for chapter in (pair.nodes, pair.check_traffic, pair.kill, pair.label, pair.tunnel):
            chapter()


class Pair:
    """The chapters in order; later ones use the results of earlier ones."""

    def __init__(self, cluster: Cluster, transcript: Transcript) -> None:
        self._cluster = cluster
        self._transcript = transcript
        self._traffic = TrafficChecks(transcript)
        self._etcd = Store.program() is not None
        self._labs: list[Lab] = []
        self._attached: list[Attached] = []

    def nodes(self) -> None:
        """Create two nodes joined by a bridge, each with a pod."""
        shared = "They publish themselves and their pods in etcd." if self._etcd else ""
        self._transcript.step(
            "pair",
            "Two nodes",
            f"Each has namespaces and an agent of its own; a bridge joins them. {shared}".rstrip(),
        )
        self._labs = self._cluster.make(2, 1, etcd=self._etcd)
        self._start()
        for number, lab in enumerate(self._labs, 1):
            self._attached.append(self._cluster.add_pod(lab, f"pod-{number}"))
        for lab, other in self._both():
            source = eventually(lambda lab=lab, other=other: self._source(lab, other))
            self._transcript.check(f"{lab.name} knows {other.name}", bool(source), f"from {source}")

    def check_traffic(self) -> None:
        """Ping and TCP by direct routes."""
        self._transcript.step(
            "direct",
            "Their pods talk, by routes",
            "Each agent has set a route to the other node's pods, over that node's address.",
        )
        for lab, other in self._both():
            cidr, via = self._cluster.place(other).pod_cidrs[0], self._cluster.place(other).ipv4
            with lab.open() as node:
                found = [route for route in node.run(routes) if route.destination == cidr]
            gateways = [route.gateway for route in found]
            self._transcript.check(f"{lab.name} has a route to {cidr}", gateways == [via], f"via {via}")
        self._check_both_directions()

    def kill(self) -> None:
        """Kill an agent with SIGKILL under traffic between the nodes."""
        first, second = self._labs
        self._transcript.step(
            "kill",
            f"The agent of {second.name} is killed and comes back",
            f"Meanwhile pod-1 sends pod-2 {RATE:.0f} numbered UDP packets a second.",
        )
        with first.open_pod("pod-1") as one, second.open_pod("pod-2") as two:
            with inside(two):
                sock = udp_socket()
            with sock:
                incoming = two.start(udp_receiver, sock)
                outgoing = one.start(udp_sender, (self._attached[1].ipv4, sock.getsockname()[1]), RATE)
                try:
                    agent_process.crash(second)
                    pid = agent_process.start(second, *self._cluster.settings(SETTINGS))
                    seconds = agent_process.wait_ready(second, pid)
                    sent, received = outgoing.finish(within=30), incoming.finish(within=30)
                finally:
                    outgoing.kill()
                    incoming.kill()
        self._transcript.check("a new agent serves", True, f"{seconds * 1000:.0f} ms after its start")
        lost = sent.packets - received.packets
        self._transcript.check(
            "no packet was lost",
            sent.packets > 0 and lost == 0,
            f"{sent.packets} sent, {received.packets} received, {lost} lost",
        )
        self._transcript.measured["pair_kill"] = {"sent": sent.packets, "lost": lost}

    def label(self) -> None:
        """Change a label of the namespace, and so the identities of its pods."""
        self._transcript.step(
            "label",
            "The namespace gets a label",
            "team=blue, in a manifest. Both pods get identities of which it is a part, under their traffic"
            + (", and each node knows the other's by etcd." if self._etcd else "."),
        )
        before = [self._identity(lab) for lab in self._labs]
        namespace = namespace_object()
        namespace["metadata"]["labels"]["team"] = "blue"
        self._cluster.manifests.write("namespaces", [namespace])
        for (lab, other), (number, _) in zip(self._both(), before, strict=True):
            labelled = eventually(lambda lab=lab: TEAM in self._identity(lab)[1])
            now, _ = self._identity(lab)
            seen = f"identity {number} became {now}"
            ok = labelled and now != number
            if self._etcd:
                known = eventually(lambda lab=lab, other=other: self._known_there(lab, other))
                ok, seen = ok and known, f"{seen}, on {other.name} as well"
            self._transcript.check(f"the pod of {lab.name} has another identity", bool(ok), seen)

    def tunnel(self) -> None:
        """Restart the agents with a tunnel."""
        self._transcript.step(
            "tunnel",
            "The agents start again, with routing-mode=tunnel",
            "The routes go, VXLAN comes. The pods, running all the while, reach each other through it; the "
            "identity of the sender travels in each packet.",
        )
        for lab in self._labs:
            agent_process.terminate(lab)
        self._start(TUNNEL)
        eventually(self._both_tunnel)
        self._check_both_directions()
        for lab in self._labs:
            packets = self._tunnelled(lab)
            self._transcript.check(f"{lab.name} got them by cilium_vxlan", packets > 0, f"{packets} packets")

    # What the chapters share

    def _start(self, *settings: str) -> None:
        wanted = self._cluster.settings((*settings, *SETTINGS))
        pids = {lab: agent_process.start(lab, *wanted) for lab in self._labs}
        for lab, pid in pids.items():
            agent_process.wait_ready(lab, pid)

    def _both(self) -> Sequence[tuple[Lab, Lab]]:
        first, second = self._labs
        return (first, second), (second, first)

    def _check_both_directions(self) -> None:
        first, second = self._labs
        one, two = self._attached
        with first.open_pod("pod-1") as here, second.open_pod("pod-2") as there:
            eventually(lambda: self._answers(first, "pod-1", two.ipv4))
            self._traffic.ping("ping pod-1 → pod-2", here, two.ipv4)
            self._traffic.ping("ping pod-2 → pod-1", there, one.ipv4)
            self._traffic.echo("TCP  pod-1 → pod-2", here, there, two.ipv4, one.ipv4)
            self._traffic.echo("TCP  pod-2 → pod-1", there, here, one.ipv4, two.ipv4)

    def _both_tunnel(self) -> bool:
        """Return whether both directions use the tunnel; one agent may change before the other."""
        first, second = self._labs
        one, two = self._attached
        before = [self._tunnelled(lab) for lab in self._labs]
        answered = self._answers(first, "pod-1", two.ipv4) and self._answers(second, "pod-2", one.ipv4)
        after = [self._tunnelled(lab) for lab in self._labs]
        return answered and all(now >= then + 2 for then, now in zip(before, after, strict=True))

    def _tunnelled(self, lab: Lab) -> int:
        with lab.open() as node:
            return node.run(_tunnel_rx_packets)

    def _answers(self, lab: Lab, name: str, address: str) -> bool:
        from hive.lab.traffic.probe import ping

        with lab.open_pod(name) as pod:
            return bool(pod.run(ping, address, 1))

    def _ask(self, lab: Lab, path: str) -> Any:
        pid = agent_process.running(lab)
        if pid is None:
            raise LabError(f"the agent of {lab.name} has ended:\n{agent_process.log_end(lab)}")
        return ask(path, agent_process.api_socket(pid))

    def _source(self, lab: Lab, other: Lab) -> str:
        """Return the source of the node's ipcache entry of the other node; empty if there is none."""
        found = self._ask(lab, "/v1/cluster/nodes")["nodes-added"]
        return next((str(one["source"]) for one in found if one["name"].endswith(f"/{other.name}")), "")

    def _identity(self, lab: Lab) -> tuple[int, list[str]]:
        """Return number and labels of the identity of the node's pod."""
        (endpoint,) = self._ask(lab, "/v1/endpoint")
        identity = endpoint["status"]["identity"]
        return int(identity["id"]), list(identity["labels"])

    def _known_there(self, lab: Lab, other: Lab) -> bool:
        """Return whether the other node has this node's pod with its identity."""
        address = self._attached[self._labs.index(lab)].ipv4
        known = {row["cidr"]: row["identity"] for row in self._ask(other, "/v1/ip")}
        return bool(known.get(f"{address}/32") == self._identity(lab)[0])


def _tunnel_rx_packets() -> int:
    """Return the packets received from the tunnel device; 0 if there is none."""
    try:
        return int(Path("/sys/class/net/cilium_vxlan/statistics/rx_packets").read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
