"""``hive lab demo``, the third part: outside clients and a service; each claim is checked."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cells.services.maglev import MaglevBackend, fill
from hive.lab import agent_process, pods
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.demo.teardown import removed_afterwards
from hive.lab.demo.transcript import Transcript
from hive.lab.demo.wait import eventually
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.pods import Attached
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import RequestResults, answer, send_requests, send_until_stopped

SETTINGS = ("--enable-node-port=true",)
PORT, ANYWHERE, HERE = 8080, 30080, 30081
"""Where pods listen; the node ports of a service that leads anywhere, and of one that stays on the node."""
ASKED = 60
MAGLEV_SIZE, MAGLEV_SEED = 16381, 0x24B7EF82
"""As Cilium's defaults are."""

Object = dict[str, Any]


def run(cluster: Cluster, transcript: Transcript) -> None:
    """Run the demo on two nodes, then remove them, even after an error."""
    last = ("nothing left of the services", "Both nodes are taken down", "Their services with them.")
    part = Services(cluster, transcript)
    with removed_afterwards(cluster, transcript, *last):
        part.nodes()
        with part.servers():
            for chapter in (part.one_node, part.two_nodes, part.removed):
                chapter()
        part.maglev()


class Services:
    """The chapters in order; later ones use the results of earlier ones."""

    def __init__(self, cluster: Cluster, transcript: Transcript) -> None:
        self._cluster = cluster
        self._transcript = transcript
        self._labs: list[Lab] = []
        self._pods: dict[str, tuple[Lab, Attached]] = {}

    def nodes(self) -> None:
        """Create two nodes and three pods with servers."""
        self._transcript.step(
            "services",
            "Two nodes that serve clients outside",
            "Pods one and two are on the first node, three is on the second. Each answers with its name and"
            " the address it sees its client at. The client is in the network between the nodes.",
        )
        self._labs = self._cluster.make(2, 1)
        pids = {lab: agent_process.start(lab, *self._cluster.settings(SETTINGS)) for lab in self._labs}
        for lab, pid in pids.items():
            agent_process.wait_ready(lab, pid)
        first, second = self._labs
        for name, lab in (("one", first), ("two", first), ("three", second)):
            self._pods[name] = lab, self._cluster.add_pod(lab, name)
        self._transcript.check("both agents serve", True, ", ".join(lab.name for lab in self._labs))

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Run servers in the pods."""
        started: list[Child[int]] = []
        try:
            for name, (lab, pod) in self._pods.items():
                with lab.open_pod(pod.pod) as place:
                    with inside(place):
                        listener = tcp_listener(port=PORT)
                    with listener:
                        started.append(place.start(answer, listener, name))
            yield
        finally:
            for each in started:
                each.kill()

    def one_node(self) -> None:
        """Both backends are on the node that gets the requests."""
        first, _ = self._labs
        self._transcript.step(
            "one node",
            f"A service with a node port, {ANYWHERE}, and backends on one node",
            f"The client asks the first node {ASKED} times.",
        )
        self._serve("one", "two")
        found = self._asked(first, ANYWHERE, {"one", "two"})
        self._transcript.check("every request is answered", not found.failed, _answers(found))
        seen = {client for _, client in found.answered}
        self._transcript.check(
            "backends see the client itself", seen == {self._client}, ", ".join(sorted(seen))
        )

    def two_nodes(self) -> None:
        """Show the client address that backends see, by traffic policy and node."""
        self._transcript.step(
            "two nodes",
            "Another backend on the second node; which client address each sees, by externalTrafficPolicy",
            "With Cluster any backend serves, and one on another node sees the node that was asked. With"
            " Local only those on the node serve, and see the client.",
        )
        self._serve("one", "two", "three")
        first, second = self._labs
        lines = [f"{'policy':8} {'asked':22} {'backend':8} sees"]
        for policy, port in (("Cluster", ANYWHERE), ("Local", HERE)):
            for lab in (first, second):
                here = {name for name, (where, _) in self._pods.items() if where == lab}
                wanted = set(self._pods) if policy == "Cluster" else here
                found = self._asked(lab, port, wanted)
                own = self._cluster.place(lab).ipv4
                expected = {(name, self._client if name in here else own) for name in wanted}
                self._transcript.check(
                    f"{policy}, asked at {lab.name}", set(found.answered) == expected and not found.failed,
                    _answers(found),
                )  # fmt: skip
                lines += [f"{policy:8} {lab.name:22} {name:8} {who}" for name, who in sorted(found.answered)]
        self._transcript.show(lines)
        self._transcript.measured["services_seen"] = lines[1:]

    def removed(self) -> None:
        """Remove a backend under load."""
        first, _ = self._labs
        lab, pod = self._pods["two"]
        self._transcript.step(
            "removed",
            "A backend goes, while a client asks as fast as it can",
            "First its slice marks it as terminating; once no connection goes there any more it leaves the"
            " slice, and its pod goes.",
        )
        with self._cluster.network.open() as outside:
            child = outside.start(send_until_stopped, self._target(first, ANYWHERE), 0.001)
            try:
                self._send(first, ANYWHERE)
                self._serve("one", "two", "three", terminating=("two",))
                drained = eventually(lambda: "two" not in self._send(first, ANYWHERE).servers)
                self._serve("one", "three")
                pods.delete(lab, pod.pod)
                self._send(first, ANYWHERE)
                load = child.finish(within=30)
            finally:
                child.kill()
        self._transcript.check("it gets no new connections", bool(drained), "two has left the answers")
        self._transcript.check(
            "no request failed", not load.failed and bool(load.answered),
            f"{_answers(load)}; {len(load.failed)} failed {load.failed[:1] or ''}".rstrip(),
        )  # fmt: skip
        self._transcript.measured["services_removed"] = {
            "answered": load.answered.total(),
            "failed": len(load.failed),
        }

    def maglev(self) -> None:
        """Show how many connections change their backend when one is removed."""
        self._transcript.step(
            "maglev",
            "What a backend that goes does to the others, with bpf-lb-algorithm=maglev",
            f"Of a table of {MAGLEV_SIZE} slots: those that led to others and now lead elsewhere. With a"
            " plain modulus of their number nearly all would.",
        )
        rows = [(count, *_disruption(count)) for count in (10, 50, 100)]
        self._transcript.show(["backends   slots moved needlessly   shares of backends differ by"])
        self._transcript.show(
            [f"{count:8}   {moved:20.2%}   {spread:4} slots" for count, moved, spread in rows]
        )
        most = max(moved for _, moved, _ in rows)
        self._transcript.check("few move that need not", most < 0.02, f"at most {most:.2%}")
        self._transcript.measured["maglev"] = {str(count): moved for count, moved, _ in rows}

    # What the chapters share

    @property
    def _client(self) -> str:
        return self._cluster.place(self._labs[0]).routers[0]

    def _target(self, lab: Lab, port: int) -> tuple[str, int]:
        return self._cluster.place(lab).ipv4, port

    def _send(self, lab: Lab, port: int) -> RequestResults:
        with self._cluster.network.open() as outside:
            return outside.run(send_requests, self._target(lab, port), ASKED)

    def _asked(self, lab: Lab, port: int, servers: set[str]) -> RequestResults:
        """Send requests until exactly these backends answer; return the results."""
        found = RequestResults()

        def answered() -> bool:
            nonlocal found
            found = self._send(lab, port)
            return set(found.servers) == servers and not found.failed

        eventually(answered)
        return found

    def _serve(self, *names: str, terminating: Collection[str] = ()) -> None:
        endpoints = []
        for name in names:
            lab, pod = self._pods[name]
            ends = name in terminating
            conditions = {"ready": not ends, "serving": True, "terminating": ends}
            endpoints.append({"addresses": [pod.ipv4], "nodeName": lab.name, "conditions": conditions})
        services = ((ANYWHERE, "web", "Cluster"), (HERE, "web-local", "Local"))
        objects = [
            each
            for number, (port, name, policy) in enumerate(services, 10)
            for each in _objects(name, f"10.96.0.{number}", port, policy, endpoints)
        ]
        self._cluster.manifests.write("services", objects)


def _objects(
    name: str, address: str, node_port: int, policy: str, endpoints: Sequence[Object]
) -> list[Object]:
    metadata = {"name": name, "namespace": "default"}
    ports = [{"name": "http", "port": 80, "nodePort": node_port, "protocol": "TCP"}]
    spec = {"type": "NodePort", "clusterIP": address, "clusterIPs": [address], "ports": ports}
    labels = {"kubernetes.io/service-name": name}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {**spec, "externalTrafficPolicy": policy},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "name": f"{name}-1", "labels": labels},
            "addressType": "IPv4",
            "endpoints": list(endpoints),
            "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
        },
    ]


def _answers(found: RequestResults) -> str:
    each = [f"{count} by {name}" for name, count in sorted(_by_server(found).items())]
    return f"{found.answered.total()} answered: {', '.join(each) or 'by no backend'}"


def _by_server(found: RequestResults) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (name, _), count in found.answered.items():
        counts[name] = counts.get(name, 0) + count
    return counts


def _disruption(count: int) -> tuple[float, int]:
    """Return the share of slots that moved without need, and the spread of slots over backends."""
    backends = [
        MaglevBackend(f"[10.0.{at // 250}.{at % 250}:8080,State:active]", at, 1) for at in range(count)
    ]
    before, after = (_slots(backends), _slots([each for each in backends if each.id != count // 2]))
    moved = sum(1 for one, other in zip(before, after, strict=True) if one != other and one != count // 2)
    shares = [len(list(group)) for _, group in itertools.groupby(sorted(before))]
    return moved / MAGLEV_SIZE, max(shares) - min(shares)


def _slots(backends: Sequence[MaglevBackend]) -> list[int]:
    table = fill(backends, MAGLEV_SIZE, MAGLEV_SEED)
    return list(memoryview(table).cast("I"))
