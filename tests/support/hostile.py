"""Clients that mean no good: thousands of connections to one socket of an agent, in the node of a test."""

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
"""In which they are made, at most; all of them are inside the node of the test."""
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
_SENT = (
    b"",
    b"GET /metrics HT",
    40 * _REQUEST,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n",
)
"""Nothing, half a request, many without reading the answers, a body that never comes."""


def attack(stop: Stop, target: Target, ready: str) -> int:
    """Connect, send, and keep what is left open; how many connections were made."""
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
    """What a kubelet gets to hear."""
    connection = http.client.HTTPConnection("127.0.0.1", 9879, timeout=30)
    connection.request("GET", "/healthz")
    return connection.getresponse().status
