"""Measure a path by traffic: a paced UDP flow, and a TCP connection that always sends.

For child processes inside pods: the first argument of each function is the :class:`Stop` of its child. Loss
is counted by sequence numbers, and each word of the TCP stream has its position as its value.
"""

import array
import socket
import struct
import sys
import time
from dataclasses import dataclass

from hive.lab.children import Stop

_PACKET = struct.Struct("<Qd")
_BUFFER = 8 << 20
_SO_RCVBUFFORCE = 33
_QUIET = 1.0
"""Seconds without a packet after which all packets count as arrived."""
_BLOCK_WORDS = 512
_BLOCK_INTERVAL = 0.002


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a paced sender: seconds and packets."""

    packets: int
    errors: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Received:
    """Result of a receiver: distinct, duplicate and reordered packets, and the longest silence in seconds.

    ``lowest`` and ``highest`` are sequence numbers, -1 for none: they show where packets were lost.
    """

    packets: int
    duplicates: int
    reordered: int
    longest_gap: float
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """Result of one end of a TCP stream: bytes, whether all were in place, the longest stall in seconds."""

    octets: int
    continuous: bool
    longest_stall: float


def udp_sender(stop: Stop, target: tuple[str, int], rate: float) -> Sent:
    """Send numbered packets at ``rate`` per second until stopped; late ones are sent at once."""
    with socket.socket(family_of(target[0]), socket.SOCK_DGRAM) as sock:
        sock.connect(target)
        began = time.monotonic()
        number = errors = 0
        while not stop.wait(began + number / rate - time.monotonic()):
            try:
                sock.send(_PACKET.pack(number, time.monotonic()))
            except OSError:  # an ICMP error for an earlier packet, which counts as lost
                errors += 1
            number += 1
        return Sent(number, errors, time.monotonic() - began)


def udp_receiver(stop: Stop, sock: socket.socket) -> Received:
    """Count packets on a bound socket until stopped and no more arrive."""
    seen: set[int] = set()
    duplicates = reordered = 0
    highest, last, longest = -1, 0.0, 0.0
    sock.settimeout(_QUIET)
    while True:
        try:
            packet = sock.recv(64)
        except TimeoutError:
            if stop.wait(0):
                return Received(len(seen), duplicates, reordered, longest, min(seen, default=-1), highest)
            continue
        now = time.monotonic()
        number, _ = _PACKET.unpack(packet)
        if number in seen:
            duplicates += 1
            continue
        seen.add(number)
        if number < highest:
            reordered += 1
        highest = max(highest, number)
        if last:
            longest = max(longest, now - last)
        last = now


def tcp_sender(stop: Stop, target: tuple[str, int]) -> Streamed:
    """Write a stream of 8-byte words, each its own position, until stopped."""
    position, longest = 0, 0.0
    with socket.create_connection(target, timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(30)
        while not stop.wait(_BLOCK_INTERVAL):
            began = time.monotonic()
            sock.sendall(array.array("Q", range(position, position + _BLOCK_WORDS)).tobytes())
            longest = max(longest, time.monotonic() - began)
            position += _BLOCK_WORDS
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)  # the other end has read everything and closed
    return Streamed(position * 8, True, longest)


def tcp_receiver(stop: Stop, listener: socket.socket) -> Streamed:
    """Read a stream to its end and check every word; when stopped, no longer wait for a peer."""
    sock = _accept(stop, listener)
    if sock is None:
        return Streamed(0, False, 0.0)
    with sock:
        sock.settimeout(30)
        return _read_stream(sock)


def _accept(stop: Stop, listener: socket.socket) -> socket.socket | None:
    listener.settimeout(0.2)
    while True:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if stop.wait(0):
                return None


def _read_stream(sock: socket.socket) -> Streamed:
    rest = b""
    octets, continuous, longest = 0, True, 0.0
    last = time.monotonic()
    while chunk := sock.recv(1 << 18):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        data = rest + chunk
        whole = len(data) // 8 * 8
        words = array.array("Q", data[:whole])
        first = (octets - len(rest)) // 8
        continuous = continuous and words == array.array("Q", range(first, first + len(words)))
        octets += len(chunk)
        rest = data[whole:]
    return Streamed(octets, continuous and not rest, longest)


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def udp_socket(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Return a UDP socket on a free port, with a buffer for packets that arrive while the reader is late."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    sock.bind(("", 0))
    return sock


def tcp_listener(family: socket.AddressFamily = socket.AF_INET, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens on a port, 0 for a free one."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(("", port))
    sock.listen()
    return sock


if sys.byteorder != "little":  # native byte order: both ends are on this machine
    raise ImportError("the lab's flows are written for little-endian machines, as the agent's maps are")
