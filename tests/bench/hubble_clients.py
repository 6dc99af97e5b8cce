"""Clients of Hubble that read answers without decoding them, so that many of them need little processor time.

They share the machine with the measured agent.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.settings

from cells.hubble.rpc.messages import MessageReader, framed
from hive.lab.children import Stop

SOCKET = Path("/run/cilium/hubble.sock")
_WINDOW = (1 << 31) - 1
"""Bytes that the server may send: the maximum of HTTP/2."""
_DATA, _HEADERS = 0, 1
_END_STREAM = 1
_READ = 1 << 18
_QUIET = 0.5
"""Seconds."""


def _frames(request: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the frames that begin a connection; and a call's frames, each before and after its stream's
    number.
    """
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW})
    client.increment_flow_control_window(_WINDOW - 65535)
    opening = client.data_to_send()
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/observer.Observer/GetFlows",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    client.send_headers(1, list(headers.items()))
    client.send_data(1, framed([request]), end_stream=True)
    data, frames = client.data_to_send(), []
    while data:
        size = 9 + int.from_bytes(data[:3], "big")
        frames.append((data[:5], data[9:size]))
        data = data[size:]
    return opening, frames


class RawClient:
    """Requests flows, again after the end of each answer, until it is closed."""

    def __init__(self, path: Path, request: bytes) -> None:
        opening, self._frames = _frames(request)
        self._stream = -1
        self._unread = bytearray()
        self.answers = 0
        """Number of ended answers."""
        self.data = bytearray()
        """Messages of the answers, if they are collected."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.sendall(opening)
        self._ask()

    def _ask(self) -> None:
        self._stream += 2
        number = self._stream.to_bytes(4, "big")
        self.socket.sendall(b"".join(head + number + rest for head, rest in self._frames))

    def read(self, *, keep: bool = False) -> None:
        """Read what has arrived. Raises RuntimeError if the server has closed the connection."""
        data = self.socket.recv(_READ)
        if not data:
            raise RuntimeError("a client of Hubble is disconnected")
        self._unread += data
        begin = 0
        while begin + 9 <= len(self._unread):
            end = begin + 9 + int.from_bytes(self._unread[begin : begin + 3], "big")
            if end > len(self._unread):
                break
            kind, flags = self._unread[begin + 3 : begin + 5]
            if kind == _DATA and keep:
                self.data += self._unread[begin + 9 : end]
            elif kind == _HEADERS and flags & _END_STREAM:
                self.answers += 1
                self._ask()
            begin = end
        del self._unread[:begin]

    def messages(self) -> Iterator[bytes]:
        """Return the messages in the collected data."""
        reader = MessageReader(1 << 22)
        reader.feed(bytes(self.data))
        return iter(reader.take, None)


@contextmanager
def connected(count: int, request: bytes, path: Path = SOCKET) -> Iterator[list[RawClient]]:
    """Connect several clients with the same request."""
    with ExitStack() as opened:
        clients = [RawClient(path, request) for _ in range(count)]
        for client in clients:
            opened.enter_context(client.socket)
        yield clients


def read_until(stop: Stop, clients: list[RawClient], *, keep: bool = False) -> Iterator[RawClient]:
    """Let clients read until the parent stops them; yield each client that has read, as often as it does."""
    with selectors.DefaultSelector() as selector:
        selector.register(stop.fd, selectors.EVENT_READ)
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return
                key.data.read(keep=keep)
                yield key.data


def read_rest(clients: list[RawClient]) -> None:
    """Read what is still in flight, until nothing arrives for a while."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while ready := selector.select(_QUIET):
            for key, _ in ready:
                key.data.read(keep=True)
