"""Requests of one client, one after the other, with h11.

Source: RFC 9110, RFC 9112; h11 parses and frames, and refuses what they forbid.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import h11

from lifecycle.http.channel import READ_SIZE, Channel
from lifecycle.http.fair_queue import FairQueue
from lifecycle.http.in_flight import InFlight
from lifecycle.http.limits import ServerLimits
from lifecycle.http.messages import Handler, Request, Response

SMALL_BODY = 16 << 10
"""Size in bytes up to which bodies are read whatever the total of all bodies."""
PARTS_A_TURN = 64
"""Chunks of a body that are read in one turn: each costs its framing, however small it is."""


class Connection:
    """Answers the requests of one client with ``handler``."""

    def __init__(
        self,
        channel: Channel,
        handler: Handler,
        limits: ServerLimits,
        *,
        queue: FairQueue,
        bodies: InFlight,
        answers: InFlight,
        make_room: Callable[[], None],
    ) -> None:
        self.channel = channel
        self._handler = handler
        self._limits = limits
        self._queue = queue
        self._bodies = bodies
        self._answers = answers
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER)
        self._ahead = bytearray()
        """Data that was received while a handler checked whether the client is still connected."""
        self._body = 0
        """Bytes of this request's body in memory."""
        self._bodiless = False
        """Whether the answer to this request has no body."""
        self._request_ends: float | None = None
        """The deadline of the request that is being received."""
        self.answering = False
        """Whether a request was received and its answer is not sent yet."""
        self.answered = 0
        """Number of requests answered."""
        self.queued = False
        """Whether it waits for its turn."""
        self.last = False
        """Whether this request is the last one."""

    @property
    def holds(self) -> bool:
        """Whether it holds memory that depends on the client."""
        return bool(self._body) or self.answering

    def replaceable(self, now: float) -> bool:
        """Whether another connection may replace it: it waits for the client, or the client does not read."""
        if self.answering:
            return self.channel.stalled(now)
        return self.channel.waiting_since <= now

    async def run(self) -> None:
        """Answer requests until one side closes. Raises OSError, TimeoutError."""
        while not self.last:
            try:
                request = await self._request()
                if request is None:
                    return
                await self._respond(request)
            except h11.RemoteProtocolError as error:
                await self._refuse(error)
                await self.channel.finish()
                return
            finally:
                self._bodies.add(-self._body)
                self._body = 0
            if request.too_large:
                await self.channel.finish()
                return
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            if self._http.trailing_data[0]:
                await self._turn()  # a pipelined request has no precedence

    async def _respond(self, request: Request) -> None:
        self.answering = True
        if self._answers.full:
            self._make_room()
            await self._answers.room()
        no_proxy = request.method == "CONNECT"  # after a 2xx the connection would be a tunnel
        response = Response(501) if no_proxy else await self._handler(request)
        await self._answer(request, response)
        self.answering = False
        self.answered += 1

    async def _request(self) -> Request | None:
        """Return the next request; None if the client has closed."""
        self._request_ends, self._bodiless = None, False
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        self._bodiless = head.method == b"HEAD"
        body, too_large = bytearray(), False
        async for part in self._parts():
            too_large = len(body) + len(part) > self._limits.body
            if too_large:
                body.clear()
                break
            self._hold(len(part))
            body += part
        return Request(
            method=head.method.decode("ascii"),
            target=_origin_form(head.target.decode("ascii")),
            headers={name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
            body=bytes(body),
            peer=self.channel.socket,
            too_large=too_large,
            disconnected=self._disconnected,
        )

    def _hold(self, count: int) -> None:
        """Count a part of the body. Raises RemoteProtocolError if the server holds too many such bytes."""
        self._bodies.add(count)
        self._body += count
        if self._bodies.full and self._body > SMALL_BODY:
            self._make_room()
            raise h11.RemoteProtocolError("too many requests are being read, ask again", 503)

    async def _parts(self) -> AsyncIterator[bytes | bytearray]:
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        count = 0
        while isinstance(event := await self._event(), h11.Data):
            yield event.data
            count += 1
            if not count % PARTS_A_TURN:
                await self._turn()

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event of the client."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = bytes(self._ahead) or await self._read()
            self._ahead.clear()
            await self._turn()
            self._http.receive_data(data)
        return event

    async def _turn(self) -> None:
        self.channel.busy()
        self.answering = True  # a stop waits: a whole request may have arrived
        self.queued = True
        await self._queue.wait(self.channel.peer)
        self.answering = self.queued = False

    async def _read(self) -> bytes:
        now = self._loop.time()
        if self._request_ends is None and self._http.trailing_data[0]:
            self._request_ends = now + self._limits.request_seconds
        idle_ends = now + self._limits.idle_seconds
        data = await self.channel.read(idle_ends if self._request_ends is None else self._request_ends)
        if self._request_ends is None:
            self._request_ends = self._loop.time() + self._limits.request_seconds
        return data

    async def _disconnected(self) -> None:
        """Wait until the client has closed or reset the connection; keeps data that it sends before."""
        while len(self._ahead) < READ_SIZE:
            try:
                data = await self.channel.read(None, client_waits=True)
            except OSError:
                return
            if not data:
                return
            self._ahead += data
        await asyncio.Event().wait()  # enough is buffered: no longer watch for a disconnect

    async def _answer(self, request: Request, response: Response) -> None:
        headers = [("Date", _date()), *response.headers.items()]
        if response.content_type is not None:
            headers.append(("Content-Type", response.content_type))
        if self.last or request.too_large:
            headers.append(("Connection", "close"))
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
            head = h11.Response(status_code=response.status, headers=headers)
            body = b"" if self._bodiless else response.body
            await self._send(head, h11.Data(data=body), h11.EndOfMessage())
            return
        async with contextlib.aclosing(response.body) as parts:
            await self._send(h11.Response(status_code=response.status, headers=headers))
            async for part in parts:
                await self._send(h11.Data(data=part))
                self.channel.idle()  # the next part may take long
            self.channel.busy()
        await self._send(h11.EndOfMessage())

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """Send the client the error of its request, if it is still connected."""
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        text = f"{error}\n".encode()
        headers = [("Date", _date()), ("Content-Length", str(len(text))), ("Connection", "close")]
        head = h11.Response(status_code=error.error_status_hint, headers=headers)
        await self._send(head, h11.Data(data=b"" if self._bodiless else text), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._http.send(event) or b"" for event in events)
        self._answers.add(len(data))
        try:
            seconds = self._limits.send_seconds + len(data) / self._limits.send_rate
            await self.channel.write(data, self._loop.time() + seconds)
        finally:
            self._answers.add(-len(data))


def _origin_form(target: str) -> str:
    """Path and query, also from the absolute form ``http://host/path`` (RFC 9112, section 3.2.2)."""
    if not target.startswith("http://"):
        return target
    return "/" + target.removeprefix("http://").partition("/")[2]


def _date() -> str:
    """Return the present time in the format of RFC 9110, section 5.6.7; the process's locale is C."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
