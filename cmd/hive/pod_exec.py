"""Runs a command in a container through the API server: the WebSocket of ``pods/exec``.

Unlike a port of the pod, exec works without the pod's network, which a check tests and a policy may deny.
Source: k8s.io/apimachinery/pkg/util/remotecommand (v4.channel.k8s.io: the first byte of a message is its
channel), k8s.io/client-go/tools/remotecommand; RFC 6455.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import anyio
import msgspec
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import RemoteProtocolError

from cells.kubernetes.client.errors import MalformedError, UnreachableError, api_error

if TYPE_CHECKING:
    from cells.kubernetes.client.client import Client
    from cells.kubernetes.client.http import Stream

PROTOCOL: Final = "v4.channel.k8s.io"
IN, OUT, ERR, STATUS = 0, 1, 2, 3
"""Channels."""
_SETTLED: Final = 1.0
"""Timeout of the closing handshake in seconds."""


class Executed(NamedTuple):
    """The result of a command."""

    code: int
    out: bytes
    err: bytes


async def execute(
    client: Client, namespace: str, pod: str, container: str, command: Sequence[str], *, within: float
) -> Executed:
    """Run a command without input, and return its output.

    Raises ApiError if it cannot be run (no such pod, not permitted), UnreachableError, CredentialsError,
    MalformedError; TimeoutError after the timeout.
    """
    with anyio.fail_after(within):
        running = await Running.start(client, namespace, pod, container, command, has_input=False)
        try:
            return await running.ended()
        finally:
            await running.aclose()


class Running:
    """A running command in a container, with its unread output."""

    def __init__(self, socket: _Socket) -> None:
        self._socket = socket
        self._channels: dict[int, bytearray] = {OUT: bytearray(), ERR: bytearray(), STATUS: bytearray()}
        self._current: bytearray | None = None

    @classmethod
    async def start(
        cls,
        client: Client,
        namespace: str,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        has_input: bool,
    ) -> Running:
        """Start it. Raises what execute() does, except TimeoutError."""
        stream, before, headers = await client.upgrade()
        target = f"{before}/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/exec"
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("stdin", "true")] if has_input else []
        query += [("command", word) for word in command]
        request = Request(
            host=urlsplit(client.server).netloc.rpartition("@")[2],
            target=f"{target}?{urlencode(query)}",
            extra_headers=headers,
            subprotocols=[PROTOCOL],
        )
        running = cls(_Socket(stream))
        try:
            with _as_kubernetes_errors():
                await running._socket.send(request)
                await _accepted(running._socket)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await running.aclose()
            raise
        return running

    async def answer_to(self, line: bytes) -> bytes:
        """Write a line, and return the next line of output.

        Raises UnreachableError, with its stderr, if it has ended; MalformedError, ApiError.
        """
        with _as_kubernetes_errors():
            await self._socket.send(BytesMessage(bytes((IN,)) + line + b"\n"))
            out = self._channels[OUT]
            while b"\n" not in out:
                if await self._read():
                    words = self._channels[ERR].decode(errors="replace").split("\n")
                    raise UnreachableError(" ".join(words[-3:]).strip() or "the command ended")
        answer, _, rest = bytes(out).partition(b"\n")
        out[:] = rest
        return answer

    async def ended(self) -> Executed:
        """Wait until it ends."""
        with _as_kubernetes_errors():
            while (closed := await self._read()) is None:
                pass
        out, err, status = (bytes(self._channels[one]) for one in (OUT, ERR, STATUS))
        return _executed(out, err, status, closed)

    async def aclose(self) -> None:
        """Close the connection, which ends a command that reads its input."""
        await self._socket.aclose()

    async def _read(self) -> CloseConnection | None:
        """Process an event; return the one that ends the command."""
        event = await self._socket.receive()
        if isinstance(event, BytesMessage):
            data = bytes(event.data)
            if self._current is None and data:
                self._current, data = self._channels.get(data[0], bytearray()), data[1:]
            if self._current is not None:
                self._current += data
            if event.message_finished:
                self._current = None
        elif isinstance(event, Ping):
            await self._socket.send(event.response())
        elif isinstance(event, CloseConnection):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                with anyio.move_on_after(_SETTLED):
                    await self._socket.send(event.response())
            return event
        return None


@contextmanager
def _as_kubernetes_errors() -> Iterator[None]:
    try:
        yield
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise UnreachableError(f"the connection ended: {error}") from error
    except RemoteProtocolError as error:
        raise MalformedError(f"pods/exec: {error}") from error


class _Socket:
    """A WebSocket over a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    async def send(self, event: Event) -> None:
        await self._stream.send(self._protocol.send(event))

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def receive(self) -> Event:
        """Return the next event. Raises UnreachableError at the end of the stream."""
        while not self._events:
            data = await self._stream.receive()
            if not data:
                raise UnreachableError("the server closed the connection in the middle of a command")
            self._protocol.receive_data(data)
            self._events += self._protocol.events()
        return self._events.pop(0)


async def _accepted(socket: _Socket) -> None:
    """Check the server's handshake. Raises ApiError if it refuses."""
    status, body = 0, b""
    while True:
        event = await socket.receive()
        if isinstance(event, AcceptConnection):
            if event.subprotocol != PROTOCOL:
                raise MalformedError(f"pods/exec: {event.subprotocol or 'no protocol'}, expected {PROTOCOL}")
            return
        if isinstance(event, RejectConnection):
            status = event.status_code
            if not event.has_body:
                raise api_error(status, b"", "")
        elif isinstance(event, RejectData):
            body += bytes(event.data)
            if event.body_finished:
                raise api_error(status, body, "")


def _executed(out: bytes, err: bytes, status: bytes, closed: CloseConnection) -> Executed:
    """Return the result from the final Status. Raises MalformedError, ApiError."""
    if not status:
        raise UnreachableError(
            f"the server ended the command without its status: {closed.reason or closed.code}"
        )
    try:
        found: dict[str, Any] = msgspec.json.decode(status, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise MalformedError(f"pods/exec: status {status[:80]!r}") from error
    if found.get("status") == "Success":
        return Executed(0, out, err)
    for cause in (found.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return Executed(int(cause["message"]), out, err)
    raise api_error(int(found.get("code") or 500), status, "")
