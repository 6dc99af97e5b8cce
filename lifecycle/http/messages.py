"""Requests and responses of handlers."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

import anyio
import msgspec

MAX_BODY = 1 << 20
"""Maximum size of a request's body in bytes; a request with a larger one has ``too_large`` set."""


class Request(msgspec.Struct, frozen=True):
    """One complete request."""

    method: str
    target: str
    """Path and query as sent, not decoded."""
    headers: Mapping[str, str]
    """By lower-case name; the last one if a name is repeated."""
    body: bytes
    peer: socket.socket
    """The connection, to identify its other end."""
    too_large: bool = False
    """Whether the body was larger than MAX_BODY, and so is missing."""
    match_info: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The decoded parts of the path that the route names."""
    disconnected: Callable[[], Awaitable[None]] = anyio.sleep_forever
    """Returns once the client has closed its side, for a handler that waits."""

    @property
    def path(self) -> str:
        """The path as sent, not decoded."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """The decoded query; the first value if a name is repeated."""
        pairs = parse_qsl(self.target.partition("?")[2], keep_blank_values=True)
        return dict(reversed(pairs))


class Response(msgspec.Struct):
    """An answer; if its body is a generator, it is sent in chunks as it is produced."""

    status: int
    body: bytes | AsyncGenerator[bytes, None] = b""
    content_type: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """In addition to Content-Type, Content-Length and Date."""


class Refusal(Exception):  # noqa: N818  # an answer rather than a failure
    """A request that cannot be served: the HTTP status, and one sentence for the client.

    Cells derive from it.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return self.text


Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request; it must not raise."""
