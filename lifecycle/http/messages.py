"""A request as a handler sees it, and what it answers."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

import anyio
import msgspec

MAX_BODY = 1 << 20
"""Bytes of a request's body that are read; of more, the request has ``too_large`` set."""


class Request(msgspec.Struct, frozen=True):
    """One request, read to its end."""

    method: str
    target: str
    """Path and query as they were sent, not decoded."""
    headers: Mapping[str, str]
    """By lower-case name; the last one where a name comes twice."""
    body: bytes
    peer: socket.socket
    """The connection, to ask who is at its other end."""
    too_large: bool = False
    """The body was larger than MAX_BODY and is not here."""
    match_info: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The decoded parts of the path that the route names."""
    disconnected: Callable[[], Awaitable[None]] = anyio.sleep_forever
    """Returns once the client has closed its side: for a handler that waits, which ends it first."""

    @property
    def path(self) -> str:
        """The path as it was sent, not decoded."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """The decoded query; the first value where a name comes twice."""
        pairs = parse_qsl(self.target.partition("?")[2], keep_blank_values=True)
        return dict(reversed(pairs))


class Response(msgspec.Struct):
    """What is answered; a generator as its body is sent as it comes, in chunks."""

    status: int
    body: bytes | AsyncGenerator[bytes, None] = b""
    content_type: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Beside Content-Type, Content-Length and Date."""


class Refusal(Exception):  # noqa: N818  # an answer rather than a failure
    """What cannot be done for a client: the HTTP status, and one sentence for it. Cells derive theirs."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return self.text


Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request; it must not raise."""
