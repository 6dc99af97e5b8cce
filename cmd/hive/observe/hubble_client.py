"""A gRPC client of Hubble's API: one connection, one call at a time."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final, Self

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings

from cells.hubble.rpc.messages import MessageReader, RpcCode, RpcError, decode_message, framed

LARGEST_MESSAGE: Final = 4 << 20
"""Maximum size of an answer in bytes, the default of gRPC clients."""
WINDOW: Final = 1 << 20
"""Flow control window in bytes."""
_READ: Final = 64 << 10
_HTTP_CODES: Final = {
    "400": RpcCode.INTERNAL,
    "401": RpcCode.UNAUTHENTICATED,
    "403": RpcCode.PERMISSION_DENIED,
    "404": RpcCode.UNIMPLEMENTED,
}


class ConnectError(Exception):
    """Raised if the server cannot be reached; the text is that of Cilium's client."""

    server = ""
    """The path of a local socket on which no server listens."""


class HubbleClient(AbstractContextManager["HubbleClient"]):
    """A connection from construction to close(). Raises ConnectError.

    `server` is ``unix:///path``, ``host:port`` or ``tls://host:port``; `timeout` is that of the connection in
    seconds.
    """

    def __init__(
        self,
        server: str,
        timeout: float,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._metadata = dict(metadata or {})
        address = server.removeprefix("tls://")
        self._socket, self._authority = _dialled(server, address, timeout)
        if tls is not None:
            self._socket = _secured(self._socket, tls, server, server_name or _host(address), timeout)
            self._authority = server_name or address
        self._scheme = "http" if tls is None else "https"
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
        self._h2.increment_flow_control_window(WINDOW)
        self._deadline: float | None = None

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Return the answer to a call, such as ``observer.Observer/ServerStatus``. Raises RpcError."""
        answers = [one for batch in self.stream(method, request, timeout) for one in batch]
        if not answers:
            raise RpcError(RpcCode.INTERNAL, "the answer has no message")
        return answers[0]

    def stream(self, method: str, request: bytes, timeout: float | None = None) -> Iterator[list[bytes]]:
        """Yield the answers to a call in batches, as received. Raises RpcError."""
        self._deadline = None if timeout is None else time.monotonic() + timeout
        call = self._begin(method, request, timeout)
        reader = MessageReader(LARGEST_MESSAGE)
        headers: dict[str, str] = {}
        ended = False
        while not ended:
            for event in self._events():
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    headers |= {str(name): str(value) for name, value in event.headers or ()}
                elif isinstance(event, h2.events.DataReceived):
                    reader.feed(event.data)
                    self._h2.acknowledge_received_data(event.flow_controlled_length, call)
                elif isinstance(event, h2.events.StreamEnded):
                    ended = True
                elif isinstance(event, h2.events.StreamReset) and "grpc-status" not in headers:
                    raise RpcError(
                        RpcCode.INTERNAL, f"stream terminated by RST_STREAM, code {event.error_code}"
                    )
                elif isinstance(event, h2.events.StreamReset):
                    ended = True
            if batch := list(iter(reader.take, None)):
                yield batch
        _check(headers)

    def _begin(self, method: str, request: bytes, timeout: float | None) -> int:
        headers = {
            ":method": "POST",
            ":scheme": self._scheme,
            ":path": f"/{method}",
            ":authority": self._authority,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "hive",
            **self._metadata,
        }
        if timeout is not None:
            headers["grpc-timeout"] = f"{max(int(timeout * 1000), 1)}m"
        call: int = self._h2.get_next_available_stream_id()
        self._h2.send_headers(call, list(headers.items()))
        rest = memoryview(framed([request]))
        while rest:
            room = min(self._h2.local_flow_control_window(call), self._h2.max_outbound_frame_size)
            part, rest = rest[:room], rest[room:]
            if room:
                self._h2.send_data(call, part, end_stream=not rest)
            else:
                self._events()
        return call

    def _events(self) -> list[h2.events.Event]:
        """Send pending data, and return the next events."""
        try:
            if data := self._h2.data_to_send():
                self._socket.sendall(data)
            left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
            self._socket.settimeout(left)
            data = self._socket.recv(_READ)
        except TimeoutError as error:
            raise RpcError(RpcCode.DEADLINE_EXCEEDED, "context deadline exceeded") from error
        except OSError as error:
            raise RpcError(
                RpcCode.UNAVAILABLE, f"error reading from server: {error.strerror or error}"
            ) from error
        if not data:
            raise RpcError(RpcCode.UNAVAILABLE, "error reading from server: EOF")
        events: list[h2.events.Event] = self._h2.receive_data(data)
        return events


def _check(headers: Mapping[str, str]) -> None:
    """Raise RpcError unless the call succeeded."""
    status = headers.get("grpc-status")
    if status is None:
        code = _HTTP_CODES.get(headers.get(":status", ""), RpcCode.UNKNOWN)
        raise RpcError(code, f"unexpected HTTP status code received from server: {headers.get(':status')}")
    if status != "0":
        raise RpcError(int(status), decode_message(headers.get("grpc-message", "")))


def _host(address: str) -> str:
    host = address.rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def _dialled(server: str, address: str, timeout: float) -> tuple[socket.socket, str]:
    """Return a connected socket, and the authority for requests."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout)
            connected.connect(path)
        except OSError as error:
            connected.close()
            failure = _failure(server, "unix", path, error)
            failure.server = path
            raise failure from error
        return connected, "localhost"
    port = address.rpartition(":")[2]
    if not port.isdigit() or not _host(address):
        raise ConnectError(
            f"failed to connect to '{server}': expected unix:///path, host:port or tls://host:port"
        )
    try:
        connected = socket.create_connection((_host(address), int(port)), timeout)
    except OSError as error:
        raise _failure(server, "tcp", address, error) from error
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected, address


def _failure(server: str, network: str, address: str, error: OSError) -> ConnectError:
    reason = "i/o timeout" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    return ConnectError(
        f"failed to connect to '{server}': connection error:"
        f' desc = "transport: error while dialing: dial {network} {address}: connect: {reason}"'
    )


def _secured(
    connected: socket.socket, tls: ssl.SSLContext, server: str, name: str, timeout: float
) -> socket.socket:
    try:
        connected.settimeout(timeout)
        return tls.wrap_socket(connected, server_hostname=name)
    except OSError as error:
        connected.close()
        reason = getattr(error, "verify_message", "") or error.strerror or str(error)
        raise ConnectError(
            f"failed to connect to '{server}': connection error:"
            f' desc = "transport: authentication handshake failed: {reason}"'
        ) from error
