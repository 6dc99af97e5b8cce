"""What an agent promises, in combinations of its modes: real traffic of pods, services, policies and proxies.

Any two modes meet in at least one row, see tests/support/modes.py. What an agent refuses is left out by its
own refusal: rows in its place keep every other pair.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cells.datapath.build import compile_objects
from cells.proxy.envoy import end_envoy
from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.demo.upgrade import upgrade
from hive.lab.namespaces import Namespaces
from hive.lab.node import Lab, LabError
from tests.node.agent.test_node_port import NODE, NODE_PORT, OUTSIDE, command, give_addresses, service, slices
from tests.node.agent.test_pod_labels import pod, write
from tests.support.agents import made, serving
from tests.support.dns import Looked, dnsmasq, lookup
from tests.support.modes import DIMENSIONS, Mode, chosen
from tests.support.namespaces import need_root
from tests.support.pairwise import without
from tests.support.requests import PORT, PUBLIC, Answer, answering, ask_http, of_entities, policy
from tests.support.town import POLICY as NAMES
from tests.support.town import REFUSED, WEB
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

CLUSTER_IP = {4: f"10.96.0.{NODE_PORT % 100}", 6: f"fd00:96::{NODE_PORT % 100}"}
EXPECTED_REFUSAL = "ended instead of serving"


@pytest.fixture(scope="module")
def second_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same datapath, as a generation of its own."""
    objects = compile_objects(tmp_path_factory.mktemp("datapath"), build_tag="matrix")
    return next(path for path in objects if path.name == "datapath.o")


@dataclass
class Place:
    """A client, a web server and a DNS server as pods, and the world outside."""

    mode: Mode
    node: Lab
    folder: Path
    client: pods.Attached
    server: pods.Attached
    dns: pods.Attached
    here: Namespaces
    outside: Namespaces

    def address(self, of: pods.Attached, version: int) -> str:
        return of.ipv4 if version == 4 else of.ipv6

    def get(self, address: str, path: str = "/public/1", port: int = PORT) -> Answer:
        """The client asks."""
        return self.here.run(partial(ask_http, address, path, port=port))

    def until(self, status: int, address: str, path: str = "/public/1", port: int = PORT) -> None:
        """Wait until the client gets such an answer."""
        eventually(lambda: self.get(address, path, port).status == status)

    def until_reached(self, address: str, *, reached: bool) -> None:
        """Wait until the client may connect there, or may not any more."""
        eventually(lambda: self.here.run(reaches, address) is reached)

    def rule(self, *objects: dict[str, Any]) -> None:
        write(self.folder, "policy", *objects)


def reaches(address: str, port: int = PORT) -> bool:
    """Whether a connection comes about, within a time that has room for one that is sent again."""
    try:
        socket.create_connection((address, port), timeout=1.5).close()
    except OSError:
        return False
    return True


@contextmanager
def placed(mode: Mode, node: Lab, folder: Path) -> Iterator[Place]:
    give_addresses(node)
    write(folder, "pods", *(pod(name, {"app": name}) for name in ("client", "server", "dns")))
    serving(node, f"--manifests-dir={folder}", *mode.settings)
    try:
        server, dns, client = (pods.add(node, name) for name in ("server", "dns", "client"))
        with (
            node.open_pod("server") as there,
            node.open_pod("dns") as names,
            node.open_pod("client") as here,
            node.open_outside() as outside,
            answering(there),
            answering(outside),
            dnsmasq(names, *(f"{WEB}/{OUTSIDE[version]}" for version in mode.versions)),
        ):
            yield Place(mode, node, folder, client, server, dns, here, outside)
    finally:
        agent_process.crash(node)
        with node.open() as host:
            host.run(end_envoy, Path("/var/run/cilium"))


def pods_and_services(place: Place) -> None:
    """From pod to pod, by a service's address and from outside by a node port."""
    backends = {version: place.address(place.server, version) for version in place.mode.versions}
    (place.folder / "near.yaml").write_text(service("near", NODE_PORT) + slices("near", backends))
    for version in place.mode.versions:
        own, server = (place.address(one, version) for one in (place.client, place.server))
        place.until(200, server)
        assert place.get(server) == (200, own), "the server sees the pod"
        place.until(200, CLUSTER_IP[version])
        assert place.get(CLUSTER_IP[version]) == (200, own), "by the service's address"
        place.until(200, NODE[version], port=NODE_PORT)
        from_outside = place.outside.run(partial(ask_http, NODE[version], "/public/1", port=NODE_PORT))
        assert from_outside == (200, OUTSIDE[version]), "the server sees the client, by the node port"


def world_outside(place: Place) -> None:
    """Servers outside see the node where pods are masqueraded, else the pod."""
    for version in place.mode.versions:
        own = place.address(place.client, version)
        place.outside.run(command, f"route add {own} via {NODE[version]}")
        seen = NODE[version] if place.mode.masquerades else own
        place.until(200, OUTSIDE[version])
        assert place.get(OUTSIDE[version]) == (200, seen)


def labels(place: Place) -> None:
    """Who is not allowed does not get in, and who is does."""
    nobody = policy()
    nobody["spec"]["ingress"][0]["fromEndpoints"] = [{"matchLabels": {"app": "nobody"}}]
    for version in place.mode.versions:
        server = place.address(place.server, version)
        place.rule(nobody)
        place.until_reached(server, reached=False)
        place.rule(policy())
        place.until_reached(server, reached=True)


def requests(place: Place) -> None:
    """Envoy lets through what rules of the server's or of the client's allow, and tells the rest so."""
    for direction in ("ingress", "egress"):
        place.rule()
        for version in place.mode.versions:  # else Envoy may still have what the next rules do not give it
            place.until(200, place.address(place.server, version), "/secret")
        place.rule(policy(PUBLIC, direction=direction))
        for version in place.mode.versions:
            own, server = (place.address(one, version) for one in (place.client, place.server))
            for address in (server, CLUSTER_IP[version]):
                place.until(403, address, "/secret")
                for _ in range(3):
                    assert place.get(address) == (200, own), f"{direction}, {address}"
    place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
    for version in place.mode.versions:
        seen = NODE[version] if place.mode.masquerades else place.address(place.client, version)
        place.until(403, OUTSIDE[version], "/secret")
        assert place.get(OUTSIDE[version]) == (200, seen)


def _looked_up(place: Place, server: str, name: str, version: int, *, tcp: bool) -> Looked:
    return place.here.run(partial(lookup, server, name, patience=3.0, tcp=tcp, version=version))


def _refused(place: Place, server: str, version: int, *, tcp: bool) -> bool:
    return _looked_up(place, server, "other.example.com", version, tcp=tcp).code == REFUSED


def names(place: Place) -> None:
    """A pod asks for names that its rules allow, and goes where they are."""
    place.rule(NAMES)
    for version in place.mode.versions:
        server = place.address(place.dns, version)
        for tcp in (False, True):
            eventually(partial(_refused, place, server, version, tcp=tcp))
            assert _looked_up(place, server, WEB, version, tcp=tcp).addresses == (OUTSIDE[version],)
        assert place.here.run(reaches, OUTSIDE[version]), "at once: the answer came after the map entries"
        assert not place.here.run(reaches, place.address(place.server, version)), "and nowhere else"


def generations(place: Place, build: Path) -> None:
    """The agent is killed, and one with another datapath takes over: nothing is lost, rules stay."""
    place.rule(policy(PUBLIC), {**policy(), "metadata": {"name": "udp", "namespace": "default"}, "spec": ANY})
    server = place.address(place.server, place.mode.versions[-1])
    place.until(403, server, "/secret")
    settings = [f"--manifests-dir={place.folder}", *place.mode.settings]
    asking = place.here.start(_asked_on, server)
    try:
        seen = upgrade(place.node, place.client, place.dns, build, settings)
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
    "endpointSelector": {"matchLabels": {"app": "dns"}},
    "ingress": [{"fromEndpoints": [{"matchLabels": {"app": "client"}}]}],
}


def tried(mode: Mode, node: Lab, folder: Path, build: Path) -> None:
    """All of it. Raises LabError where the agent refuses the mode."""
    with placed(mode, node, folder) as place:
        steps: list[Callable[[Place], None]] = [pods_and_services, world_outside, labels, requests, names]
        for step in steps:
            write(folder, "policy")
            step(place)
        generations(place, build)


def accepted(mode: Mode, lab: Lab, folder: Path, build: Path, known: set[str]) -> None:
    """Try the mode; where the agent refuses it, those that differ in one of the settings it names."""
    if str(mode) in known:
        return
    known.add(str(mode))
    (here := folder / str(len(known))).mkdir()
    try:
        with made(lab) as node:
            tried(mode, node, here, build)
    except LabError as error:
        if EXPECTED_REFUSAL not in str(error):
            raise
        refusal = str(error).splitlines()[-1]
        blamed = mode.blamed(refusal)
        if not blamed:
            raise
        for row in without(mode.row, blamed, DIMENSIONS):
            accepted(Mode(row), lab, folder, build, known)
    except BaseException as error:
        error.add_note(f"try again: MODES={mode} .venv/bin/pytest tests/node/matrix")
        raise


@pytest.mark.timeout(1800)  # of a refused mode several are tried
@pytest.mark.parametrize("mode", chosen(), ids=str)
def test_a_mode_keeps_what_an_agent_promises(mode: Mode, tmp_path: Path, second_build: Path) -> None:
    need_root()
    accepted(mode, Lab(f"matrix-{os.getpid()}"), tmp_path, second_build, set())
