"""Traffic through a router that knows pods by BGP alone, while what announces them dies and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab, exclusive, processes
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from hive.main import cli
from tests.support.namespaces import need_root
from tests.support.two_nodes import asked
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"bgp-{os.getpid()}"
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
    """Two nodes with a pod each, and a router beside them that has learnt the ways to both."""
    need_root()
    found = Cluster(NAME)
    up = ["lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--pods", "1", "--bgp", "--enable-ipv6=false"]
    try:
        done = CliRunner().invoke(cli, up, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        eventually(lambda: len(learnt(found)) == 2, within=60)
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())


def ip_route() -> list[str]:
    command = ["ip", "-4", "route", "show", "proto", "bgp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def learnt(cluster: Cluster) -> list[str]:
    """Prefixes that the router has of the nodes, in its kernel."""
    with cluster.network.open() as router:
        return router.run(ip_route)


def session(cluster: Cluster, number: int) -> tuple[str, int]:
    """State of the router's session with a node, and how often it was established."""
    place = cluster.place(cluster.nodes()[number - 1])
    command = ["vtysh", "--vty_socket", str(cluster.router.directory), "-c", "show bgp neighbors json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)[place.ipv4]
    return found["bgpState"], found["connectionsEstablished"]


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
def crossing(cluster: Cluster) -> Iterator[Crossing]:
    """Packets cross for as long as it lasts."""
    target = cluster.nodes()[1]
    (pod,) = (
        one["status"]
        for one in asked(target, "/v1/endpoint")
        if one["status"]["external-identifiers"].get("pod-name")
    )
    found = Crossing()
    with cluster.network.open() as outside, target.open_pod("pod-2-1") as inner:
        with inside(inner):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = inner.start(udp_receiver, sock)
            address = pod["networking"]["addressing"][0]["ipv4"]
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
    with crossing(cluster) as packets:
        os.kill(speaker(lab), signal.SIGKILL)
        eventually(lambda: session(cluster, 2) == ("Established", count + 1), within=60)
        eventually(lambda: len(learnt(cluster)) == 2)
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
