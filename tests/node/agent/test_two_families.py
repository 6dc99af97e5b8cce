"""Dual-stack and IPv6-only pods on a node with a real agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hive.lab import agent_process, pods
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab
from tests.support.agents import serving

pytestmark = pytest.mark.node

DUAL = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112")


@contextmanager
def connection(
    client: Namespaces, server: Namespaces, address: str
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from one namespace to an address of another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with inside(server):
        listener = socket.create_server((address, 0), family=family)
    with inside(client):
        calling = socket.socket(family)
    with listener, calling:
        for each in (listener, calling):
            each.settimeout(30)
        calling.connect(listener.getsockname()[:2])
        answering, _ = listener.accept()
        with answering:
            answering.settimeout(30)
            yield calling, answering


def talk(ends: tuple[socket.socket, socket.socket]) -> None:
    """A few bytes each way."""
    for one, other in (ends, ends[::-1]):
        one.sendall(b"hello")
        assert other.recv(16) == b"hello"


def test_pods_of_both_families_talk_and_open_connections_outlive_the_agent(node: Lab) -> None:
    serving(node, *DUAL)
    first, second = pods.add(node, "first"), pods.add(node, "second")
    assert all(pod.ipv6.startswith("fd00:5::") for pod in (first, second))
    with node.open() as host, node.open_pod("first") as one, node.open_pod("second") as two:
        for client in (one, host):
            for address in (second.ipv6, second.ipv4):
                with connection(client, two, address) as ends:
                    talk(ends)
        with connection(one, two, second.ipv6) as ends, connection(host, one, first.ipv6) as others:
            talk(ends)
            agent_process.crash(node)
            talk(ends)
            serving(node, *DUAL)
            talk(ends)
            talk(others)
    for pod in ("first", "second"):
        pods.delete(node, pod)


def test_pods_may_have_ipv6_alone(node: Lab) -> None:
    serving(node, *DUAL, "--enable-ipv4=false")
    answers = []
    for pod in ("first", "second"):
        node.hold_pod(pod)
        answers.append(pods.call(node, pod, "ADD")[0])
    [[_], [address]] = (answer["ips"] for answer in answers)
    with node.open() as host, node.open_pod("first") as one, node.open_pod("second") as two:
        for client in (one, host):
            with connection(client, two, address["address"].partition("/")[0]) as ends:
                talk(ends)
        with connection(two, host, address["gateway"]) as ends:
            talk(ends)
    for pod in ("first", "second"):
        pods.delete(node, pod)
