"""Pods that communicate all the time while their node changes, and must lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hive.lab.namespaces import Namespaces, inside
from hive.lab.traffic.flows import (
    tcp_listener,
    tcp_receiver,
    tcp_sender,
    udp_receiver,
    udp_sender,
    udp_socket,
)
from hive.lab.traffic.probe import ping
from tests.support.waiting import eventually

RATE = 1000.0
"""Datagrams per second."""
UNDER_WAY = 100
"""Number of packets after which a flow counts as established."""


@contextmanager
def lossless_traffic(source: Namespaces, target: Namespaces, address: str) -> Iterator[None]:
    """Send datagrams and a TCP stream from one pod to the other's address during the block.

    Raises AssertionError if anything was lost, repeated, or reordered.
    """
    with inside(target):
        datagrams, listener = udp_socket(), tcp_listener()
    with datagrams, listener:
        udp_in = target.start(udp_receiver, datagrams)
        tcp_in = target.start(tcp_receiver, listener)
        udp_out = source.start(udp_sender, (address, datagrams.getsockname()[1]), RATE)
        tcp_out = source.start(tcp_sender, (address, listener.getsockname()[1]))
    try:
        first = target.run(packets)
        eventually(lambda: target.run(packets) > first + UNDER_WAY)
        yield
        last = target.run(packets)
        eventually(lambda: target.run(packets) > last + UNDER_WAY)
        sent, written = udp_out.finish(within=60), tcp_out.finish(within=60)
        received, read = udp_in.finish(within=60), tcp_in.finish(within=60)
    finally:
        for child in (udp_out, tcp_out, udp_in, tcp_in):
            child.kill()
    assert sent.errors == 0
    assert received.packets == sent.packets > 0
    assert (received.duplicates, received.reordered) == (0, 0)
    assert read.continuous
    assert read.octets == written.octets > 0


def packets() -> int:
    """Return how many packets the links of the caller's network namespace have received."""
    table = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return sum(int(line.split(":")[1].split()[1]) for line in table if ":" in line)


def unanswered(addresses: list[str]) -> list[str]:
    """Return the addresses that do not respond to the caller's network namespace."""
    return [address for address in addresses if not ping(address, 1)]
