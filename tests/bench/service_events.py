"""One EndpointSlice written at an API server: until the last entry is in the map of a real agent.

Time counts from the request that writes the object, so it holds the server's work, its event, the agent's
reflector, tables and reconciler. The server is the tests' own; how long its event takes to a client that only
reads lines is measured in turn with it, and what the agent adds is the difference of the medians. The server
may write to the agent's watch before it writes to that client's: then the agent's first work is hidden in the
server's. Both depend on what else the machine does; the agent's processor time for a change does so less.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from cells.maps.map import open_map
from tests.bench.nodes import lab, serving_node
from tests.bench.service_rules import BACKENDS, PORT, ServiceLoad, vip
from tests.bench.startup import api_server, compiled
from tests.bench.stats import Figure, Row, Sample

SERVICES, CHANGES = 200, 25
FIRST = 300
"""The first addresses are those of the cluster's own services."""
WITHIN = 60.0
GLOBALS = Path("/sys/fs/bpf/tc/globals")
SLICES = "/apis/discovery.k8s.io/v1"
GRAIN = 50e-6
"""Seconds between two reads of the map."""


class Server:
    """The API server, from the node's network."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._address = cluster["server"].removeprefix("https://")
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._headers = {"Authorization": f"Bearer {user['token']}", "Content-Type": "application/json"}

    def connect(self) -> http.client.HTTPSConnection:
        """Open a connection of its own."""
        return http.client.HTTPSConnection(self._address, context=self._tls, timeout=WITHIN)

    def send(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> None:
        """Send a request; the caller reads the response."""
        connection.request(method, path, json.dumps(body) if body else None, self._headers)


def answer(connection: http.client.HTTPConnection) -> Any:
    """Return the object in the response. Raises RuntimeError if the server refuses."""
    response = connection.getresponse()
    text = response.read()
    if response.status >= 300:
        raise RuntimeError(f"the API server answers {response.status}: {text[:200]!r}")
    return json.loads(text)


def service(number: int) -> Any:
    """Return a service with one port."""
    ports = [{"name": "http", "port": PORT, "protocol": "TCP"}]
    spec = {
        "type": "ClusterIP",
        "clusterIP": vip(FIRST + number),
        "clusterIPs": [vip(FIRST + number)],
        "ports": ports,
    }
    metadata = {"name": f"s{number}", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def slice_of(number: int, addresses: list[str], port: int) -> Any:
    """Return its slice."""
    labels = {"kubernetes.io/service-name": f"s{number}"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"s{number}-1", "namespace": "default", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ip], "conditions": {"ready": True}} for ip in addresses],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


@contextmanager
def watching(server: Server) -> Iterator[http.client.HTTPResponse]:
    """Watch events of slices, a line each, from now on."""
    with closing(server.connect()) as connection:
        server.send(connection, "GET", f"{SLICES}/endpointslices")
        version = answer(connection)["metadata"]["resourceVersion"]
        path = f"{SLICES}/endpointslices?watch=true&resourceVersion={version}"
        server.send(connection, "GET", path)
        yield connection.getresponse()


def fill(server: Server, connection: http.client.HTTPConnection) -> None:
    """Create the services, and wait until the agent has them in its maps."""
    load = ServiceLoad(SERVICES)
    for number in range(SERVICES):
        own = load.backends(number)
        server.send(connection, "POST", "/api/v1/namespaces/default/services", service(number))
        answer(connection)
        body = slice_of(number, [ip for ip, _ in own], own[0][1])
        server.send(connection, "POST", f"{SLICES}/namespaces/default/endpointslices", body)
        answer(connection)
    wanted = {(IPv4Address(vip(FIRST + number)).packed, BACKENDS) for number in range(SERVICES)}
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        with open_map(GLOBALS / "cilium_lb4_services_v2") as table:
            masters = {(k[:4], int.from_bytes(v[4:6], "little")) for k, v in table.items() if not any(k[6:8])}
        if wanted <= masters:
            return
        time.sleep(0.05)
    raise RuntimeError(f"after {WITHIN:.0f} s the agent has not all of {SERVICES} services in its maps")


def changes(server: Server) -> tuple[list[float], list[float]]:
    """Return the ms from writes of one slice to the server's event, and to the map, in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    number = SERVICES // 2
    own = ServiceLoad(SERVICES).backends(number)
    others, port = [ip for ip, _ in own[1:]], own[0][1]
    path = f"{SLICES}/namespaces/default/endpointslices/s{number}-1"
    with (
        closing(server.connect()) as connection,
        watching(server) as events,
        open_map(GLOBALS / "cilium_lb4_backends_v3") as table,
    ):
        before = own[0][0]
        for turn in range(2 * CHANGES):
            after = f"12.0.{turn}.1"
            (goes,) = [k for k, v in table.items() if v[:4] == IPv4Address(before).packed]
            began = time.perf_counter()
            server.send(connection, "PUT", path, slice_of(number, [after, *others], port))
            if turn % 2:
                while table.lookup(goes) is not None:  # deleted last, after the slot leads elsewhere
                    if time.perf_counter() - began > WITHIN:
                        raise RuntimeError(f"backend {before} is still in the map after {WITHIN:.0f} s")
                    time.sleep(GRAIN)
            else:
                _read_event(events, after)
            found[turn % 2].append(1000 * (time.perf_counter() - began))
            answer(connection)
            if turn % 2:
                _read_event(events, after)
            else:
                while table.lookup(goes) is not None:
                    time.sleep(GRAIN)
            before = after
    return found


def _read_event(events: http.client.HTTPResponse, address: str) -> None:
    while line := events.readline():
        if f'"{address}"'.encode() in line:
            return
    raise RuntimeError("the watch ended")


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure one changed EndpointSlice, beside the server's own event; a new agent each round."""
    compiled()
    seen, held, spent = [], [], []
    for _ in range(min(rounds, 3)):
        with (
            lab("bench-slices") as made,
            api_server(made, folder) as settings,
            serving_node(folder, made, 0, *settings) as agent,
            made.open() as node,
        ):
            assert agent.agent is not None
            to_watcher, to_map, on_cpu = node.run(_measured, folder / "kubeconfig", agent.agent)
            spent.append(on_cpu)
            seen.append(median(to_watcher))
            held.append(median(to_map))
    event, entry = Sample(tuple(seen)), Sample(tuple(held))
    added = Sample(tuple(ours - theirs for ours, theirs in zip(held, seen, strict=True)))
    what = f"an EndpointSlice written at an API server, {SERVICES} services x {BACKENDS}"
    return [
        Row(
            f"{what}: to the last map entry",
            "ms",
            entry,
            "a client that reads lines",
            event,
            None,
            faster=False,
        ),
        Figure(f"{what}: what the agent adds", "ms", added, 2),
        Figure(f"{what}: the agent's processor time", "ms", Sample(tuple(spent))),
    ]


def _measured(kubeconfig: Path, agent: int) -> tuple[list[float], list[float], float]:
    server = Server(kubeconfig)
    with closing(server.connect()) as connection:
        fill(server, connection)
    before = _on_cpu(agent)
    to_watcher, to_map = changes(server)
    return to_watcher, to_map, (_on_cpu(agent) - before) / (2 * CHANGES)


def _on_cpu(pid: int) -> float:
    """Return the ms of processor time of a process's threads."""
    texts = [each.read_text(encoding="ascii") for each in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(text.split()[0]) for text in texts) / 1e6
