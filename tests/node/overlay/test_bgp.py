"""Traffic through a router that learns pod routes by BGP alone, while its peers die and restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from cells.base.addresses import Family
from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.cluster.router import NODES_AS, ROUTER_AS
from hive.lab.namespaces import inside
from hive.lab.node import Lab, exclusive, processes
from hive.lab.traffic.flows import Received, Sent, family_of, udp_receiver, udp_sender, udp_socket
from hive.main import cli
from tests.support.namespaces import need_root
from tests.support.two_nodes import asked
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"bgp-{os.getpid()}"
WITH_BIRD = {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
RATE = 1000.0
"""Packets a second."""


@dataclass
class Crossing:
    """Packets from the client outside to the pod of the second node, by the router."""

    sent: Sent | None = None
    received: Received | None = None

    def check(self) -> None:
        """Every packet has arrived, once."""
        assert self.sent is not None
        assert self.received is not None
        assert self.sent.packets > RATE / 2
        assert (self.sent.errors, self.received.packets) == (0, self.sent.packets), self
        assert self.received.duplicates == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, and a router beside them that has learnt the ways to both families' pods."""
    need_root()
    found = Cluster(NAME)
    up = ["lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--pods", "1", "--bgp", "--enable-ipv6=true"]
    try:
        done = CliRunner().invoke(cli, up, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        for family in Family:
            eventually(partial(knows_both, found, family), within=60)
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())


def ip_route(family: Family, protocol: str) -> list[str]:
    command = ["ip", f"-{family[-1]}", "route", "show", "proto", protocol]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def learnt(cluster: Cluster, family: Family = Family.IPV4, protocol: str = "bgp") -> list[str]:
    """Prefixes that the router has of the nodes, in its kernel."""
    with cluster.network.open() as router:
        return router.run(ip_route, family, protocol)


def knows_both(cluster: Cluster, family: Family, protocol: str = "bgp") -> bool:
    ranges = {cluster.place(lab).pod_cidrs[family is Family.IPV6] for lab in cluster.nodes()}
    return set(learnt(cluster, family, protocol)) == ranges


def session(cluster: Cluster, number: int, family: Family = Family.IPV4) -> tuple[str, int]:
    """State of the router's session with a node, and how often it was established."""
    place = cluster.place(cluster.nodes()[number - 1])
    command = ["vtysh", "--vty_socket", str(cluster.router.directory), "-c", "show bgp neighbors json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)[place.ipv4 if family is Family.IPV4 else place.ipv6]
    return found["bgpState"], found["connectionsEstablished"]


def is_session(cluster: Cluster, number: int, family: Family, count: int) -> bool:
    return session(cluster, number, family) == ("Established", count)


def speaker(lab: Lab) -> int:
    """The pid of the node's gobgpd; 0 while there is none."""
    names = {pid: comm(pid) for pid in processes(lab)}
    return next((pid for pid, name in names.items() if name == "gobgpd"), 0)


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def crossing(cluster: Cluster, family: Family = Family.IPV4) -> Iterator[Crossing]:
    """Packets cross for as long as it lasts."""
    target = cluster.nodes()[1]
    (pod,) = (
        one["status"]
        for one in asked(target, "/v1/endpoint")
        if one["status"]["external-identifiers"].get("pod-name")
    )
    address = pod["networking"]["addressing"][0][family]
    found = Crossing()
    with cluster.network.open() as outside, target.open_pod("pod-2-1") as inner:
        with inside(inner):
            sock = udp_socket(family_of(address))
        with sock:
            receiver: Child[Received] = inner.start(udp_receiver, sock)
            sender: Child[Sent] = outside.start(udp_sender, (address, sock.getsockname()[1]), RATE)
            yield found
            found.sent = sender.finish(within=60)
            found.received = receiver.finish(within=60)


def restart(lab: Lab) -> None:
    """Kill the agent of the node, and start another."""
    agent_process.crash(lab)
    pid = agent_process.start(lab, *agent_process.last_settings(lab))
    agent_process.wait_ready(lab, pid)


def test_no_packet_is_lost_when_the_agent_is_killed(cluster: Cluster) -> None:
    lab = cluster.nodes()[1]
    before, runs = session(cluster, 2), speaker(lab)
    with crossing(cluster) as packets:
        restart(lab)
        eventually(lambda: learnt(cluster))
    packets.check()
    assert session(cluster, 2) == before, "the session is gobgpd's"
    assert speaker(lab) == runs


def test_no_packet_is_lost_when_the_speaker_is_killed(cluster: Cluster) -> None:
    """The router keeps the routes of a session that ends without a word: RFC 4724, graceful restart."""
    lab = cluster.nodes()[1]
    _, count = session(cluster, 2)
    with crossing(cluster, Family.IPV6) as packets:
        os.kill(speaker(lab), signal.SIGKILL)
        for family in Family:
            eventually(partial(is_session, cluster, 2, family, count + 1), within=60)
            eventually(partial(knows_both, cluster, family))
    packets.check()


def test_no_packet_is_lost_when_both_are_killed(cluster: Cluster) -> None:
    lab = cluster.nodes()[1]
    _, count = session(cluster, 2)
    with crossing(cluster) as packets:
        agent_process.crash(lab)
        os.kill(speaker(lab), signal.SIGKILL)
        restart(lab)
        eventually(lambda: session(cluster, 2) == ("Established", count + 1), within=60)
    packets.check()


def test_a_node_that_is_another_s_neighbour_keeps_its_session(cluster: Cluster) -> None:
    assert session(cluster, 1) == ("Established", 1)


class Bird:
    """BIRD in place of the lab's router."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    @contextmanager
    def running(self) -> Iterator[None]:
        """It takes the nodes' sessions, and writes their routes into the network's."""
        nodes = [self._cluster.place(lab) for lab in self._cluster.nodes()]
        router = nodes[0].routers[0]
        sessions = (
            f"protocol bgp node{each.number} {{ local {router} as {ROUTER_AS}; neighbor {each.ipv4} as"
            f" {NODES_AS}; passive on; graceful restart on; ipv4 {{ import all; export none; }}; }}"
            for each in nodes
        )
        text = [f"router id {router};", "protocol device {}"]
        text += ["protocol kernel { ipv4 { import none; export all; }; }", *sessions]
        (self._folder / "bird.conf").write_text("\n".join(text))
        command = ["bird", "-f", "-c", "bird.conf", "-s", "ctl", "-P", "pid"]
        with self._cluster.network.open() as network:
            process = network.popen(command, cwd=self._folder, env=WITH_BIRD)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)

    def since(self, number: int) -> str:
        """When its session with a node was established; nothing while it is not."""
        command = ["birdc", "-r", "-s", "ctl", "show", "protocols", f"node{number}"]
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, check=False, env=WITH_BIRD
        )
        fields = done.stdout.splitlines()[-1].split() if done.stdout else []
        return fields[4] if fields[-1:] == ["Established"] else ""


def test_bird_keeps_routes_as_well(cluster: Cluster, tmp_path: Path) -> None:
    """Last: it takes the place of the lab's router."""
    lab, bird = cluster.nodes()[1], Bird(cluster, tmp_path)
    cluster.router.remove()
    with cluster.network.open() as router:
        router.run(flush_routes)
    with bird.running():
        eventually(partial(knows_both, cluster, Family.IPV4, "bird"), within=60)
        first, runs = bird.since(2), speaker(lab)
        with crossing(cluster) as packets:
            restart(lab)
            assert bird.since(2) == first
            agent_process.crash(lab)
            os.kill(runs, signal.SIGKILL)
            restart(lab)
            eventually(lambda: bird.since(2) not in {"", first}, within=60)
            eventually(partial(knows_both, cluster, Family.IPV4, "bird"))
        packets.check()


def flush_routes() -> None:
    """Routes go with the next hops that FRR has made for them (ip-nexthop(8))."""
    subprocess.run(["ip", "nexthop", "flush"], check=True)
