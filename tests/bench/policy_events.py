"""Policies at an API server: from a request that writes an object to the maps of a real agent's pods.

A CiliumNetworkPolicy over all pods that admits a hundred identities, and a CiliumIdentity that a policy of
all pods admits. As in ``service_events``, the server's event to a client that only reads lines is measured in
turn with it, and what the agent adds is the difference of the medians.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cells.maps.map import Map, open_map
from cells.maps.records.endpoints import PolicyKey
from hive.lab import pods
from tests.bench.bursts import policy_maps
from tests.bench.nodes import lab, serving_node
from tests.bench.service_events import Server, answer
from tests.bench.startup import api_server, compiled
from tests.bench.stats import Figure, Row, Sample

PODS, IDENTITIES, CHANGES = 50, 100, 15
FIRST, NEW = 40_000, 50_000
"""Identities: the first of those that are there, and the first that comes."""
PORT = 8080
WITHIN = 60.0
OBJECTS = "/apis/cilium.io/v2"
POLICIES = f"{OBJECTS}/namespaces/default/ciliumnetworkpolicies"
PEER = "a client that reads lines"


class Change(NamedTuple):
    """An object to write at the server, and the entry that shows it in each map."""

    collection: str
    """The URL of the events that the client reads."""
    path: str
    body: dict[str, Any]
    identity: int

    @property
    def name(self) -> str:
        """Return the object's name."""
        return str(self.body["metadata"]["name"])


def pod(number: int) -> dict[str, Any]:
    """Return a Pod of this node."""
    metadata = {"name": f"p{number}", "namespace": "default", "labels": {"app": f"a{number}"}}
    spec = {"containers": [{"name": "c", "image": "c"}], "nodeName": socket.gethostname()}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def identity(number: int, app: str) -> dict[str, Any]:
    """Return an identity of remote pods."""
    labels = {
        "k8s:app": app,
        "k8s:number": str(number),
        "k8s:io.cilium.k8s.policy.cluster": "default",
        "k8s:io.kubernetes.pod.namespace": "default",
    }
    kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumIdentity"}
    return kind | {"metadata": {"name": str(number)}, "security-labels": labels}


def policy(name: str, app: str) -> dict[str, Any]:
    """Return a policy of all pods that allows those of an app."""
    peers, port = [{"matchLabels": {"app": app}}], {"port": str(PORT), "protocol": "TCP"}
    ingress = [{"fromEndpoints": peers, "toPorts": [{"ports": [port]}]}]
    spec = {"endpointSelector": {}, "ingress": ingress}
    kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy"}
    return kind | {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def new_policy(turn: int) -> Change:
    """Return a policy of all pods that allows all identities of the cluster."""
    body = policy(f"c{turn}", "peer")
    return Change(f"{OBJECTS}/ciliumnetworkpolicies", POLICIES, body, FIRST + IDENTITIES - 1)


def new_identity(turn: int) -> Change:
    """Return an identity that all pods allow already."""
    number = NEW + turn
    path = f"{OBJECTS}/ciliumidentities"
    return Change(path, path, identity(number, "new"), number)


@contextmanager
def watching(server: Server, collection: str) -> Iterator[http.client.HTTPResponse]:
    """Watch events of a kind, a line each, from now on."""
    with closing(server.connect()) as connection:
        server.send(connection, "GET", collection)
        version = answer(connection)["metadata"]["resourceVersion"]
        server.send(connection, "GET", f"{collection}?watch=true&resourceVersion={version}")
        yield connection.getresponse()


def _until(done: Callable[[], bool], what: str) -> None:
    limit = time.perf_counter() + WITHIN
    while not done():
        if time.perf_counter() > limit:
            raise RuntimeError(f"{what} after {WITHIN:.0f} s")


def _read_event(events: http.client.HTTPResponse, kind: str, name: str) -> None:
    wanted = f'"{name}"'.encode()
    while line := events.readline():
        if kind.encode() in line and wanted in line:
            return
    raise RuntimeError("the watch ended")


class Turns:
    """Objects that are written and deleted repeatedly."""

    def __init__(self, server: Server, maps: Sequence[Map]) -> None:
        self._server = server
        self._maps = maps

    def measure(self, make: Callable[[int], Change]) -> tuple[list[float], list[float], list[float]]:
        """Return the ms to the server's event, to the first map and to the last one."""
        found: tuple[list[float], list[float], list[float]] = ([], [], [])
        with (
            closing(self._server.connect()) as connection,
            watching(self._server, make(0).collection) as events,
        ):
            for turn in range(2 * CHANGES):
                change = make(turn)
                has = partial(_has, self._maps, _key(change))
                began = time.perf_counter()
                self._server.send(connection, "POST", change.path, change.body)
                if turn % 2:
                    _until(lambda has=has: any(has()), "no map has the entry")  # type: ignore[misc]
                    found[1].append(1e3 * (time.perf_counter() - began))
                    _until(lambda has=has: all(has()), "not all maps have the entry")  # type: ignore[misc]
                    found[2].append(1e3 * (time.perf_counter() - began))
                    answer(connection)
                    _read_event(events, "ADDED", change.name)
                else:
                    _read_event(events, "ADDED", change.name)
                    found[0].append(1e3 * (time.perf_counter() - began))
                    answer(connection)
                    _until(lambda has=has: all(has()), "not all maps have the entry")  # type: ignore[misc]
                self._server.send(connection, "DELETE", f"{change.path}/{change.name}")
                answer(connection)
                _until(lambda has=has: not any(has()), "some map has the entry still")  # type: ignore[misc]
                _read_event(events, "DELETED", change.name)
        return found


def _has(maps: Sequence[Map], key: bytes) -> list[bool]:
    return [one.lookup(key) is not None for one in maps]


def _key(change: Change) -> bytes:
    return PolicyKey(change.identity, egress=False, protocol=6, port=PORT, port_bits=16).pack()


MADE = {
    f"a policy over {PODS} pods x {IDENTITIES} identities": (new_policy, 5.0, 20.0),
    f"a new identity in {PODS} policy maps": (new_identity, None, 4.0),
}
"""What is written, and the limits in ms that the agent may add to the server's event: to the first map, to
the last.
"""


def _measured(kubeconfig: Path) -> list[tuple[float, float, float]]:
    server = Server(kubeconfig)
    with ExitStack() as stack:
        every = [stack.enter_context(open_map(path)) for path in policy_maps()]
        connection = stack.enter_context(closing(server.connect()))
        known = Change("", "", identity(NEW - 1, "new"), NEW - 1)
        for body in [known.body, *(identity(FIRST + number, "peer") for number in range(IDENTITIES))]:
            server.send(connection, "POST", f"{OBJECTS}/ciliumidentities", body)
            answer(connection)
        server.send(connection, "POST", POLICIES, policy("admitting", "new"))
        answer(connection)
        has = partial(_has, every, _key(known))
        _until(lambda: sum(has()) == PODS, f"not {PODS} maps have the entry")
        turns = Turns(
            server, [one for one, pods_ in zip(every, has(), strict=True) if pods_]
        )  # not spare ones
        found = []
        for make, _, _ in MADE.values():
            event, first, last = (median(one) for one in turns.measure(make))
            found.append((event, first, last))
        return found


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure each of them, beside the server's own event; a new agent each round."""
    compiled()
    there = [pod(number) for number in range(PODS)]
    found: list[list[tuple[float, float, float]]] = []
    for _ in range(min(rounds, 3)):
        with (
            lab("bench-rules") as made,
            api_server(made, folder, more=there) as settings,
            serving_node(folder, made, 0, *settings) as node,
        ):
            for number in range(PODS):
                pods.add(made, f"p{number}")
            found.append(node.namespaces.run(_measured, folder / "kubeconfig"))
    figures: list[Row | Figure] = []
    for number, (what, (_, soon, late)) in enumerate(MADE.items()):
        event, *held = (Sample(values) for values in zip(*(one[number] for one in found), strict=True))
        for where, sample, aim in zip(("first", "last"), held, (soon, late), strict=True):
            if aim is None:
                continue
            pairs = zip(sample.values, event.values, strict=True)
            added = Sample(tuple(ours - theirs for ours, theirs in pairs))
            figures += [
                Row(f"{what}: to the {where} map", "ms", sample, PEER, event, None, faster=False),
                Figure(f"{what}: what the agent adds to the {where} map", "ms", added, aim),
            ]
    return figures
