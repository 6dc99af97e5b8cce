"""What has come of an answer, as llhttp understands it.

Needs: httptools.   Gives: Incoming.
Source: RFC 9112 (HTTP/1.1).
"""

from __future__ import annotations

from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from cells.kubernetes.client.errors import UnreachableError

MOST_HEAD: Final = 100 * 1024
"""Bytes of a head, or of anything else between two parts of a body."""


class HeadTooLongError(Exception):
    """A head of more bytes than any server sends."""


class Incoming:
    """One answer as it comes in: its head, then parts of its body, which the reader takes away."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.begun = False
        """Whether the head is there."""
        self.complete = False
        self.kept = False
        """Whether the connection may be used again after it."""
        self._size = 0
        self._since = 0
        self.on_body = self.parts.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """These bytes came; none at the end of the stream. Raises UnreachableError."""
        if self._parser is None or not data:
            return self._end()
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if isinstance(error.__context__, HeadTooLongError):
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes") from error
            if not self.complete:
                raise UnreachableError(f"an answer that is no HTTP/1.1: {error}") from error
            self.kept = False  # more came than was asked for
        if self.parts or self.complete:
            self._since = 0
        else:
            self._since += len(data)
            if self._since > MOST_HEAD:
                raise UnreachableError(f"an answer with a head longer than {MOST_HEAD} bytes")
        return None

    def header(self, name: bytes) -> bytes | None:
        """The first of this name, in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def release(self) -> None:
        """Nothing more is read: parser and answer no longer hold each other."""
        self._parser = None

    def _end(self) -> None:
        framed = self.header(b"content-length") or self.header(b"transfer-encoding")
        if self.complete:
            self.kept = False
        elif self.begun and not framed:
            self.complete = True  # the body lasts until the connection ends (RFC 9112, 6.3)
        else:
            where = "in the middle of" if self.begun else "without"
            raise UnreachableError(f"the server closed the connection {where} an answer")

    # ---- called by llhttp; what is raised here ends in feed()

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpParserError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MOST_HEAD:
            raise HeadTooLongError
        if not self.begun:  # what follows the body is not asked for
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  # it is what calls
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.begun = True
            self.kept = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.begun:
            self.complete = True
        else:  # an interim one: the answer is yet to come
            self.headers.clear()
