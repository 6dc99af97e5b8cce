"""Agents' explanations match real packets: random policies on two nodes with common manifests."""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from urllib.parse import urlencode

import pytest

from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab, exclusive
from hive.lab.traffic.flows import tcp_listener
from tests.support.namespaces import need_root
from tests.support.two_nodes import asked
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"explained-{os.getpid()}"
PORTS = (8080, 8081)
VIP = "10.96.0.10"
ROUNDS = 3
PODS = ("pod-1-1", "pod-1-2", "pod-2-1", "pod-2-2")
Object = dict[str, Any]
Target = tuple[str, int]


@pytest.fixture(params=[(), ("--routing-mode=tunnel",)], ids=["native", "tunnel"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes with two pods each, and no store."""
    need_root()
    found = Cluster(NAME)
    try:
        with exclusive():
            for lab in found.make(2, 1):
                agent_process.start(lab, *found.settings(request.param))
            for lab in found.nodes():
                pid = agent_process.running(lab)
                assert pid is not None
                agent_process.wait_ready(lab, pid)
            for pod in PODS:
                found.add_pod(found.node(int(pod[4])), pod)
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())


def explained(lab: Lab, source: str, destination: str, port: int) -> Object:
    query = urlencode({"source": f"default/{source}", "destination": destination, "port": str(port)})
    found: Object = asked(lab, f"/hive/policy/explain?{query}")
    return found


def policies(chance: random.Random, name: str) -> list[Object]:
    """Some of everything: closed pods, labels, ports, denies, in both directions."""
    found = []
    for number in range(chance.randint(2, 4)):
        spec: Object = {"endpointSelector": selector(chance)}
        for direction, way in chance.sample((("ingress", "from"), ("egress", "to")), chance.randint(1, 2)):
            spec[direction] = [entry(chance, way) for _ in range(chance.randint(1, 2))]
            if chance.random() < 0.3:
                spec[f"{direction}Deny"] = [entry(chance, way)]
        metadata = {"name": f"{name}-{number}", "namespace": "default"}
        kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy"}
        found.append({**kind, "metadata": metadata, "spec": spec})
    return found


def selector(chance: random.Random) -> Object:
    if chance.random() < 0.2:
        return {}
    some = chance.sample(PODS, chance.randint(1, 3))
    return {"matchExpressions": [{"key": "app", "operator": "In", "values": some}]}


def entry(chance: random.Random, way: str) -> Object:
    made: Object = {f"{way}Endpoints": [selector(chance)]}
    if chance.random() < 0.5:
        made["toPorts"] = [{"ports": [{"port": str(chance.choice(PORTS)), "protocol": "TCP"}]}]
    return made


def enforced(lab: Lab, names: set[str]) -> bool:
    rows = asked(lab, "/statedb/dump/policies")["policies"]
    assert all(row["obj"]["valid"] for row in rows), rows
    revision = asked(lab, "/v1/policy")["revision"]
    realized = [
        one["status"]["policy"]["realized"].get("policy-revision", 0) for one in asked(lab, "/v1/endpoint")
    ]
    return {row["obj"]["name"] for row in rows} == names and min(realized) >= revision


def reached(targets: list[Target], within: float) -> set[Target]:
    """Those of the targets that answer a connection, all tried at once."""
    with ExitStack() as stack:
        waiting = {}
        for target in targets:
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(target)
            waiting[client] = target
        found, deadline = set(), time.monotonic() + within
        while waiting and (left := deadline - time.monotonic()) > 0:
            for client in select.select([], list(waiting), [], left)[1]:
                target = waiting.pop(client)
                if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.add(target)
        return found


def service(ready: dict[str, str]) -> list[Object]:
    """A service of all pods, and its slice."""
    metadata: Object = {"name": "all", "namespace": "default"}
    port = {"name": "web", "port": 80, "targetPort": PORTS[0], "protocol": "TCP"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": VIP, "ports": [port]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": {"kubernetes.io/service-name": "all"}},
            "addressType": "IPv4",
            "ports": [{"name": "web", "port": PORTS[0], "protocol": "TCP"}],
            "endpoints": [{"addresses": [address]} for address in ready.values()],
        },
    ]


def test_packets_do_what_is_explained(cluster: Cluster) -> None:
    chance = random.Random(NAME)  # noqa: S311  # no secret
    addresses = {
        one["metadata"]["name"]: one["status"]["podIP"]
        for one, _ in cluster.manifests.objects()
        if one["kind"] == "Pod"
    }
    cluster.manifests.write("service", service(addresses))
    here = {pod: cluster.node(int(pod[4])) for pod in PODS}
    with ExitStack() as stack:
        for pod, port in product(PODS, PORTS):
            with inside(stack.enter_context(here[pod].open_pod(pod))):
                stack.enter_context(tcp_listener(port=port))
        for number in range(ROUNDS):
            made = policies(chance, f"round-{number}")
            cluster.manifests.write("policies", made)
            names = {one["metadata"]["name"] for one in made}
            for lab in cluster.nodes():
                eventually(partial(enforced, lab, names))
            for source in PODS:
                compare(here, source, addresses, made)


def compare(here: dict[str, Lab], source: str, addresses: dict[str, str], made: list[Object]) -> None:
    """Connections of one pod, as its node and the others' explain them, and as they go."""
    others = {pod: address for pod, address in addresses.items() if pod != source}
    targets = [(address, port) for address, port in product(others.values(), PORTS)]
    with here[source].open_pod(source) as pod:
        found = pod.run(reached, [*targets, (VIP, 80)], 2.0)
    names = {address: name for name, address in others.items()}
    allowed = {}
    for address, port in targets:
        name = names[address]
        verdicts = {
            explained(lab, source, text, port)["verdict"]
            for lab in {here[source], here[name]}
            for text in (address, f"default/{name}")
        }
        allowed[name, port] = "denied" not in verdicts
        if here[source] == here[name]:
            assert "elsewhere" not in verdicts
        assert ((address, port) in found) == allowed[name, port], (source, name, port, verdicts, made)
    ways = explained(here[source], source, "default/all", 80)["ways"]
    assert {way["destination"] for way in ways} == {f"default/{name}" for name in addresses}
    served = [allowed[name, PORTS[0]] for name in others]
    if all(served):
        assert (VIP, 80) in found, (source, made)
