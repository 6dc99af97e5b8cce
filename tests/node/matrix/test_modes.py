"""The agent's features in combinations of its modes: traffic of pods, services, policies and proxies.

Any two modes meet in at least one row, see tests/support/modes.py. Rows that the agent rejects are replaced
by rows that cover every other pair.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cells.cluster.identity.numbers import HEALTH
from cells.proxy.envoy import end_envoy
from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.cluster import Cluster
from hive.lab.demo.upgrade import upgrade
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import ROOT, Lab, LabError, exclusive
from hive.lab.traffic.flows import (
    family_of,
    tcp_listener,
    tcp_receiver,
    tcp_sender,
    udp_receiver,
    udp_sender,
    udp_socket,
)
from tests.node.agent.node_ports import FAR_PORT, NODE_PORT, TARGET, service, slices
from tests.support.compiled import another_build
from tests.support.dns import Looked, dnsmasq, lookup
from tests.support.fqdn_scenario import POLICY as NAMES
from tests.support.fqdn_scenario import REFUSED, WEB
from tests.support.modes import DIMENSIONS, Mode, chosen
from tests.support.namespaces import need_root
from tests.support.pairwise import without
from tests.support.requests import PORT, PUBLIC, Answer, answering, ask_http, of_entities, policy
from tests.support.sockets import seen_by_server
from tests.support.two_nodes import OUTSIDE, asked
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

SERVERS = {"server": NODE_PORT, "far": FAR_PORT}
"""Web servers, one of which is on the other node, and their node ports."""
EXPECTED_REFUSAL = "ended instead of serving"


def cluster_ip(name: str, version: int) -> str:
    """The address of a server's service."""
    number = SERVERS[name] % 100
    return f"10.96.0.{number}" if version == 4 else f"fd00:96::{number}"


@pytest.fixture(scope="module")
def second_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same datapath, as a generation of its own."""
    return another_build(tmp_path_factory.mktemp("datapath"))


@dataclass
class Place:
    """A client, a web server and a DNS server on one node, a server on another, and the world outside."""

    mode: Mode
    cluster: Cluster
    attached: dict[str, pods.Attached]
    inside: dict[str, Namespaces]
    outside: Namespaces

    @property
    def nodes(self) -> tuple[Lab, Lab]:
        """That of the client, and the other."""
        first, second = self.cluster.nodes()
        return first, second

    def node(self, version: int, number: int = 1) -> str:
        """The address of a node."""
        place = self.cluster.network.place(number)
        return place.ipv4 if version == 4 else place.ipv6

    def address(self, of: str, version: int) -> str:
        """The address of a pod."""
        return self.attached[of].ipv4 if version == 4 else self.attached[of].ipv6

    def health(self, lab: Lab) -> list[str]:
        """The addresses of a node's health endpoint, once it is there."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [one for one in asked(lab, "/v1/endpoint") if _identity(one) == HEALTH]
            return bool(found)

        eventually(there)
        (pair,) = found[0]["status"]["networking"]["addressing"]
        return [pair[family] for family in ("ipv4", "ipv6") if pair.get(family)]

    def get(self, address: str, path: str = "/public/1", port: int = PORT, by: str = "client") -> Answer:
        """The client asks, or another pod."""
        return self.inside[by].run(partial(ask_http, address, path, port=port))

    def until(
        self, status: int, address: str, path: str = "/public/1", port: int = PORT, by: str = "client"
    ) -> None:
        """Wait until it gets such an answer."""
        eventually(lambda: self.get(address, path, port, by).status == status)

    def get_from_outside(self, version: int, port: int, path: str = "/public/1") -> Answer:
        """The client outside asks the client's node."""
        return self.outside.run(partial(ask_http, self.node(version), path, port=port))

    def until_reached(self, address: str, *, reached: bool) -> None:
        """Wait until the client may connect there, or may not any more."""
        eventually(lambda: self.inside["client"].run(reaches, address) is reached)

    def rule(self, *objects: dict[str, Any]) -> None:
        self.cluster.manifests.write("policy", objects)


def _identity(endpoint: dict[str, Any]) -> int:
    number: int = (endpoint["status"].get("identity") or {}).get("id", 0)
    return number


def reaches(address: str, port: int = PORT) -> bool:
    """Whether a connection comes about, within a time that has room for one that is sent again."""
    try:
        socket.create_connection((address, port), timeout=1.5).close()
    except OSError:
        return False
    return True


@contextmanager
def placed(mode: Mode, cluster: Cluster) -> Iterator[Place]:
    """With agents in that mode. Raises LabError where they refuse it."""
    settings = cluster.settings(mode.settings)
    started = [(lab, agent_process.start(lab, *settings)) for lab in cluster.nodes()]
    try:
        for lab, pid in started:
            agent_process.wait_ready(lab, pid)
        first, second = cluster.nodes()
        where = {"server": first, "dns": first, "client": first, "far": second}
        attached = {name: cluster.add_pod(lab, name) for name, lab in where.items()}
        records = [f"{WEB}/{OUTSIDE[version]}" for version in mode.versions]
        with ExitStack() as stack:
            opened = {name: stack.enter_context(lab.open_pod(name)) for name, lab in where.items()}
            outside = stack.enter_context(cluster.network.open())
            for server in (opened["server"], opened["far"], outside):
                stack.enter_context(answering(server))
            stack.enter_context(dnsmasq(opened["dns"], *records))
            yield Place(mode, cluster, attached, opened, outside)
    finally:
        for lab in cluster.nodes():
            agent_process.crash(lab)
            with lab.open() as host:
                host.run(end_envoy, Path("/var/run/cilium"))


def pods_and_services(place: Place) -> None:
    """From pod to pod, by a service's address and from outside by a node port, on both nodes."""
    ends = {name: {v: place.address(name, v) for v in place.mode.versions} for name in SERVERS}
    text = "".join(service(name, port) + slices(name, ends[name]) for name, port in SERVERS.items())
    place.cluster.manifests.copy("services.yaml", text)
    for version in place.mode.versions:
        own = place.address("client", version)
        for name, port in SERVERS.items():
            for address in (place.address(name, version), cluster_ip(name, version)):
                place.until(200, address)
                assert place.get(address) == (200, own), f"{name} sees the pod, {address}"
            place.until(200, place.node(version), port=port)
            eventually(partial(_answers, place, 200, version, port))
        assert place.get_from_outside(version, NODE_PORT) == (200, OUTSIDE[version])
        far = place.node(version), FAR_PORT
        by_tcp = place.get_from_outside(version, FAR_PORT).body
        assert (by_tcp == OUTSIDE[version]) is place.mode.seen_behind("tcp"), f"it saw {by_tcp}"
        datagrams = seen_by_server(place.outside, place.inside["far"], version, ("", TARGET), far, 1000)
        assert (datagrams == OUTSIDE[version]) is place.mode.seen_behind("udp"), f"it saw {datagrams}"


def health_endpoints(place: Place) -> None:
    """Each node reaches its own and the other's, as it has to for its probes."""
    found = [place.health(lab) for lab in place.nodes]
    assert len({text for texts in found for text in texts}) == 2 * len(place.mode.versions)
    for lab in place.nodes:
        with lab.open() as node:
            for address in (text for texts in found for text in texts):
                eventually(lambda address=address, node=node: node.run(reaches, address, 4240))  # type: ignore[misc]


def world_outside(place: Place) -> None:
    """Servers outside see the node where pods are masqueraded, else the pod."""
    for version in place.mode.versions:
        for number, name in enumerate(("client", "far"), 1):
            own = place.address(name, version)
            seen = place.node(version, number) if place.mode.masquerades else own
            place.until(200, OUTSIDE[version], by=name)
            assert place.get(OUTSIDE[version], by=name) == (200, seen)


def of_servers(allowed: dict[str, Any]) -> dict[str, Any]:
    """The same policy for the server of the other node, too."""
    both = {"matchExpressions": [{"key": "app", "operator": "In", "values": list(SERVERS)}]}
    spec = allowed["spec"]
    if "ingress" in spec:
        spec["endpointSelector"] = both
    else:
        spec["egress"][0]["toEndpoints"] = [both]
    return allowed


def labels(place: Place) -> None:
    """Who is not allowed does not get in, and who is does."""
    closed_to_all = of_servers(policy())
    closed_to_all["spec"]["ingress"][0]["fromEndpoints"] = [{"matchLabels": {"app": "nobody"}}]
    for reached in (False, True):
        place.rule(of_servers(policy()) if reached else closed_to_all)
        for version in place.mode.versions:
            for name in SERVERS:
                place.until_reached(place.address(name, version), reached=reached)


def requests(place: Place) -> None:
    """Envoy lets through what rules of the servers' or of the client's allow, and refuses the rest."""
    for direction in ("ingress", "egress"):
        place.rule()
        for version, name in product(place.mode.versions, SERVERS):
            # Else Envoy may still have what the next rules do not give it.
            place.until(200, place.address(name, version), "/secret")
        place.rule(of_servers(policy(PUBLIC, direction=direction)))
        for version, name in product(place.mode.versions, SERVERS):
            own = place.address("client", version)
            for address in (place.address(name, version), cluster_ip(name, version)):
                place.until(403, address, "/secret")
                for _ in range(3):
                    assert place.get(address) == (200, own), f"{direction}, {name}, {address}"


def requests_and_the_world(place: Place) -> None:
    """The same for servers outside, and for clients outside, by node ports."""
    place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
    for version in place.mode.versions:
        seen = place.node(version) if place.mode.masquerades else place.address("client", version)
        place.until(403, OUTSIDE[version], "/secret")
        assert place.get(OUTSIDE[version]) == (200, seen)
    place.rule(of_entities(of_servers(policy(PUBLIC)), "all"))
    for version, (name, port) in product(place.mode.versions, SERVERS.items()):
        eventually(partial(_answers, place, 403, version, port, "/secret"))
        for _ in range(3):
            assert place.get_from_outside(version, port).status == 200, f"from outside, to {name}"


def _answers(place: Place, status: int, version: int, port: int, path: str = "/public/1") -> bool:
    return place.get_from_outside(version, port, path).status == status


def _looked_up(place: Place, server: str, name: str, version: int, *, tcp: bool) -> Looked:
    asking = partial(lookup, server, name, tcp=tcp, version=version)
    return place.inside["client"].run(asking)


def _refused(place: Place, server: str, version: int, *, tcp: bool) -> bool:
    return _looked_up(place, server, "other.example.com", version, tcp=tcp).code == REFUSED


def names(place: Place) -> None:
    """A pod asks for names that its rules allow, and goes where they are."""
    here = place.inside["client"]
    place.rule(NAMES)
    for version in place.mode.versions:
        server = place.address("dns", version)
        for tcp in (False, True):
            eventually(partial(_refused, place, server, version, tcp=tcp))
            assert _looked_up(place, server, WEB, version, tcp=tcp).addresses == (OUTSIDE[version],)
        assert here.run(reaches, OUTSIDE[version]), "at once: the answer came after the map entries"
        assert not here.run(reaches, place.address("far", version)), "and nowhere else"


def generations(place: Place, build: Path) -> None:
    """The agents are killed, and others with another datapath take over: nothing is lost, rules stay."""
    place.rule(policy(PUBLIC), {**policy(), "metadata": {"name": "any", "namespace": "default"}, "spec": ANY})
    version = place.mode.versions[-1]
    server, far = place.address("server", version), place.address("far", version)
    place.until(403, server, "/secret")
    place.until(200, far, "/secret")
    first, second = place.nodes
    settings = place.cluster.settings(place.mode.settings)
    asking = place.inside["client"].start(_asked_on, server)
    try:
        with unbroken(place, "client", "far"), unbroken(place, "far", "client"):
            agent_process.crash(second)
            other = agent_process.start(second, f"--datapath-object={build}", *settings)
            seen = upgrade(first, place.attached["client"], place.attached["dns"], build, settings)
            agent_process.wait_ready(second, other)
        asked = asking.finish(within=60)
    finally:
        asking.kill()
    assert len(asked) > 20
    assert set(asked) == {"200"}, "requests pass Envoy all the while"
    assert (seen.sent.errors, seen.lost, seen.received.duplicates) == (0, 0, 0)
    assert seen.read.continuous
    assert seen.read.octets == seen.written.octets > 0
    assert set(seen.after.entries.values()).isdisjoint(seen.before.entries.values())
    place.until(200, server)
    assert place.get(server, "/secret").status == 403


@contextmanager
def unbroken(place: Place, source: str, target: str) -> Iterator[None]:
    """Datagrams and a connection go from one node to the other for one block: nothing is lost."""
    address = place.address(target, place.mode.versions[-1])
    sending, receiving = place.inside[source], place.inside[target]
    with inside(receiving):
        datagrams, listener = udp_socket(family_of(address)), tcp_listener(family_of(address))
    with datagrams, listener:
        received, read = receiving.start(udp_receiver, datagrams), receiving.start(tcp_receiver, listener)
        sent = sending.start(udp_sender, (address, datagrams.getsockname()[1]), 200.0)
        written = sending.start(tcp_sender, (address, listener.getsockname()[1]))
        try:
            yield
            packets, octets = sent.finish(within=30), written.finish(within=30)
            arrived, stream = received.finish(within=30), read.finish(within=30)
        finally:
            for child in (sent, written, received, read):
                child.kill()
    between = f"from {source} to {target}"
    assert (packets.errors, arrived.packets, arrived.duplicates) == (0, packets.packets, 0), between
    assert stream.continuous, between
    assert stream.octets == octets.octets > 0, between


def _asked_on(stop: Stop, server: str) -> list[str]:
    """What each of many requests was answered, or why it was not."""
    found = []
    while not stop.wait(0.02):
        try:
            found.append(str(ask_http(server, "/public/1").status))
        except OSError as error:
            found.append(str(error))
    return found


ANY: dict[str, Any] = {
    "endpointSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["dns", "far"]}]},
    "ingress": [{"fromEndpoints": [{"matchLabels": {"app": "client"}}]}],
}


def tried(mode: Mode, cluster: Cluster, build: Path) -> None:
    """All of it. Raises LabError where the agents refuse the mode."""
    with placed(mode, cluster) as place:
        steps: list[Callable[[Place], None]] = [health_endpoints, pods_and_services, world_outside, labels]
        steps += [requests, requests_and_the_world, names]
        for step in steps:
            place.rule()
            step(place)
        generations(place, build)


@contextmanager
def made(name: str) -> Iterator[Cluster]:
    """Two nodes, removed afterwards."""
    cluster = Cluster(name)
    try:
        with exclusive():
            cluster.make(2, 1)
        yield cluster
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
    assert not list(ROOT.glob(f"{name}*"))


def accepted(mode: Mode, build: Path, known: set[str]) -> None:
    """Try the mode; where agents refuse it, those that differ in one of the settings it names."""
    if str(mode) in known:
        return
    known.add(str(mode))
    try:
        with made(f"matrix-{os.getpid()}") as cluster:
            tried(mode, cluster, build)
    except LabError as error:
        if EXPECTED_REFUSAL not in str(error):
            raise
        refusal = str(error).splitlines()[-1]
        blamed = mode.blamed(refusal)
        if not blamed:
            raise
        for row in without(mode.row, blamed, DIMENSIONS):
            accepted(Mode(row), build, known)
    except BaseException as error:
        error.add_note(f"try again: MODES={mode} .venv/bin/pytest tests/node/matrix")
        raise


@pytest.mark.timeout(1800)  # of a refused mode several are tried
@pytest.mark.parametrize("mode", chosen(), ids=str)
def test_a_mode_keeps_what_an_agent_promises(mode: Mode, second_build: Path) -> None:
    need_root()
    accepted(mode, second_build, set())
