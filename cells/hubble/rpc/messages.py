"""gRPC message framing, status codes and method descriptions for servers and clients; the health service.

Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md); grpc.health.v1, health.proto.
"""

from __future__ import annotations

import asyncio
import enum
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Annotated, ClassVar, Final, Self, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import ByteStream

from cells.hubble.codec import Wire, WireMessage, decode, encode
from cells.hubble.scalars import DecodeError


class RpcCode(enum.IntEnum):
    """gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


def code_name(code: int) -> str:
    """Format a code as Go does: ``InvalidArgument``."""
    if code == RpcCode.OK:
        return "OK"
    if code == RpcCode.CANCELLED:
        return "Canceled"
    try:
        return "".join(word.capitalize() for word in RpcCode(code).name.split("_"))
    except ValueError:
        return f"Code({code})"


class RpcError(Exception):
    """A call's error status. Handlers raise it to end a call; clients raise it for a failed call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def framed(messages: Iterable[bytes]) -> bytes:
    """Frame messages for gRPC: a zero byte (uncompressed), the length, and the message."""
    parts: list[bytes] = []
    for message in messages:
        parts.append(b"\0" + len(message).to_bytes(4, "big"))
        parts.append(message)
    return b"".join(parts)


class MessageReader:
    """Splits a byte stream into gRPC messages of at most ``limit`` bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    @property
    def held(self) -> int:
        """Number of buffered bytes."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self._data += data

    def take(self) -> bytes | None:
        """Remove and return the next complete message, or None.

        Raises RpcError if it is compressed or too large.
        """
        if len(self._data) < 5:
            return None
        size = int.from_bytes(self._data[1:5], "big")
        if self._data[0] == 1:
            text = "grpc: compressed flag set with identity or empty encoding"
            raise RpcError(RpcCode.INTERNAL, text)
        if self._data[0]:
            raise RpcError(RpcCode.INTERNAL, f"grpc: received unexpected payload format {self._data[0]}")
        if size > self._limit:
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, f"message larger than max ({size} vs. {self._limit})")
        if len(self._data) < 5 + size:
            return None
        message = bytes(self._data[5 : 5 + size])
        del self._data[: 5 + size]
        return message


def encode_message(text: str) -> str:
    """Encode a ``grpc-message``: UTF-8, with percent-encoding of all but printable ASCII."""
    return quote_from_bytes(text.encode(), safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")


def decode_message(text: str) -> str:
    """Decode a ``grpc-message``."""
    return unquote_to_bytes(text).decode(errors="replace")


_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_seconds(timeout: str | None) -> float:
    """Parse a ``grpc-timeout``; infinity if it is absent. Raises RpcError."""
    if timeout is None:
        return math.inf
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        raise RpcError(RpcCode.INTERNAL, f"malformed grpc-timeout: {timeout!r}")
    return int(found[1]) * _UNITS[found[2]]


Requests = AsyncIterator[bytes]
Answers = AsyncIterator[Iterable[bytes]]


class Method(msgspec.Struct, frozen=True):
    """A method of a gRPC service."""

    service: str
    name: str
    answer: Callable[[Requests], Answers]
    """Receives the request messages; yields batches of encoded responses as the client accepts them."""
    kind: str = "server_stream"
    """The ``grpc_type`` of metrics: unary, server_stream or bidi_stream."""


async def _only(requests: Requests) -> bytes:
    async for request in requests:
        return request
    raise RpcError(RpcCode.INTERNAL, "the request has no message")


def unary(service: str, name: str, call: Callable[[bytes], Awaitable[bytes]]) -> Method:
    """Create a method with one request and one response."""

    async def answer(requests: Requests) -> Answers:
        yield [await call(await _only(requests))]

    return Method(service, name, answer, "unary")


def server_streaming(service: str, name: str, call: Callable[[bytes], Answers]) -> Method:
    """Create a method with one request and a stream of responses, yielded in batches."""

    async def answer(requests: Requests) -> Answers:
        batches = call(await _only(requests))
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                yield batch

    return Method(service, name, answer, "server_stream")


# The byte stream of a connection.


class ClientStream(ByteStream):
    """A connected socket that first sends without waiting.

    anyio's SocketStream is not used: it always sends in a later iteration of the event loop, and if receive()
    is cancelled in the iteration in which data arrives, asyncio reports an InvalidStateError.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._transport = writer.transport
        self._transport.set_write_buffer_limits(0)  # drain() waits until the kernel has accepted all data

    @classmethod
    async def of(cls, connected: socket.socket) -> Self:
        """Wrap a socket and take ownership of it. Raises OSError."""
        if connected.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connected))
        return cls(*await asyncio.open_connection(sock=connected))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive at least one byte. Raises EndOfStream, BrokenResourceError."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    def send_nowait(self, data: bytes) -> bool:
        """Send without waiting. Return False if the kernel did not accept all of the data.

        The rest is buffered; the caller must await send() before it sends more. Raises BrokenResourceError if
        the client has disconnected.
        """
        if self._transport.is_closing():
            raise anyio.BrokenResourceError
        self._transport.write(data)
        return not self._transport.get_write_buffer_size()

    async def send(self, item: bytes) -> None:
        """Send after all buffered data, and wait for the kernel. Raises BrokenResourceError."""
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Shut down the sending direction."""
        self._writer.write_eof()

    async def aclose(self) -> None:
        """Close the connection; buffered data of a cancelled send() is discarded."""
        self._transport.abort()
        await anyio.lowlevel.checkpoint()


# The health service.
#
# Source: grpc.health.v1, health.proto.

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
OBSERVER_NAME: Final = "hubble.server.Observer"
"""The service that health checks name."""

_Message = TypeVar("_Message", bound=WireMessage)


def decoded(kind: type[_Message], data: bytes) -> _Message:
    """Decode a request. Raises RpcError if the bytes are malformed."""
    try:
        return decode(kind, data)
    except DecodeError as error:
        raise RpcError(RpcCode.INTERNAL, f"grpc: error unmarshalling request: {error}") from error


class ServingStatus(enum.IntEnum):
    """The health of a service."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class HealthCheckRequest(WireMessage):
    """A request for the health of a service; an empty name means the server."""

    protobuf: ClassVar[str] = "grpc.health.v1.HealthCheckRequest"
    service: Annotated[str, Wire(1)] = ""


class HealthCheckResponse(WireMessage):
    """The health of a service."""

    protobuf: ClassVar[str] = "grpc.health.v1.HealthCheckResponse"
    status: Annotated[int, Wire(1, ServingStatus)] = 0


async def _check(data: bytes) -> bytes:
    if not _healthy(data):
        raise RpcError(RpcCode.NOT_FOUND, "unknown service")
    return encode(HealthCheckResponse(status=ServingStatus.SERVING))


async def _watch(data: bytes) -> Answers:
    status = ServingStatus.SERVING if _healthy(data) else ServingStatus.SERVICE_UNKNOWN
    yield [encode(HealthCheckResponse(status=status))]
    await anyio.sleep_forever()  # the health does not change while the server runs


def _healthy(data: bytes) -> bool:
    return decoded(HealthCheckRequest, data).service in {"", OBSERVER_NAME}


HEALTH_METHODS: Final = (
    unary(HEALTH_SERVICE, "Check", _check),
    server_streaming(HEALTH_SERVICE, "Watch", _watch),
)
