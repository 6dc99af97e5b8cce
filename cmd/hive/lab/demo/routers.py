"""``hive lab demo``, the fifth part: a router learns pods and a service by BGP; each claim is checked."""

from __future__ import annotations

import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.demo.teardown import removed_afterwards
from hive.lab.demo.transcript import Transcript
from hive.lab.demo.wait import eventually
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.pods import Attached
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import send_request, serve_connections

SETTINGS = ("--kube-proxy-replacement=true", "--bpf-lb-mode=dsr", "--bpf-lb-algorithm=maglev")
ADDRESS, PORT = "203.0.113.1", 80
CONNECTIONS = 60
PATIENCE = 5.0

Answer = tuple[str, str]
"""Name of the answering pod, and the client address that it sees."""


def run(cluster: Cluster, transcript: Transcript) -> None:
    """Run the demo on three nodes and a router, then remove them, even after an error."""
    last = ("nothing left of the routers", "Nodes and router are taken down", "Their routes with them.")
    part = Routers(cluster, transcript)
    with removed_afterwards(cluster, transcript, *last):
        part.nodes()
        with part.servers():
            for chapter in (part.pod, part.service, part.node_failure):
                chapter()


def _bgp_routes(*to: str) -> str:
    command = ["ip", "-4", "route", "show", *to, "proto", "bgp"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _spread_by_connection() -> None:
    Path("/proc/sys/net/ipv4/fib_multipath_hash_policy").write_text("1")


def _cut_uplink() -> None:
    subprocess.run(["ip", "link", "set", "uplink", "down"], check=True)


class Routers:
    """The chapters in order."""

    def __init__(self, cluster: Cluster, transcript: Transcript) -> None:
        self._cluster = cluster
        self._transcript = transcript
        self._labs: list[Lab] = []
        self._pods: dict[str, Attached] = {}

    def nodes(self) -> None:
        """Create three nodes, a router, and pods on the third node."""
        self._transcript.step(
            "routers",
            "Three nodes and a router that knows of them by BGP alone",
            "Each node has a BGP session with the router, FRR. Pods one to four are on the third node. The"
            " client is behind the router.",
        )
        self._labs = self._cluster.make(3, 1, bgp=True)
        self._cluster.router.start()
        settings = self._cluster.settings(SETTINGS)
        pids = {lab: agent_process.start(lab, *settings) for lab in self._labs}
        for lab, pid in pids.items():
            agent_process.wait_ready(lab, pid)
        for name in ("one", "two", "three", "four"):
            self._pods[name] = self._cluster.add_pod(self._labs[-1], name)
        learnt = eventually(lambda: self._learnt().count(" via ") == len(self._labs))
        self._transcript.check("the router has a route to each node's pods", bool(learnt), "by BGP")
        self._transcript.show(re.sub(r" nhid \d+| metric \d+", "", self._learnt()).splitlines())

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Run servers in the pods."""
        started: list[Child[int]] = []
        with ExitStack() as stack:
            for name in self._pods:
                place = stack.enter_context(self._labs[-1].open_pod(name))
                with inside(place):
                    listener = stack.enter_context(tcp_listener(port=PORT))
                started.append(place.start(serve_connections, listener, name))
                stack.callback(started[-1].kill)
            yield

    def pod(self) -> None:
        """Reach a pod from outside by its address."""
        self._transcript.step(
            "a pod from outside",
            "The client connects to the address of pod one",
            "No node translates it: the router forwards to the node, the node to the pod.",
        )
        with self._connected(self._pods["one"].ipv4, 1) as (connection,):
            found = send_request(connection)
        self._transcript.check(
            "pod one answers, and sees the client itself", found == ("one", self._client), " ".join(found)
        )

    def service(self) -> None:
        """Announce a service from all nodes; the router spreads connections over them (ECMP)."""
        self._transcript.step(
            "one address, three nodes",
            f"All nodes announce {ADDRESS}, the address of a service with the four pods",
            "The router spreads connections over the nodes (ECMP). Each node chooses the pod by Maglev, with"
            " the same table; the pod answers the client past them (DSR).",
        )
        self._cluster.manifests.write("service", self._objects())
        with self._cluster.network.open() as outside:
            outside.run(_spread_by_connection)
        spread = eventually(lambda: self._ways() == len(self._labs))
        self._transcript.check("the router has a way by each node", bool(spread), f"{self._ways()} ways")

    def node_failure(self) -> None:
        """Cut a node's link; its connections continue through another node."""
        self._transcript.step(
            "a node dies",
            f"{CONNECTIONS} connections are open; then the first node's link is cut",
            "Some of them went by that node. The router drops its session, as its hold time or BFD would do,"
            " and forwards to the other nodes. These know nothing of them, but have the same table.",
        )
        with self._connected(ADDRESS, CONNECTIONS) as connections:
            before = [send_request(one) for one in connections]
            by = Counter(name for name, _ in before)
            self._transcript.check("every pod has some", len(by) == len(self._pods), _counts(by))
            first, *others = self._labs
            with first.open() as node:
                node.run(_cut_uplink)
            self._cluster.router.drop_session(self._cluster.place(first).ipv4)
            eventually(lambda: self._ways() == len(others))
            after = [self._request(one) for one in connections]
        unchanged = sum(one == other for one, other in zip(before, after, strict=True))
        self._transcript.check(
            "each connection goes on with the pod that it had",
            unchanged == CONNECTIONS,
            f"{unchanged} of {CONNECTIONS}",
        )
        self._transcript.measured["bgp_connections"] = {"of": CONNECTIONS, "unchanged": unchanged}

    @property
    def _client(self) -> str:
        return self._cluster.place(self._labs[-1]).routers[0]

    def _learnt(self) -> str:
        with self._cluster.network.open() as router:
            return router.run(_bgp_routes)

    def _ways(self) -> int:
        """Return the nodes by which the router reaches the service."""
        with self._cluster.network.open() as router:
            return router.run(_bgp_routes, ADDRESS).count("nexthop")

    @contextmanager
    def _connected(self, address: str, count: int) -> Iterator[list[socket.socket]]:
        """Open this many connections of the client, once that is possible."""
        with ExitStack() as stack, self._cluster.network.open() as outside, inside(outside):
            opened: list[socket.socket] = []
            eventually(partial(self._open, (address, PORT), opened, stack))
            opened += [
                stack.enter_context(socket.create_connection((address, PORT), PATIENCE))
                for _ in range(count - 1)
            ]
            yield opened

    @staticmethod
    def _open(target: tuple[str, int], opened: list[socket.socket], stack: ExitStack) -> bool:
        try:
            opened.append(stack.enter_context(socket.create_connection(target, PATIENCE)))
        except OSError:
            return False
        return True

    @staticmethod
    def _request(connection: socket.socket) -> Answer | None:
        try:
            return send_request(connection)
        except OSError:
            return None

    def _objects(self) -> list[dict[str, object]]:
        metadata = {"name": "web", "namespace": "default", "labels": {"announce": "yes"}}
        ports = [{"name": "http", "port": PORT, "protocol": "TCP"}]
        spec = {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.10",
            "clusterIPs": ["10.96.0.10"],
            "ports": ports,
        }
        conditions = {"ready": True, "serving": True, "terminating": False}
        node = self._labs[-1].name
        return [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata,
                "spec": spec,
                "status": {"loadBalancer": {"ingress": [{"ip": ADDRESS}]}},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**metadata, "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
                "addressType": "IPv4",
                "endpoints": [
                    {"addresses": [pod.ipv4], "nodeName": node, "conditions": conditions}
                    for pod in self._pods.values()
                ],
                "ports": ports,
            },
        ]


def _counts(by: Counter[str]) -> str:
    return ", ".join(f"{count} with {name}" for name, count in sorted(by.items()))
