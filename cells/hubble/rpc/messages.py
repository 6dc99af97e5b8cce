"""Messages, statuses and methods of gRPC for servers and clients; and a client's socket.

Source: the gRPC protocol over HTTP/2 (PROTOCOL-HTTP2.md).
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
    """Status codes of gRPC."""

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
    """The code as Go prints it: ``InvalidArgument``."""
    if code == RpcCode.OK:
        return "OK"
    if code == RpcCode.CANCELLED:
        return "Canceled"
    try:
        return "".join(word.capitalize() for word in RpcCode(code).name.split("_"))
    except ValueError:
        return f"Code({code})"


class RpcError(Exception):
    """Ends a call with a status; clients raise it if a call ended with one."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def framed(messages: Iterable[bytes]) -> bytes:
    """Messages framed for gRPC: uncompressed, each after its length."""
    parts: list[bytes] = []
    for message in messages:
        parts.append(b"\0" + len(message).to_bytes(4, "big"))
        parts.append(message)
    return b"".join(parts)


class MessageReader:
    """Splits a stream into messages of at most ``limit`` bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    @property
    def held(self) -> int:
        """Bytes of messages that are incomplete or not taken."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._data += data

    def take(self) -> bytes | None:
        """The next complete message. Raises RpcError if it is compressed or too large."""
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
    """The value of ``grpc-message``: UTF-8, with percent-encoding for all but printable ASCII."""
    return quote_from_bytes(text.encode(), safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")


def decode_message(text: str) -> str:
    """The text of a ``grpc-message``."""
    return unquote_to_bytes(text).decode(errors="replace")


_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_seconds(timeout: str | None) -> float:
    """The value of ``grpc-timeout``; infinity without one. Raises RpcError."""
    if timeout is None:
        return math.inf
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        raise RpcError(RpcCode.INTERNAL, f"malformed grpc-timeout: {timeout!r}")
    return int(found[1]) * _UNITS[found[2]]


Requests = AsyncIterator[bytes]
Answers = AsyncIterator[Iterable[bytes]]


class Method(msgspec.Struct, frozen=True):
    """One method of a service."""

    service: str
    name: str
    answer: Callable[[Requests], Answers]
    """Receives the client's messages; yields encoded answers in batches, each when the client has room."""
    kind: str = "server_stream"
    """unary, server_stream or bidi_stream, as in metrics."""


async def _only(requests: Requests) -> bytes:
    async for request in requests:
        return request
    raise RpcError(RpcCode.INTERNAL, "the request has no message")


def unary(service: str, name: str, call: Callable[[bytes], Awaitable[bytes]]) -> Method:
    """A method with one request and one answer."""

    async def answer(requests: Requests) -> Answers:
        yield [await call(await _only(requests))]

    return Method(service, name, answer, "unary")


def server_streaming(service: str, name: str, call: Callable[[bytes], Answers]) -> Method:
    """A method with one request and a stream of answers, which the call yields in batches."""

    async def answer(requests: Requests) -> Answers:
        batches = call(await _only(requests))
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                yield batch

    return Method(service, name, answer, "server_stream")


# A client's socket, as the server reads and writes it.


class ClientStream(ByteStream):
    """A connected socket that sends synchronously as much as the kernel accepts.

    anyio's own is not used: it sends in a later turn of the event loop, and if its receive() is cancelled in
    the turn in which data arrives, the loop reports a fault (InvalidStateError).
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._transport = writer.transport
        self._transport.set_write_buffer_limits(0)  # drain() waits until the system has all of it

    @classmethod
    async def of(cls, connected: socket.socket) -> Self:
        """A stream that owns the socket. Raises OSError."""
        if connected.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connected))
        return cls(*await asyncio.open_connection(sock=connected))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Read at least one byte. Raises EndOfStream, BrokenResourceError."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    def send_nowait(self, data: bytes) -> bool:
        """Send. Returns whether the kernel accepted all; if not, wait with send() before sending more.

        Raises BrokenResourceError if the client has disconnected.
        """
        if self._transport.is_closing():
            raise anyio.BrokenResourceError
        self._transport.write(data)
        return not self._transport.get_write_buffer_size()

    async def send(self, item: bytes) -> None:
        """Wait until the kernel accepts it and what was sent before. Raises BrokenResourceError."""
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Close the sending side."""
        self._writer.write_eof()

    async def aclose(self) -> None:
        """Close the connection; data of a cancelled send() is lost."""
        self._transport.abort()
        await anyio.lowlevel.checkpoint()


# The health service that clients of gRPC ask before they ask anything else.
#
# Source: grpc.health.v1, health.proto.

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
OBSERVER_NAME: Final = "hubble.server.Observer"
"""The service of which health clients ask the state."""

_Message = TypeVar("_Message", bound=WireMessage)


def decoded(kind: type[_Message], data: bytes) -> _Message:
    """A decoded request. Raises RpcError if the bytes are malformed."""
    try:
        return decode(kind, data)
    except DecodeError as error:
        raise RpcError(RpcCode.INTERNAL, f"grpc: error unmarshalling request: {error}") from error


class ServingStatus(enum.IntEnum):
    """Whether a service answers."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class HealthCheckRequest(WireMessage):
    """Requests the health of a service, or of the server."""

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
    await anyio.sleep_forever()  # its health does not change while it serves


def _healthy(data: bytes) -> bool:
    return decoded(HealthCheckRequest, data).service in {"", OBSERVER_NAME}


HEALTH_METHODS: Final = (
    unary(HEALTH_SERVICE, "Check", _check),
    server_streaming(HEALTH_SERVICE, "Watch", _watch),
)
