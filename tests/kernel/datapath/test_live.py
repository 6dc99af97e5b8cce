"""Packets on real links: two pods and the node's own stack."""

import os
import socket
import struct
import threading

import pytest

from tests.kernel.datapath.node import ROUTER, LivePod, running
from tests.support.namespaces import Namespaces, in_node, inside

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

MEGABYTES = 8
IP_RECVERR, IPV6_RECVERR = 11, 25  # linux/in.h, linux/in6.h: the socket hears of errors at once


def ping(source: Namespaces | None, target: str) -> None:
    """Have an echo answered; TimeoutError. A link that just came up may lose the first question for ARP."""
    with raw_socket(source) as sock:
        sock.settimeout(30)
        identifier = os.getpid() & 0xFFFF
        body = struct.pack(">HH", identifier, 1) + bytes(8)
        words = sum(struct.unpack(">6H", body)) + 0x0800
        words = (words & 0xFFFF) + (words >> 16)
        sock.sendto(struct.pack(">BBH", 8, 0, ~words & 0xFFFF) + body, (target, 0))
        while True:
            answer = sock.recv(2000)[20:]
            if answer[0] == 0 and answer[4:6] == body[:2]:
                return


def raw_socket(source: Namespaces | None) -> socket.socket:
    if source is None:
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with inside(source):
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)


def listen(where: Namespaces | None) -> socket.socket:
    """A TCP server on port 8080 of a pod or of the node."""
    if where is None:
        return socket.create_server(("0.0.0.0", 8080))
    with inside(where):
        return socket.create_server(("0.0.0.0", 8080))


def transfer(source: Namespaces | None, target: Namespaces | None, address: str) -> int:
    """Send some megabytes over TCP; how many bytes the other side received."""
    received = 0

    def serve(server: socket.socket) -> None:
        nonlocal received
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 16):
                received += len(data)

    with listen(target) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        if source is None:
            client = socket.socket()
        else:
            with inside(source):
                client = socket.socket()
        with client:
            client.settimeout(30)
            client.connect((address, 8080))
            client.sendall(bytes(MEGABYTES << 20))
        thread.join(60)
    return received


async def test_pods_talk_to_each_other(in_node: None) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
        ping(one.net, str(two.ip))
        ping(two.net, str(one.ip))
        assert transfer(one.net, two.net, str(two.ip)) == MEGABYTES << 20
        assert node.drops() == {}


async def test_pods_and_the_node_talk_to_each_other(in_node: None) -> None:
    async with running() as node:
        node.add_host()
        pod = node.add_pod(10)
        ping(pod.net, str(ROUTER))
        ping(None, str(pod.ip))
        assert transfer(pod.net, None, str(ROUTER)) == MEGABYTES << 20
        assert transfer(None, pod.net, str(pod.ip)) == MEGABYTES << 20
        assert node.drops() == {}


async def test_a_tcp_packet_with_an_expired_ttl_gets_time_exceeded(in_node: None) -> None:
    """The kernel leaves its checksum to the device: the message may not cut that off."""
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10, ipv6=True), node.add_pod(11, ipv6=True)
        with inside(one.net):
            client = socket.socket(socket.AF_INET6)
        with client:
            client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
            client.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
            client.settimeout(30)
            with pytest.raises(OSError, match="No route to host"):
                client.connect((two.address(6), 8080))
        assert node.drops(ipv6=True) == {}


@pytest.mark.parametrize(
    ("family", "outside", "options"),
    [
        (
            socket.AF_INET,
            "198.51.100.1",
            ((socket.IPPROTO_IP, socket.IP_TTL), (socket.IPPROTO_IP, IP_RECVERR)),
        ),
        (
            *(socket.AF_INET6, "2001:db8::1"),
            ((socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS), (socket.IPPROTO_IPV6, IPV6_RECVERR)),
        ),
    ],
    ids=["IPv4", "IPv6"],
)
async def test_the_first_hop_of_a_pods_traceroute_is_the_node(
    in_node: None, family: int, outside: str, options: tuple[tuple[int, int], ...]
) -> None:
    """Its stack answers IPv4, the program IPv6."""
    async with running() as node:
        node.add_host()
        node.add_route_outside(outside)
        pod = node.add_pod(10, ipv6=True)
        with inside(pod.net):
            probe = socket.socket(family, socket.SOCK_DGRAM)
        with probe:
            for option in options:
                probe.setsockopt(*option, 1)
            probe.settimeout(30)
            probe.connect((outside, 33434))
            probe.send(b"probe")
            with pytest.raises(OSError, match="No route to host"):
                probe.recv(100)


async def test_between_pods_the_hosts_end_is_passed_by(in_node: None) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
        ping(one.net, str(two.ip))  # the pods have asked for their gateway now
        before = two.sent_by_link()
        for _ in range(20):
            ping(one.net, str(two.ip))
        assert two.sent_by_link() - before < 20


async def test_a_policy_change_denies_and_allows_a_live_connection(in_node: None) -> None:
    async with running() as node:
        one, two = node.add_pod(10), node.add_pod(11)
        with connected(one, two) as (client, server):
            client.send(b"before")
            assert server.recv(100) == b"before"
            allowed = list(two.policy.items())
            two.policy.clear()
            node.maps.epochs.advance(11)
            client.send(b"during")
            server.settimeout(0.3)
            with pytest.raises(TimeoutError):
                server.recv(100)
            two.policy.update_batch(allowed)
            server.settimeout(30)
            assert server.recv(100) == b"during"  # sent again by the kernel
        assert node.drops().keys() == {133}


class connected:  # noqa: N801  (used as a function)
    """An open TCP connection between two pods: the client's and the server's socket."""

    def __init__(self, source: LivePod, target: LivePod) -> None:
        with inside(target.net):
            self._listener = socket.create_server(("0.0.0.0", 8080))
        with inside(source.net):
            self._client = socket.socket()
        self._client.connect((str(target.ip), 8080))
        self._server, _ = self._listener.accept()

    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        return self._client, self._server

    def __exit__(self, *_: object) -> None:
        for each in (self._client, self._server, self._listener):
            each.close()
