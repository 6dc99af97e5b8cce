"""Hostile clients: thousands of connections to one socket of an agent, in the node of a test."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path

from hive.lab.children import Stop

Target = str | tuple[str, int]
"""A path, or an address and a port."""
CONNECTIONS = 4000
SECONDS = 10.0
"""Time within which all connections are opened, in the test's node."""
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
_SENT = (
    b"",
    b"GET /metrics HT",
    40 * _REQUEST,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n",
)
"""Nothing, half a request, many requests without reading the answers, a body that never comes."""


def attack(stop: Stop, target: Target, ready: str) -> int:
    """Open connections, send, and keep them open; return the number of connections."""
    open_clients, made, deadline = [], 0, time.monotonic() + SECONDS
    while made < CONNECTIONS and time.monotonic() < deadline and not stop.wait(0):
        client = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
        client.settimeout(1.0)
        try:
            client.connect(target)
            client.setblocking(False)
            client.send(_SENT[made % len(_SENT)] or b"\r\n")
            made += 1
            open_clients.append(client)
        except OSError:
            client.close()
    Path(ready).touch()
    while not stop.wait(1.0):
        pass
    for client in open_clients:
        client.close()
    return made


def probe() -> int:
    """Send a kubelet's probe and return the response."""
    connection = http.client.HTTPConnection("127.0.0.1", 9879, timeout=30)
    connection.request("GET", "/healthz")
    return connection.getresponse().status
