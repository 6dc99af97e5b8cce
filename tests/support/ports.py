"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

_CHANCE = random.SystemRandom()


def free_port() -> int:
    """A free TCP port, below those that the kernel gives to connections by itself.

    One of those could be some client's own by the time a server wants it.
    """
    while True:
        port = _CHANCE.randrange(10_000, 30_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
