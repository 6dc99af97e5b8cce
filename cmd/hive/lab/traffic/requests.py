"""Requests, and servers that answer with their name.

For child processes inside pods: the first argument of a function that runs until stopped is the :class:`Stop`
of its child.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hive.lab.children import Stop

_PATIENCE = 5.0


@dataclass(slots=True)
class RequestResults:
    """Results of requests: answers by server name and client address as the server saw it, and failures."""

    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def servers(self) -> list[str]:
        """Names of the servers that answered."""
        return sorted({name for name, _ in self.answered})


def answer(stop: Stop, listener: socket.socket, name: str) -> int:
    """Answer every client with the server's name and the client's address; return the count."""
    count = 0
    listener.settimeout(0.02)
    while not stop.wait(0):
        try:
            connection, peer = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(_PATIENCE)
            if connection.recv(1):
                connection.sendall(f"{name} {peer[0]}".encode())
                count += 1
    return count


def serve_connections(stop: Stop, listener: socket.socket, name: str) -> int:
    """Answer every byte on any number of connections, until stopped; return the count."""
    count = 0
    listener.setblocking(False)
    with selectors.DefaultSelector() as open_:
        open_.register(listener, selectors.EVENT_READ, None)
        while not stop.wait(0):
            for key, _ in open_.select(0.02):
                if key.data is None:
                    connection, peer = listener.accept()
                    open_.register(connection, selectors.EVENT_READ, (connection, peer[0]))
                    continue
                connection, seen = key.data
                with suppress(OSError):  # it is closed
                    if connection.recv(1):
                        connection.sendall(f"{name} {seen}\n".encode())
                        count += 1
                        continue
                open_.unregister(connection)
                connection.close()
    return count


def send_request(connection: socket.socket) -> tuple[str, str]:
    """Send a request on an open connection; return the server's name and the client address."""
    connection.sendall(b"?")
    heard = b""
    while not heard.endswith(b"\n"):
        if not (part := connection.recv(100)):
            raise ConnectionResetError("the server has closed the connection")
        heard += part
    name, _, seen = heard.decode().strip().partition(" ")
    return name, seen


def send_requests(target: tuple[str, int], count: int) -> RequestResults:
    """Send ``count`` requests, one after the other."""
    found = RequestResults()
    for _ in range(count):
        _send_one(target, found)
    return found


def send_until_stopped(stop: Stop, target: tuple[str, int], pause: float) -> RequestResults:
    """Send requests until stopped."""
    found = RequestResults()
    while not stop.wait(pause):
        _send_one(target, found)
    return found


def _send_one(target: tuple[str, int], found: RequestResults) -> None:
    try:
        with socket.create_connection(target, _PATIENCE) as connection:
            connection.sendall(b"?")
            name, _, seen = connection.recv(100).decode().partition(" ")
    except OSError as error:
        found.failed.append(str(error))
        return
    if seen:
        found.answered[name, seen] += 1
    else:
        found.failed.append("no answer")
