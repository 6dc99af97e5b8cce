"""Chooses ports for servers of tests."""

from __future__ import annotations

import random
import socket

_CHANCE = random.SystemRandom()


def free_port() -> int:
    """Return a free TCP port outside the kernel's ephemeral range, from which a client could get it first."""
    while True:
        port = _CHANCE.randrange(10_000, 30_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
