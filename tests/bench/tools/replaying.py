"""A server that repeats the answers of another one, byte by byte, as fast as a socket takes it.

``python -m tests.bench.tools.replaying URL`` prints its address. The first request for a target is answered
by the server at URL, and stored; every other one from memory. A streamed list is stored up to its end;
another watch is silent. A write counts as done: GET /written returns of how many objects,
GET /forget begins anew. GET /answered returns the size of each answer, by target.
Why:   beside clients that take a tenth of a second, a server that renders objects would be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from urllib.parse import urlsplit

END_OF_LIST = b"k8s.io/initial-events-end"
CLOSING = re.compile(rb"(?i)^connection: *close\r\n", re.MULTILINE)


LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


DONE = _answer(b'{"metadata":{}}')


class Replay:
    """Answers by target."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._known: dict[bytes, bytes] = {}
        self._written: dict[str, set[bytes]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, target, _ = head.split(b" ", 2)
                if method != b"GET":
                    if size := LENGTH.search(head):
                        await reader.readexactly(int(size[1]))
                    self._written.setdefault(method.decode(), set()).add(target)
                    writer.write(DONE)
                    continue
                if target == b"/forget":
                    self._written.clear()
                if target == b"/answered":
                    sizes = {name.decode(): len(answer) for name, answer in self._known.items()}
                    writer.write(_answer(json.dumps(sizes).encode()))
                    continue
                if target in {b"/written", b"/forget"}:
                    written = {name: len(targets) for name, targets in self._written.items()}
                    writer.write(_answer(json.dumps(written).encode()))
                    continue
                if b"watch=" in target and b"sendInitialEvents" not in target:
                    await reader.read()  # until the client has enough of it
                    return
                if target not in self._known:
                    self._known[target] = await self._asked(head, watch=b"watch=" in target)
                writer.write(self._known[target])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _asked(self, head: bytes, *, watch: bool) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        found = bytearray()
        while part := await reader.read(1 << 20):
            found += part
            at = found.rfind(END_OF_LIST) if watch else -1
            if at > 0 and found.endswith(b"\r\n") and b"\n\r\n" in found[at:]:
                break
        writer.close()
        top, middle, body = bytes(found).partition(b"\r\n\r\n")
        return CLOSING.sub(b"", top + b"\r\n").removesuffix(b"\r\n") + middle + body


async def serve(upstream: str) -> None:
    """Serve until the process is killed."""
    server = await asyncio.start_server(Replay(upstream).serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
