"""One connection: requests in turn, each authenticated, allowed, answered."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from tests.support.apiserver.auth import User
from tests.support.apiserver.errors import StatusError
from tests.support.apiserver.exec import serve_exec
from tests.support.apiserver.faults import Fault
from tests.support.apiserver.handlers import Upgrade
from tests.support.apiserver.options import target_of
from tests.support.apiserver.wire import (
    BadRequestLineError,
    Request,
    Response,
    Writer,
    read_request,
)

if TYPE_CHECKING:
    from tests.support.apiserver.handlers import Answer, Streaming
    from tests.support.apiserver.server import ApiServer

TEXT = "text/plain; charset=utf-8"


class CloseConnectionError(Exception):
    """The connection ends here, without a word more."""


class Connection:
    """Serves the requests of one connection."""

    def __init__(self, server: ApiServer, reader: asyncio.StreamReader, stream: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._stream = stream
        self._writer = Writer(stream)

    async def run(self) -> None:
        """Until either side is done."""
        try:
            while await self._one():
                pass
        except (ConnectionError, asyncio.IncompleteReadError, CloseConnectionError, ssl.SSLError):
            pass
        except asyncio.CancelledError:  # the server hangs up
            self._stream.transport.abort()
        finally:
            self._stream.close()

    async def _one(self) -> bool:
        try:
            request = await read_request(self._reader)
        except BadRequestLineError as error:
            text = Response(error.code, raw=str(error).encode(), headers={"Content-Type": TEXT})
            await self._writer.whole(Request("GET", "/", "HTTP/1.1", [], b""), text, close=True)
            return False
        if request is None:
            return False
        request.certified = _certificate(self._stream)
        self._server.requests.append((request.method, request.target))
        fault = self._server.faults.of(request)
        if fault is not None and await self._faulty(request, fault):
            return request.keep_alive
        answer = await self._answer(request)
        if isinstance(answer, Upgrade):
            assert self._server.executor is not None
            streams = self._reader, self._stream
            await serve_exec(
                request, answer.command, self._server.executor, self._server.conversation, streams
            )
            return False
        if isinstance(answer, Response):
            await self._writer.whole(request, answer, close=not request.keep_alive)
        else:
            await self._stream_out(request, answer, fault)
        return request.keep_alive

    async def _faulty(self, request: Request, fault: Fault) -> bool:
        """Whether the fault was the answer."""
        if fault.stall:
            await asyncio.Event().wait()
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.close:
            raise CloseConnectionError
        if not fault.status:
            return False
        headers = {"Content-Type": "application/json", **(fault.headers or {})}
        raw = fault.body if isinstance(fault.body, bytes) else None
        if isinstance(fault.body, str):
            raw, headers["Content-Type"] = fault.body.encode(), TEXT
        body = fault.body if fault.body is not None else _plain_status(fault.status)
        response = Response(fault.status, body, headers=headers, raw=raw)
        await self._writer.whole(request, response, close=not request.keep_alive)
        return True

    async def _answer(self, request: Request) -> Answer:
        try:
            user = self._server.users.authenticate(request)
            target = target_of(request)
            self._server.authorizer.check(user, target.attributes(request))
            return await self._server.handlers.answer(request)
        except StatusError as error:
            return _refused(error)

    async def _stream_out(self, request: Request, answer: Streaming, fault: Fault | None) -> None:
        hang_up = asyncio.ensure_future(self._hung_up())
        sending = asyncio.ensure_future(self._send(request, answer, fault))
        try:
            await asyncio.wait({hang_up, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise CloseConnectionError
            await sending
        finally:
            for task in (hang_up, sending):
                task.cancel()
            await asyncio.gather(hang_up, sending, return_exceptions=True)

    async def _hung_up(self) -> None:
        """Until the client closes; what it sends meanwhile is the next request."""
        while not self._reader.at_eof():
            if getattr(self._reader, "_buffer", b""):
                await asyncio.Event().wait()
            waiter = getattr(self._reader, "_wait_for_data", None)
            assert waiter is not None
            await waiter("watch")

    async def _send(self, request: Request, answer: Streaming, fault: Fault | None) -> None:
        await self._writer.start(request, answer.headers, close=not request.keep_alive)
        if fault is not None and fault.insert is not None:
            await self._writer.part(fault.insert)
        count = 0
        if fault is not None and fault.end_after == 0:
            await self._writer.end()
            return
        async for part in answer.parts:
            if fault is not None and fault.cut_after == count:
                await self._writer.part(part[: len(part) // 2])
                self._stream.transport.abort()
                raise CloseConnectionError
            await self._writer.part(part)
            count += 1
            if fault is not None and fault.end_after == count:
                break
        await self._writer.end()


def _certificate(stream: asyncio.StreamWriter) -> User | None:
    """The user in the client's certificate."""
    tls = stream.get_extra_info("ssl_object")
    subject = (tls.getpeercert() or {}).get("subject", ()) if tls is not None else ()
    named = [pair for part in subject for pair in part]
    if not named:
        return None
    groups = tuple(value for key, value in named if key == "organizationName")
    return User(dict(named).get("commonName", ""), groups)


def _refused(error: StatusError) -> Response:
    headers = dict(error.headers)
    if error.text is not None:
        headers["Content-Type"] = TEXT
        return Response(error.code, raw=error.text, headers=headers)
    return Response(error.code, error.body, headers=headers)


def _plain_status(code: int) -> Any:
    reasons = {
        403: "Forbidden",
        409: "Conflict",
        410: "Expired",
        429: "TooManyRequests",
        500: "InternalError",
    }
    reasons |= {401: "Unauthorized", 503: "ServiceUnavailable", 504: "Timeout"}
    return StatusError(code, reasons.get(code, ""), f"injected {code}").body
