"""Pods reach a server behind the node, which knows the node alone."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.support.agents import serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NODE6, OUTSIDE6 = "fd50::10", "fd50::1"
NODE = {4: NODE_ADDRESS, 6: NODE6}
OUTSIDE = {4: OUTSIDE_ADDRESS, 6: OUTSIDE6}
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
PORT = 8080
WITHIN = 10.0
DUAL = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112")
LONGER_THAN_A_PACKET = 5000


def give_ipv6(lab: Lab) -> None:
    """The lab's uplink has IPv4 alone."""
    with lab.open() as node, lab.open_outside() as outside:
        node.run(command, f"address add {NODE6}/64 dev uplink nodad")
        outside.run(command, f"address add {OUTSIDE6}/64 dev node nodad")


def command(text: str) -> None:
    subprocess.run(["ip", *text.split()], check=True)


@contextmanager
def between(lab: Lab, pod: pods.Attached) -> Iterator[tuple[Namespaces, Namespaces]]:
    with lab.open_pod(pod.pod) as calling, lab.open_outside() as outside:
        yield calling, outside


def made(where: Namespaces, version: int, kind: int, protocol: int = 0) -> socket.socket:
    with inside(where):
        found = socket.socket(FAMILY[version], kind, protocol)
    found.settimeout(WITHIN)
    return found


Addresses = Mapping[int, str]
"""By family."""


def seen_by_tcp_server(lab: Lab, pod: pods.Attached, version: int, to: Addresses = OUTSIDE) -> str:
    """Have the pod send to a server outside and receive the echo; the address that the server saw."""
    with (
        between(lab, pod) as (calling, outside),
        made(outside, version, socket.SOCK_STREAM) as listener,
        made(calling, version, socket.SOCK_STREAM) as client,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((to[version], PORT))
        listener.listen()
        client.connect((to[version], PORT))
        connection, peer = listener.accept()
        with connection:
            connection.settimeout(WITHIN)
            client.sendall(b"question")
            connection.sendall(connection.recv(100))
            assert client.recv(100) == b"question"
        return str(peer[0])


def seen_by_udp_server(lab: Lab, pod: pods.Attached, version: int, size: int, to: Addresses = OUTSIDE) -> str:
    """The same by a datagram of that many bytes."""
    with (
        between(lab, pod) as (calling, outside),
        made(outside, version, socket.SOCK_DGRAM) as server,
        made(calling, version, socket.SOCK_DGRAM) as client,
    ):
        server.bind((to[version], PORT))
        client.connect((to[version], PORT))
        question = os.urandom(size)
        client.send(question)
        heard, peer = server.recvfrom(size + 1)
        assert heard == question
        server.sendto(heard[::-1], peer)
        assert client.recv(size + 1) == question[::-1]
        return str(peer[0])


def echoed(lab: Lab, pod: pods.Attached, version: int, to: Addresses = OUTSIDE) -> bool:
    """Whether an echo is answered, to the identifier that asked."""
    protocol, kind, answer = (1, 8, 0) if version == 4 else (58, 128, 129)
    with between(lab, pod) as (calling, _), made(calling, version, socket.SOCK_RAW, protocol) as asking:
        body = struct.pack(">HH", 4321, 7) + b"payload!"
        head = struct.pack(">BBH", kind, 0, 0)
        if version == 4:
            words = sum(struct.unpack(">8H", head + body))
            words = (words & 0xFFFF) + (words >> 16)
            head = struct.pack(">BBH", kind, 0, ~words & 0xFFFF)
        asking.sendto(head + body, (to[version], 0))
        while select.select([asking], [], [], WITHIN)[0]:
            heard = asking.recv(2000)[20 if version == 4 else 0 :]
            if heard[0] == answer and heard[4:] == body:
                return True
    return False


def refused(lab: Lab, pod: pods.Attached, version: int, to: Addresses = OUTSIDE) -> bool:
    """Whether the pod learns that there is no listener: an ICMP error about a packet from the node."""
    with between(lab, pod) as (calling, _), made(calling, version, socket.SOCK_DGRAM) as client:
        client.connect((to[version], 9))
        client.send(b"anybody?")
        try:
            client.recv(1)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            return False
    return False


def test_a_pod_is_the_node_to_a_server_outside(node: Lab) -> None:
    give_ipv6(node)
    pid = serving(node, *DUAL)
    pod = pods.add(node, "client")
    status = ask("/v1/healthz", api_socket(pid))["masquerading"]
    assert (status["mode"], status["enabledProtocols"]) == ("BPF", {"ipv4": True, "ipv6": True})
    for version in (4, 6):
        assert seen_by_tcp_server(node, pod, version) == NODE[version]
        assert seen_by_udp_server(node, pod, version, 100) == NODE[version]
        assert seen_by_udp_server(node, pod, version, LONGER_THAN_A_PACKET) == NODE[version]
        assert echoed(node, pod, version)
        assert refused(node, pod, version)
    # Another address of the device, and programs that another program detaches: both are followed.
    with node.open() as run:
        run.run(subprocess.check_call, ["tc", "filter", "del", "dev", "uplink", "egress"])
    eventually(lambda: seen_by_tcp_server(node, pod, 4) == NODE_ADDRESS)
    assert terminated(node, pid) == 0
    assert seen_by_tcp_server(node, pod, 4) == NODE_ADDRESS
    serving(node, *DUAL, "--enable-ipv4-masquerade=false", "--enable-ipv6-masquerade=false")
    with node.open_outside() as outside:
        outside.run(command, f"route add {pod.ipv4} via {NODE_ADDRESS}")
    assert seen_by_tcp_server(node, pod, 4) == pod.ipv4
