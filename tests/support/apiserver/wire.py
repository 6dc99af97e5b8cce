"""HTTP/1.1 over a stream: requests in, answers out, in every framing a real server uses."""

from __future__ import annotations

import asyncio
import gzip
import json
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_HEADER = 1024 * 1024
MAX_BODY = 3 * 1024 * 1024
GZIP_FROM = 128 * 1024
CHUNKED_FROM = 2048


class BadRequestLineError(Exception):
    """What came is not HTTP; answered with this text, then the connection is closed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Request:
    """One request, read whole."""

    def __init__(
        self, method: str, target: str, version: str, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.body = body
        self.too_large = False
        split = urlsplit(target)
        self.path = unquote(split.path)
        self.query = dict(reversed(parse_qsl(split.query, keep_blank_values=True)))
        self.certified: Any = None
        """The user that a certificate of the client names."""

    def header(self, name: str) -> str:
        """The first header of this name, or nothing."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    def all_headers(self, name: str) -> list[str]:
        """Every header of this name."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def keep_alive(self) -> bool:
        """Whether the client wants the connection to stay."""
        connection = self.header("Connection").lower()
        if self.version == "HTTP/1.0":
            return "keep-alive" in connection
        return "close" not in connection


class Response:
    """One answer, whole."""

    def __init__(
        self,
        code: int,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> None:
        self.code = code
        self.body = body
        self.headers = headers or {}
        self.raw = raw
        """Bytes instead of JSON, with a Content-Type among the headers."""

    def content(self) -> bytes:
        """The bytes of the body."""
        return encode(self.body) if self.raw is None else self.raw


def encode(body: object) -> bytes:
    """JSON as Kubernetes writes it: compact, ended by a newline."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None when the client is done. Raises BadRequestLineError."""
    try:
        line = await reader.readline()
    except ValueError as error:
        raise BadRequestLineError(431, "431 Request Header Fields Too Large") from error
    if not line:
        return None
    parts = line.decode("latin-1").rstrip("\r\n").split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/"):
        raise BadRequestLineError(400, "400 Bad Request")
    headers = await _headers(reader, len(line))
    request = Request(parts[0], parts[1], parts[2], headers, b"")
    await _body(reader, request)
    return request


async def _headers(reader: asyncio.StreamReader, size: int) -> list[tuple[str, str]]:
    headers: list[tuple[str, str]] = []
    while True:
        try:
            line = await reader.readline()
        except ValueError as error:
            raise BadRequestLineError(431, "431 Request Header Fields Too Large") from error
        size += len(line)
        if size > MAX_HEADER + 4096:
            raise BadRequestLineError(431, "431 Request Header Fields Too Large")
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            return headers
        name, _, value = text.partition(":")
        headers.append((name, value.strip()))


async def _body(reader: asyncio.StreamReader, request: Request) -> None:
    if request.header("Transfer-Encoding").lower() == "chunked":
        request.body = await _chunks(reader)
    elif length := int(request.header("Content-Length") or 0):
        request.body = await reader.readexactly(length)
    request.too_large = len(request.body) > MAX_BODY


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return bytes(body)


class Writer:
    """Writes answers of one connection."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream
        self._chunked = True

    async def whole(self, request: Request, response: Response, *, close: bool) -> None:
        """An answer with a known body."""
        body = response.content() if response.code != 304 else b""
        headers = {
            "Content-Type": "application/json",
            "Cache-Control": "no-cache, private",
            **response.headers,
        }
        headers = {name: value for name, value in headers.items() if value}
        accepts_gzip = "gzip" in request.header("Accept-Encoding")
        if accepts_gzip and len(body) > GZIP_FROM and response.code == 200:
            body = gzip.compress(body, 1)
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        chunked = len(body) > CHUNKED_FROM and request.version != "HTTP/1.0" and request.method != "HEAD"
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif response.code != 304:
            headers["Content-Length"] = str(len(body))
        if close:
            headers["Connection"] = "close"
        self._head(response.code, headers)
        if request.method == "HEAD":
            body = b""
        if chunked:
            self._stream.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        else:
            self._stream.write(body)
        await self._stream.drain()

    async def start(self, request: Request, headers: dict[str, str], *, close: bool) -> None:
        """The head of an answer that goes on."""
        self._chunked = request.version != "HTTP/1.0"
        framing = {"Transfer-Encoding": "chunked"} if self._chunked else {}
        ending = {"Connection": "close"} if close or not self._chunked else {}
        self._head(200, {"Cache-Control": "no-cache, private", **headers, **framing, **ending})
        await self._stream.drain()

    async def part(self, data: bytes) -> None:
        """One part of it."""
        self._stream.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self._chunked else data)
        await self._stream.drain()

    async def end(self) -> None:
        """The last chunk."""
        if self._chunked:
            self._stream.write(b"0\r\n\r\n")
        await self._stream.drain()

    def _head(self, code: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {code} {HTTPStatus(code).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._stream.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
