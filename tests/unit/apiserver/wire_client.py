"""A small HTTP client that sends exactly these bytes, and reports how responses are framed."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

DEADLINE = 30.0


class Received(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body as JSON."""
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return json.loads(body)


class Sent(NamedTuple):
    """A request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    version: str = "HTTP/1.1"


def target(path: str, query: dict[str, Any]) -> str:
    """Return path and query as one string."""
    plain = quote(path, safe="/:$@~!*'(),;=+")
    return f"{plain}?{urlencode(query, doseq=True)}" if query else plain


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the server."""
    where = urlsplit(url)
    return await asyncio.open_connection(where.hostname, where.port, limit=64 * 1024 * 1024)


def encoded(sent: Sent) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{sent.method} {sent.target} {sent.version}", "Host: stand-in"]
    lines += [f"{name}: {value}" for name, value in sent.headers]
    if sent.body or sent.method in {"POST", "PUT", "PATCH"}:
        lines.append(f"Content-Length: {len(sent.body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + sent.body


async def exchange(url: str, sent: Sent) -> Received | None:
    """Send one request on a new connection; return None if the server closes it without a response."""
    reader, writer = await connect(url)
    try:
        writer.write(encoded(sent))
        async with asyncio.timeout(DEADLINE):
            return await _received(reader, head=sent.method == "HEAD")
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    status = int(line.split()[1])
    headers: dict[str, str] = {}
    while (text := (await reader.readline()).decode("latin-1").rstrip("\r\n")) != "":
        name, _, value = text.partition(":")
        key = name.lower()
        headers[key] = f"{headers[key]}\n{value.strip()}" if key in headers else value.strip()
    return status, headers


async def _received(reader: asyncio.StreamReader, *, head: bool) -> Received:
    status, headers = await _head(reader)
    if head or status == 304:
        return Received(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        parts = [part async for part in _chunks(reader)]
        return Received(status, headers, b"".join(parts))
    if "content-length" in headers:
        return Received(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Received(status, headers, await reader.read())


async def _chunks(reader: asyncio.StreamReader) -> Any:
    while True:
        line = await reader.readline()
        if not line:
            raise asyncio.IncompleteReadError(b"", None)
        size = int(line, 16)
        data = await reader.readexactly(size)
        await reader.readline()
        if not size:
            return
        yield data


class Stream:
    """A watch, read in the background."""

    def __init__(self, url: str, sent: Sent) -> None:
        self._url = url
        self._sent = sent
        self.answer: Received | None = None
        self.events: list[Any] = []
        self.ended = ""
        """How it ended: ``last chunk``, ``closed``, or not yet."""
        self.changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def started(self) -> None:
        """Wait for the head of the response."""
        while self.answer is None and not self.ended:
            await self._change()

    async def until(self, count: int) -> bool:
        """Return whether this many events arrived before the deadline."""
        while len(self.events) < count and not self.ended:
            if not await self._change():
                return False
        return len(self.events) >= count

    async def over(self) -> bool:
        """Return whether it ended before the deadline."""
        while not self.ended:
            if not await self._change():
                return False
        return True

    async def _change(self) -> bool:
        self.changed.clear()
        try:
            async with asyncio.timeout(DEADLINE):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        reader, writer = await connect(self._url)
        try:
            writer.write(encoded(self._sent))
            status, headers = await _head(reader)
            if status != 200:
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.answer = Received(status, headers, body)
                self.ended = "no stream"
                return
            self.answer = Received(status, headers, b"")
            self.changed.set()
            await self._lines(reader, chunked=headers.get("transfer-encoding") == "chunked")
        except (ConnectionError, asyncio.IncompleteReadError):
            self.ended = "closed"
        finally:
            self.changed.set()
            writer.close()

    async def _lines(self, reader: asyncio.StreamReader, *, chunked: bool) -> None:
        held = b""
        if not chunked:
            while line := await reader.readline():
                self._event(line)
            self.ended = "closed"
            return
        async for part in _chunks(reader):
            held += part
            *lines, held = held.split(b"\n")
            for line in lines:
                self._event(line)
        self.ended = "last chunk"

    def _event(self, line: bytes) -> None:
        self.events.append(json.loads(line))
        self.changed.set()
