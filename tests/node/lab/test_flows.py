"""The lab's flow counters are accurate: nothing lost on a good path, losses and stalls on a bad one."""

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hive.lab.traffic.flows import (
    tcp_listener,
    tcp_receiver,
    tcp_sender,
    udp_receiver,
    udp_sender,
    udp_socket,
)
from hive.lab.traffic.probe import interfaces, ping, routes, tcp_echo, tcp_echo_server
from tests.support.namespaces import Namespaces, inside, need_root, new_netns
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


@dataclass
class Pair:
    """Two namespaces and the link between them."""

    left: Namespaces
    right: Namespaces


LEFT, RIGHT = "10.9.0.1", "10.9.0.2"


@pytest.fixture
def pair() -> Iterator[Pair]:
    need_root()
    with new_netns() as left, new_netns() as right:
        left.run(_connect, right.net)
        right.run(_address, "b", RIGHT)
        yield Pair(left, right)


def _connect(right: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="a", kind="veth", peer={"ifname": "b", "net_ns_fd": right})
    _address("a", LEFT)


def _address(name: str, address: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=name)
        ip.addr("add", index=index, address=address, prefixlen=24)
        ip.link("set", index=index, state="up")


def _set_link(name: str, state: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname=name)[0], state=state)


def _counter(protocol: str, name: str) -> int:
    """A counter of the caller's network namespace (/proc/net/snmp)."""
    lines = (line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines())
    names, counts = (line for line in lines if line[0] == f"{protocol}:")
    return int(counts[names.index(name)])


def _unread() -> int:
    """Bytes that wait in the UDP sockets of the caller's network namespace (/proc/net/udp)."""
    rows = (line.split() for line in Path("/proc/thread-self/net/udp").read_text().splitlines()[1:])
    return sum(int(row[4].partition(":")[2], 16) for row in rows)


def wait_sent(pair: Pair, more: int, protocol: str = "Udp", name: str = "OutDatagrams") -> None:
    """Wait until the left side has sent so many more packets."""
    before = pair.left.run(_counter, protocol, name)
    eventually(lambda: pair.left.run(_counter, protocol, name) >= before + more)


def test_nothing_is_lost_on_a_good_path(pair: Pair) -> None:
    with inside(pair.right):
        sock = udp_socket()
    with sock:
        receiver = pair.right.start(udp_receiver, sock)
        began, before = time.monotonic(), pair.left.run(_counter, "Udp", "OutDatagrams")
        sender = pair.left.start(udp_sender, (RIGHT, sock.getsockname()[1]), 1000.0)

        def keeps_pace() -> bool:
            passed = time.monotonic() - began
            return passed > 0.4 and pair.left.run(_counter, "Udp", "OutDatagrams") - before > 950 * passed

        eventually(keeps_pace)  # once its late packets are caught up
        sent = sender.finish(within=60)
        received = receiver.finish(within=60)
    assert 350 <= sent.packets <= 1000 * sent.seconds + 1
    assert (received.packets, received.duplicates) == (sent.packets, 0)


def test_losses_and_the_gap_are_seen(pair: Pair) -> None:
    with inside(pair.right):
        sock = udp_socket()
    with sock:
        receiver = pair.right.start(udp_receiver, sock)
        sender = pair.left.start(udp_sender, (RIGHT, sock.getsockname()[1]), 1000.0)
        wait_sent(pair, 100)
        pair.right.run(_set_link, "b", "down")
        eventually(
            lambda: pair.right.run(_unread) == 0
        )  # a receiver that is late gets its share before the gap
        down = time.monotonic()
        wait_sent(pair, 200)
        eventually(lambda: time.monotonic() - down > 0.4)  # late packets are sent all at once
        pair.right.run(_set_link, "b", "up")
        wait_sent(pair, 100)
        sent = sender.finish(within=60)
        received = receiver.finish(within=60)
    assert 0 < received.packets < sent.packets
    assert received.longest_gap > 0.15


def test_a_stream_is_checked_word_by_word(pair: Pair) -> None:
    with inside(pair.right):
        listener = tcp_listener()
    with listener:
        receiver = pair.right.start(tcp_receiver, listener)
        sender = pair.left.start(tcp_sender, (RIGHT, listener.getsockname()[1]))
        wait_sent(pair, 50, "Tcp", "OutSegs")
        sent = sender.finish(within=60)
        received = receiver.result(within=60)
    assert sent.octets > 0
    assert received.octets == sent.octets
    assert received.continuous


def test_a_stream_with_other_bytes_is_not_continuous(pair: Pair) -> None:
    with inside(pair.right):
        listener = tcp_listener()
    with listener:
        receiver = pair.right.start(tcp_receiver, listener)
        with inside(pair.left), socket.create_connection((RIGHT, listener.getsockname()[1])) as sock:
            sock.sendall(struct.pack("<4Q", 0, 1, 3, 4))
        received = receiver.result(within=60)
    assert received.octets == 32
    assert not received.continuous


def test_a_receiver_without_senders_finishes_on_request(pair: Pair) -> None:
    with inside(pair.right):
        sock, listener = udp_socket(), tcp_listener()
    with sock, listener:
        assert pair.right.start(udp_receiver, sock).finish(within=60).packets == 0
        assert pair.right.start(tcp_receiver, listener).finish(within=60).octets == 0


def test_ping_counts_the_answered(pair: Pair) -> None:
    trips = pair.left.run(ping, RIGHT, 3)
    assert len(trips) == 3
    assert all(trip > 0 for trip in trips)
    assert pair.left.run(ping, "10.9.0.77", 1, 0.1) == []


def test_tcp_echo_needs_a_server_that_answers(pair: Pair) -> None:
    with inside(pair.right):
        listener = tcp_listener()
    with listener:
        port = listener.getsockname()[1]
        server = pair.right.start(tcp_echo_server, listener)
        assert pair.left.run(tcp_echo, (RIGHT, port), 1 << 16) > 0
        assert server.finish(within=60) == [LEFT]
    with pytest.raises(ConnectionRefusedError):
        pair.left.run(tcp_echo, (RIGHT, port))


def test_links_addresses_and_routes_are_read(pair: Pair) -> None:
    (link,) = pair.left.run(interfaces)
    assert (link.name, link.up, link.addresses) == ("a", True, (f"{LEFT}/24",))
    assert [str(route) for route in pair.left.run(routes)] == ["10.9.0.0/24 dev a"]
