"""Services with backends on another node, as clients see them."""

from __future__ import annotations

import os
import socket

from hive.lab.namespaces import Namespaces, inside

OUTSIDE = {4: "192.168.50.1", 6: "fd50:1::1"}
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
TARGET = 8080


def opened(where: Namespaces, version: int, kind: int) -> socket.socket:
    with inside(where):
        found = socket.socket(FAMILY[version], kind)
    found.settimeout(5)
    return found


def by_udp(client: Namespaces, server: Namespaces, version: int, to: tuple[str, int], size: int) -> str:
    """The client that the server saw; the answer comes from the address asked, or not at all."""
    with (
        opened(server, version, socket.SOCK_DGRAM) as listener,
        opened(client, version, socket.SOCK_DGRAM) as asking,
    ):
        listener.bind(("", TARGET))
        asking.connect(to)
        question = os.urandom(size)
        asking.send(question)
        heard, peer = listener.recvfrom(size + 1)
        assert heard == question
        listener.sendto(heard[::-1], peer)
        assert asking.recv(size + 1) == question[::-1]
        return str(peer[0])
