"""``hive lab demo``, the fourth part: a policy drops an open flow, and another rule allows it again."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.demo.teardown import removed_afterwards
from hive.lab.demo.transcript import Transcript
from hive.lab.demo.wait import eventually
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.pods import Attached
from hive.lab.traffic.flows import tcp_listener

FRONT, BACK = "frontend", "cart"
PORT = 8080
SILENCE = 1.0
"""Seconds without a byte after which the flow counts as dropped."""

Object = dict[str, Any]


def run(cluster: Cluster, transcript: Transcript) -> None:
    """Run the demo on a node, then remove it, even after an error."""
    last = ("nothing left of the policies", "The node is taken down", "Its policies with it.")
    part = Policies(cluster, transcript)
    with removed_afterwards(cluster, transcript, *last):
        part.pods()
        with part.open_connection():
            for chapter in (part.check_traffic, part.isolate, part.explain, part.allow):
                chapter()


class Policies:
    """The chapters in order; later ones use the results of earlier ones."""

    def __init__(self, cluster: Cluster, transcript: Transcript) -> None:
        self._cluster = cluster
        self._transcript = transcript
        self._lab: Lab
        self._pid = 0
        self._pods: dict[str, Attached] = {}
        self._client: socket.socket
        self._server: socket.socket
        self._sent = 0

    def pods(self) -> None:
        """Create a node with two pods; its agent reads policies from a directory."""
        self._transcript.step(
            "policies",
            "Two pods, and no policy",
            "Where no policy selects a pod, it may do everything.",
        )
        (self._lab,) = self._cluster.make(1, 1)
        self._pid = agent_process.start(self._lab, *self._cluster.settings())
        agent_process.wait_ready(self._lab, self._pid)
        for name in (FRONT, BACK):
            pod = self._pods[name] = self._cluster.add_pod(self._lab, name)
            self._transcript.check(f"{name} is added", True, pod.ipv4)

    @contextmanager
    def open_connection(self) -> Iterator[None]:
        """Keep a TCP connection open between the pods."""
        with self._lab.open_pod(FRONT) as front, self._lab.open_pod(BACK) as back:
            with inside(back):
                listener = tcp_listener(port=PORT)
            with inside(front):
                self._client = socket.socket()
            with listener, self._client:
                self._client.settimeout(5)
                self._client.connect((self._pods[BACK].ipv4, PORT))
                listener.settimeout(5)
                self._server, _ = listener.accept()
                with self._server:
                    yield

    def check_traffic(self) -> None:
        """Check that bytes arrive."""
        self._transcript.step(
            "talk", f"{FRONT} has a connection open to {BACK}", "And sends something now and then."
        )
        self._transcript.check("what it sends arrives", self._ping(within=30), f"TCP, port {PORT}")

    def isolate(self) -> None:
        """Apply a policy that isolates the cart."""
        self._transcript.step(
            "cut",
            f"A policy is applied: no pod reaches {BACK}",
            "Once it is in the policy map, the next packet of the open connection obeys it.",
        )
        self._apply([])
        enforced = eventually(lambda: self._enforced(BACK) == "ingress")
        self._transcript.check(
            "its policy map has it", bool(enforced), "hive endpoint list: ingress is enforced"
        )
        self._transcript.check(
            "the open connection is cut", not self._ping(SILENCE), f"{SILENCE:.0f} s of silence"
        )

    def explain(self) -> None:
        """Show the answer of ``hive policy explain``."""
        self._transcript.step("why", "Why?", f"hive policy explain default/{FRONT} default/{BACK}:{PORT}")
        ingress = self._ingress()
        self._transcript.show(
            [f"ingress of {ingress['of']}: {ingress['verdict']}", f"entry: {ingress['entry']}"]
        )
        self._transcript.check(
            "it names what is missing",
            ingress["verdict"] == "drop" and ingress["enforced"] and not ingress["rules"],
            "a policy selects the pod, and no rule allows this",
        )

    def allow(self) -> None:
        """Apply the policy with a rule for the frontend."""
        self._transcript.step(
            "open", f"The policy lets {FRONT} in", "The connection was never closed: it goes on."
        )
        self._apply([FRONT])
        self._transcript.check(
            "what was sent arrives", self._arrives(within=60), "by TCP's own retransmission"
        )
        rules = self._ingress()["rules"]
        self._transcript.check("the rule is named", len(rules) == 1, "; ".join(rules))
        self._transcript.measured["policies"] = {"rules": rules}

    # What the chapters share

    def _ping(self, within: float) -> bool:
        """Send a byte; return whether all bytes have arrived."""
        self._client.send(b"x")
        self._sent += 1
        return self._arrives(within)

    def _arrives(self, within: float) -> bool:
        while self._sent and select.select([self._server], [], [], within)[0]:
            self._sent -= len(self._server.recv(100))
        return not self._sent

    def _apply(self, allowed: list[str]) -> None:
        peers = [{"matchLabels": {"app": name}} for name in allowed]
        policy: Object = {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "cart", "namespace": "default"},
            "spec": {
                "endpointSelector": {"matchLabels": {"app": BACK}},
                "ingress": [{"fromEndpoints": peers}],  # an empty list selects no peer
            },
        }
        self._cluster.manifests.write("policies", [policy])

    def _enforced(self, name: str) -> str:
        """Return the directions that the pod's policy map enforces."""
        found: list[dict[str, Any]] = ask("/v1/endpoint", agent_process.api_socket(self._pid))
        ids = ((one, one["status"]["external-identifiers"]["k8s-pod-name"]) for one in found)
        (own,) = (one for one, pod in ids if pod == name)
        enabled: str = own["status"]["policy"]["realized"]["policy-enabled"]
        return enabled

    def _explained(self) -> Any:
        ends = {"source": f"default/{FRONT}", "destination": f"default/{BACK}"}
        query = urlencode({**ends, "port": str(PORT), "protocol": "TCP"})
        return ask(f"/hive/policy/explain?{query}", agent_process.api_socket(self._pid))

    def _ingress(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = self._explained()["ways"][0]["directions"]
        return next(one for one in found if one["direction"] == "ingress")
