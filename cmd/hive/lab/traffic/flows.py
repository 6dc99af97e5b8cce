"""Traffic that measures the path it takes: a paced UDP flow and a TCP connection that never rests.

For child processes inside pods: every function takes the :class:`Stop` of its child first.
Loss is counted by sequence numbers, TCP continuity by the position every word of the stream must carry.
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
"""Seconds without a packet after which nothing is under way any more."""
_BLOCK_WORDS = 512
_BLOCK_INTERVAL = 0.002


@dataclass(frozen=True, slots=True)
class Sent:
    """What a paced sender did; seconds and packets."""

    packets: int
    errors: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Received:
    """What arrived: distinct packets, repeated ones, those overtaken, and the longest silence in seconds.

    And the smallest and the largest number that came, -1 for none: what was lost before, within or after.
    """

    packets: int
    duplicates: int
    reordered: int
    longest_gap: float
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """One end of a TCP stream: bytes, whether every byte was in its place, the longest stall in seconds."""

    octets: int
    continuous: bool
    longest_stall: float


def udp_sender(stop: Stop, target: tuple[str, int], rate: float) -> Sent:
    """Send numbered packets at `rate` per second until stopped; late ones are caught up."""
    with socket.socket(family_of(target[0]), socket.SOCK_DGRAM) as sock:
        sock.connect(target)
        began = time.monotonic()
        number = errors = 0
        while not stop.wait(began + number / rate - time.monotonic()):
            try:
                sock.send(_PACKET.pack(number, time.monotonic()))
            except OSError:  # an answer of the network (ICMP) to an earlier packet: it will be missing
                errors += 1
            number += 1
        return Sent(number, errors, time.monotonic() - began)


def udp_receiver(stop: Stop, sock: socket.socket) -> Received:
    """Count what arrives on a bound socket until stopped and nothing more comes."""
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
    """Read one stream to its end and check every word of it; when stopped, give up waiting for a peer."""
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
    """That of an address as text."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def udp_socket(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """A UDP socket bound to a free port, with room for everything that comes while its reader is delayed."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    sock.bind(("", 0))
    return sock


def tcp_listener(family: socket.AddressFamily = socket.AF_INET, port: int = 0) -> socket.socket:
    """A TCP socket listening on a port, 0 for a free one."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(("", port))
    sock.listen()
    return sock


if sys.byteorder != "little":  # words travel as the machine has them; both ends are this machine
    raise ImportError("the lab's flows are written for little-endian machines, as the agent's maps are")
