"""Serves a handler on listening sockets, with keep-alive and an orderly stop, a request at a time.

Needs: h11, Handler.   Gives: HttpServer.
Source: RFC 9110, RFC 9112; h11 reads and frames, and refuses what they forbid.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import h11

from cells.http.messages import MAX_BODY, Handler, Request, Response
from cells.http.turns import Turns

READ_SIZE = 1 << 16
IDLE_SECONDS = 75.0
"""How long a connection may be silent before, or within, a request."""


class HttpServer:
    """Answers requests with one handler. Serves once; ``grace`` are the seconds a stop waits for answers."""

    def __init__(self, handler: Handler, *, grace: float) -> None:
        self._handler = handler
        self._grace = grace
        self._turns = Turns()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept on a listening socket, which is ours from now on. Not to be cancelled in the middle."""
        if listener.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._accepted, sock=listener)
        else:
            self._server = await asyncio.start_server(self._accepted, sock=listener)

    async def close(self) -> None:
        """Accept nothing more, let go of idle connections, and of the others after the grace."""
        if self._server is None:
            return
        self._server.close()
        for task, connection in self._connections.items():
            connection.last = True
            if not connection.answering:
                task.cancel()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=self._grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._server.wait_closed()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("asyncio accepts in a task")
        writer.transport.set_write_buffer_limits(high=0)  # drain() waits until the kernel has everything
        connection = self._connections[task] = _Connection(reader, writer, self._handler, self._turns)
        try:
            await connection.run()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the client has gone or was silent, or we stop: nobody waits for this connection any more
        finally:
            del self._connections[task]
            writer.close()


class _Connection:
    """One client."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, turns: Turns
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._turns = turns
        self._http = h11.Connection(h11.SERVER)
        self._ahead = bytearray()
        """What came while a handler asked whether the client has gone."""
        self.answering = False
        """A request has come whose answer is not sent."""
        self.last = False
        """No request after this one."""

    async def run(self) -> None:
        """Answer requests until one side has enough. Raises ConnectionError, TimeoutError."""
        while not self.last:
            try:
                request = await self._request()
            except h11.RemoteProtocolError as error:
                await self._refuse(error)
                return
            if request is None:
                return
            self.answering = True
            no_proxy = request.method == "CONNECT"  # after a 2xx for it, the connection would be another's
            response = Response(501) if no_proxy else await self._handler(request)
            await self._answer(request, response)
            self.answering = False
            if (
                request.too_large
                or self._http.our_state is not h11.DONE
                or self._http.their_state is not h11.DONE
            ):
                return
            self._http.start_next_cycle()

    async def _request(self) -> Request | None:
        """The next request; None when the client has closed."""
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        body = bytearray()
        async for part in self._body():
            body += part
            if len(body) > MAX_BODY:
                break
        return Request(
            method=head.method.decode("ascii"),
            target=_origin_form(head.target.decode("ascii")),
            headers={name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
            body=b"" if len(body) > MAX_BODY else bytes(body),
            peer=self._writer.get_extra_info("socket"),
            too_large=len(body) > MAX_BODY,
            gone=self._gone,
        )

    async def _body(self) -> AsyncIterator[bytes | bytearray]:
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        while isinstance(event := await self._event(), h11.Data):
            yield event.data

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """What comes next of the client."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = bytes(self._ahead) or await self._read()
            self._ahead.clear()
            self.answering = True  # a stop meanwhile waits: what has come may be a whole request
            await self._turns.take()
            self.answering = False
            self._http.receive_data(data)
        return event

    async def _read(self) -> bytes:
        async with asyncio.timeout(IDLE_SECONDS):
            return await self._reader.read(READ_SIZE)

    async def _gone(self) -> None:
        """Return once the client has closed, or broken off. What it sends before is kept."""
        while len(self._ahead) < READ_SIZE:
            try:
                data = await self._reader.read(READ_SIZE)
            except ConnectionError:
                return
            if not data:
                return
            self._ahead += data
        await asyncio.Event().wait()  # so much is there to answer that we do not look further

    async def _answer(self, request: Request, response: Response) -> None:
        headers = [("Date", _date()), *response.headers.items()]
        if response.content_type is not None:
            headers.append(("Content-Type", response.content_type))
        if self.last or request.too_large:
            headers.append(("Connection", "close"))
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
            head = h11.Response(status_code=response.status, headers=headers)
            body = b"" if request.method == "HEAD" else response.body
            await self._send(head, h11.Data(data=body), h11.EndOfMessage())
            return
        async with contextlib.aclosing(response.body) as parts:
            await self._send(h11.Response(status_code=response.status, headers=headers))
            async for part in parts:
                await self._send(h11.Data(data=part))
        await self._send(h11.EndOfMessage())

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """Tell the client what it did wrong, if it can still be told."""
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        text = f"{error}\n".encode()
        headers = [("Date", _date()), ("Content-Length", str(len(text))), ("Connection", "close")]
        head = h11.Response(status_code=error.error_status_hint, headers=headers)
        await self._send(head, h11.Data(data=text), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._writer.drain()


def _origin_form(target: str) -> str:
    """Path and query; of a proxy's ``http://host/path`` too (RFC 9112, section 3.2.2)."""
    if not target.startswith("http://"):
        return target
    return "/" + target.removeprefix("http://").partition("/")[2]


def _date() -> str:
    """Now, as RFC 9110, section 5.6.7 writes it; the process's locale is C."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
