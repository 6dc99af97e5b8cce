"""Sockets of pods, nodes and the world outside, and UDP queries between them."""

from __future__ import annotations

import os
import socket

from hive.lab.namespaces import Namespaces, inside

FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
WITHIN = 10.0


def opened(where: Namespaces, version: int, kind: int, protocol: int = 0) -> socket.socket:
    """Open a socket in these namespaces, with a timeout of ten seconds."""
    with inside(where):
        found = socket.socket(FAMILY[version], kind, protocol)
    found.settimeout(WITHIN)
    return found


def seen_by_server(
    client: Namespaces, server: Namespaces, version: int, own: tuple[str, int], to: tuple[str, int], size: int
) -> str:
    """Send the server a datagram at its ``own`` address; return the client's address as the server sees it.

    The reply must come from the address to which the datagram was sent.
    """
    with (
        opened(server, version, socket.SOCK_DGRAM) as listener,
        opened(client, version, socket.SOCK_DGRAM) as asking,
    ):
        listener.bind(own)
        asking.connect(to)
        question = os.urandom(size)
        asking.send(question)
        heard, peer = listener.recvfrom(size + 1)
        assert heard == question
        listener.sendto(heard[::-1], peer)
        assert asking.recv(size + 1) == question[::-1]
        return str(peer[0])
