"""Pods continue to communicate while the agent is down and while it restarts."""

import os
import socket
import threading
import time
from dataclasses import dataclass, field

import pytest

from cells.cluster import host_ip_sync
from cells.cluster.host_ip_sync import HostIPSync
from cells.endpoint import Endpoint, Endpoints, State
from cells.netlink.connection import open_socket
from cells.netlink.namespaces import PodLink
from cells.node import router, sysctl
from cells.node.router import Router
from hive.lab.traffic.flows import udp_socket
from lifecycle import Hive, invoke
from tests.kernel.endpoint.nodes import CELLS, SETTINGS, add_pod, address_of, needed, pods
from tests.support.namespaces import Namespaces, in_node, inside
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

INTERVAL = 0.001


def _synced(_: HostIPSync) -> None:
    """Ask for it."""


def forwarding_agent() -> Hive:
    """All that a packet between two pods needs."""
    extra = (router.cell, sysctl.cell, host_ip_sync.cell)
    return Hive(*CELLS, *extra, invoke(needed, _synced), settings=SETTINGS)


def connect(hive: Hive, number: int, pod: Namespaces) -> Endpoint:
    """Add the pod and configure its end, as ADD does."""
    made = add_pod(hive, number, pod)
    with inside(pod):
        fd = open_socket()
        index = socket.if_nametoindex("eth0")
    try:
        PodLink(fd).configure(index, "eth0", (address_of(made),), hive.get(Router).gateways, 1500)
    finally:
        os.close(fd)
    return made


@dataclass
class Flow:
    """Numbered datagrams, one a millisecond, from one pod to another."""

    source: socket.socket
    sink: socket.socket
    target: tuple[str, int]
    sent: int = 0
    received: set[int] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    all_sent: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Send and receive from now on."""
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Stop sending, receive what is still under way."""
        self.over.set()
        sending, receiving = self.threads
        sending.join()
        self.all_sent.set()
        receiving.join()
        self.source.close()
        self.sink.close()

    def _send(self) -> None:
        due = time.monotonic()
        while not self.over.is_set():
            self.source.sendto(self.sent.to_bytes(4, "little"), self.target)
            self.sent += 1
            due += INTERVAL
            self.over.wait(max(0.0, due - time.monotonic()))

    def _receive(self) -> None:
        self.sink.settimeout(0.2)
        while True:
            try:
                self.received.add(int.from_bytes(self.sink.recv(16), "little"))
            except TimeoutError:
                if self.all_sent.is_set():
                    return


@pytest.mark.usefixtures("in_node")
async def test_a_flow_loses_nothing_over_a_restart() -> None:
    with pods(2) as (one, two):
        async with forwarding_agent().started() as hive:
            connect(hive, 1, one)
            target = str(address_of(connect(hive, 2, two)))
            with inside(one):
                source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with inside(two):
                sink = udp_socket()
            flow = Flow(source, sink, (target, sink.getsockname()[1]))
            flow.begin()
            eventually(lambda: len(flow.received) > 50)
        async with forwarding_agent().started() as hive:
            assert [each.state for each in hive.get(Endpoints).all()] == [State.READY, State.READY]
            seen = len(flow.received)
            eventually(lambda: len(flow.received) > seen + 50)
        flow.end()
    assert set(range(flow.sent)) - flow.received == set()
