"""Connections of masqueraded pods, as servers outside see them."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hive.lab import pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.support.sockets import WITHIN, opened, seen_by_server

NODE6, OUTSIDE6 = "fd50::10", "fd50::1"
OUTSIDE = {4: OUTSIDE_ADDRESS, 6: OUTSIDE6}
PORT = 8080
DUAL = ("--enable-ipv6=true", "--ipv6-range=fd00:5::/112")


def command(text: str) -> None:
    subprocess.run(["ip", *text.split()], check=True)


@contextmanager
def between(lab: Lab, pod: pods.Attached) -> Iterator[tuple[Namespaces, Namespaces]]:
    with lab.open_pod(pod.pod) as calling, lab.open_outside() as outside:
        yield calling, outside


Addresses = Mapping[int, str]
"""By family."""


def seen_by_tcp_server(lab: Lab, pod: pods.Attached, version: int, to: Addresses = OUTSIDE) -> str:
    """Send from the pod to a server outside, wait for its echo; return the address that it saw."""
    with (
        between(lab, pod) as (calling, outside),
        opened(outside, version, socket.SOCK_STREAM) as listener,
        opened(calling, version, socket.SOCK_STREAM) as client,
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
    """Send a datagram of that many bytes; return the address that the server saw."""
    with between(lab, pod) as (calling, outside):
        where = (to[version], PORT)
        return seen_by_server(calling, outside, version, where, where, size)


def echoed(lab: Lab, pod: pods.Attached, version: int, to: Addresses = OUTSIDE) -> bool:
    """Return whether an echo request gets a reply with the right identifier."""
    protocol, kind, answer = (1, 8, 0) if version == 4 else (58, 128, 129)
    with between(lab, pod) as (calling, _), opened(calling, version, socket.SOCK_RAW, protocol) as asking:
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
    """Return whether the pod gets an ICMP error that nothing listens there."""
    with between(lab, pod) as (calling, _), opened(calling, version, socket.SOCK_DGRAM) as client:
        client.connect((to[version], 9))
        client.send(b"anybody?")
        try:
            client.recv(1)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            return False
    return False
