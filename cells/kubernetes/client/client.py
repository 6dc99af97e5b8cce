"""The API of Kubernetes, as far as it is used here: read, watch, write.

Source: Kubernetes API concepts (kubernetes.io/docs/reference/using-api/api-concepts).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from urllib.parse import quote, urlencode

import anyio
import msgspec

from cells.kubernetes.client.calls import Bucket, Calls, normalised
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.errors import (
    ApiError,
    ConflictError,
    KubernetesError,
    MalformedError,
    NotFoundError,
    UnreachableError,
    api_error,
    status_error,
)
from cells.kubernetes.client.transport import Headers, StreamedResponse, Transport, WriteRequest
from cells.kubernetes.objects.kind import Kind, Object

if TYPE_CHECKING:
    from cells.kubernetes.client.http import Stream, WholeAnswer

__all__ = ["Client", "WatchEvent", "events"]


T = TypeVar("T", bound=Object)
Body = Mapping[str, Any]
Change = Literal["json", "merge"]

MEDIA: Final[Mapping[Change, bytes]] = {
    "json": b"application/json-patch+json",
    "merge": b"application/merge-patch+json",
}
JSON: Final = b"application/json"
TRIES: Final = 5
"""How often a request that may be repeated is sent."""
AWAY: Final = frozenset({502, 503, 504})
"""Statuses of a server that is not there, or of what stands before it: another one is tried."""
LONGEST_LINE: Final = 16 * 1024 * 1024
"""Bytes of one event: the store takes objects of 1.5 MiB."""


BLOCK: Final = 64 * 1024
"""Bytes of events that are handled at once, if one is not longer: some milliseconds of work."""


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """One line of a watch."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


_EVENT = msgspec.json.Decoder(WatchEvent)


def events(lines: bytes) -> list[WatchEvent]:
    """The events of lines, whatever their objects are. Raises MalformedError."""
    try:
        return _EVENT.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"watch: {error}") from error


class Client:
    """Requests to the API servers: at most so many a second, repeated where that is safe."""

    def __init__(
        self,
        transport: Transport,
        credentials: Credentials,
        bucket: Bucket,
        *,
        agent: str,
        timeout: float = 30.0,
        calls: Calls | None = None,
    ) -> None:
        self._transport = transport
        self._credentials = credentials
        self._bucket = bucket
        self._agent = agent
        self._timeout = timeout
        self.calls = calls or Calls()
        self.reach = transport.reach

    @property
    def server(self) -> str:
        """The server in use."""
        return self._transport.server

    @property
    def manager(self) -> str:
        """The name under which fields are owned."""
        return self._agent.partition("/")[0]

    async def probe(self) -> None:
        """For ever: while no server answers, look for one, so that those who wait in ``reach`` wake."""
        await self.reach.probe(self._healthz)

    async def _healthz(self) -> None:
        with contextlib.suppress(KubernetesError):  # any answer is one, and without one nothing is known
            await self._once("GET", "/healthz", None, b"")

    async def heartbeat(self, silence: float) -> None:
        """Ask a server after so many silent seconds how it is. Raises KubernetesError.

        Without an answer every connection is replaced: it may be dead without either end knowing, and a
        watch on it would wait for its end. So it asks once: a second connection may work where the first is
        dead. A server that refuses has answered.
        """
        if time.monotonic() - self.calls.last_answer < silence:
            return
        try:
            await self._once("GET", "/healthz", None, b"")
        except KubernetesError as error:
            if isinstance(error, ApiError) and error.code < 500:
                return
            await self.reset()
            raise

    async def reset(self) -> None:
        """Break every connection: watches are made again."""
        await self._transport.reset()

    # ---- reading

    async def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        """One object. Raises NotFoundError, ApiError, UnreachableError."""
        return _decoded(kind, await self.raw("GET", kind.path(namespace, name)))

    async def whole(self, kind: Kind[T], name: str, namespace: str = "") -> dict[str, Any]:
        """One whole object. Raises NotFoundError, ApiError, MalformedError, UnreachableError."""
        return _whole(kind, await self.raw("GET", kind.path(namespace, name)))

    async def page(self, kind: Kind[T], query: Mapping[str, str], namespace: str = "") -> bytes:
        """One page of a list, as it came. Raises ExpiredError, ApiError, UnreachableError."""
        return await self.raw("GET", kind.path(namespace), query)

    @asynccontextmanager
    async def watch(
        self, kind: Kind[T], query: Mapping[str, str], namespace: str = "", *, silence: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """An open watch: whole lines as they come, an event each. A silence (seconds) breaks it off.

        Servers send an answer's head before there is an event: that is waited for as for other answers.
        Raises ApiError, UnreachableError, and while it runs MalformedError.
        """
        target = _target(kind.path(namespace), {"watch": "1", **query})
        async with self._sent("GET", target, None, b"", quiet=silence) as answer:
            if answer.status != 200:
                raise await self._refusal(answer)
            blocks = _blocks(answer)
            async with aclosing(blocks):
                yield blocks

    # ---- writing

    async def create(self, kind: Kind[T], obj: Body, namespace: str = "") -> T:
        """A new object. Raises ConflictError (``exists``), ApiError, UnreachableError."""
        return _decoded(kind, await self.raw("POST", kind.path(namespace), self._query, _json(obj)))

    async def update(
        self,
        kind: Kind[T],
        name: str,
        change: Callable[[dict[str, Any]], Body | None],
        namespace: str = "",
        *,
        subresource: str = "",
    ) -> T | None:
        """Read, change, write, and again after each conflict. ``change`` gives None to leave it as it is.

        Raises NotFoundError, ConflictError after too many tries, ApiError, UnreachableError.
        """
        for left in reversed(range(TRIES)):
            wanted = change(await self.whole(kind, name, namespace))
            if wanted is None:
                return None
            try:
                written = await self._put(kind, name, wanted, namespace, subresource)
                return _decoded(kind, written)
            except ConflictError:
                if not left:
                    raise
        raise AssertionError  # pragma: no cover

    async def replace(self, kind: Kind[T], name: str, obj: Body, namespace: str = "") -> dict[str, Any]:
        """Write an object over the version of it that it names; the object as it is then, whole.

        Raises NotFoundError, ConflictError when another writer was faster, ApiError, UnreachableError.
        """
        return _whole(kind, await self._put(kind, name, obj, namespace))

    async def _put(self, kind: Kind[T], name: str, obj: Body, namespace: str, subresource: str = "") -> bytes:
        where = kind.path(namespace, name, subresource)
        return await self.raw("PUT", where, self._query, _json(obj))

    async def patch(
        self,
        kind: Kind[T],
        name: str,
        body: Body | Sequence[Body],
        namespace: str = "",
        *,
        how: Change = "merge",
        subresource: str = "",
    ) -> T:
        """Change an object. A merge patch may hold a resourceVersion.

        Raises NotFoundError, ConflictError, ApiError, UnreachableError.
        """
        path = kind.path(namespace, name, subresource)
        return _decoded(kind, await self.raw("PATCH", path, self._query, _json(body), MEDIA[how]))

    async def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", version: str = ""
    ) -> bool:
        """Whether there was one. Only that with this uid and this resourceVersion, if they are given.

        Raises ConflictError when it is another, ApiError, UnreachableError.
        """
        try:
            await self.raw("DELETE", kind.path(namespace, name), None, _delete_options(uid, version))
        except NotFoundError:
            return False
        return True

    def deletion(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", version: str = ""
    ) -> WriteRequest:
        """What delete() sends, for send_all()."""
        body = _delete_options(uid, version)
        return WriteRequest("DELETE", _target(kind.path(namespace, name), None), body, JSON)

    def merge(self, kind: Kind[T], name: str, body: Body, namespace: str = "") -> WriteRequest:
        """What patch() sends, for send_all()."""
        target = _target(kind.path(namespace, name), self._query)
        return WriteRequest("PATCH", target, _json(body), MEDIA["merge"])

    async def send_all(self, requests: Sequence[WriteRequest]) -> list[KubernetesError | None]:
        """Send writes that may be repeated one behind the other on one connection; the error of each or None.

        What is refused for a moment, or not answered before the connection ends, is sent again by itself.
        """
        waited = [await self._bucket.take() for _ in requests]
        server, began, quiet = self.server, time.monotonic(), self._timeout
        answers: Sequence[WholeAnswer] = ()
        failure: KubernetesError | None = None
        try:
            answers = await self._transport.send_all(requests, await self._headers(), quiet=quiet)
        except KubernetesError as error:
            failure = error
        if any(answer.status in AWAY for answer in answers):
            self._transport.failed(server)
        elif answers:
            self.reach.found()
        ends: list[KubernetesError | None] = [failure] * len(requests)
        paths = {one.method: normalised(one.target) for one in requests}
        for number, (request, held_back) in enumerate(zip(requests, waited, strict=True)):
            answer = answers[number] if number < len(answers) else None
            status, at = (answer.status, answer.at) if answer is not None else (None, began)
            self.calls.note(request.method, paths[request.method], server, held_back, status, at - began)
            if answer is not None and answer.status >= 300:
                ends[number] = api_error(answer.status, answer.body, answer.retry_after.decode("latin-1"))
        return ends if failure is not None else await self._again(requests, ends, len(answers))

    async def _again(
        self, requests: Sequence[WriteRequest], ends: list[KubernetesError | None], answered: int
    ) -> list[KubernetesError | None]:
        """Send by themselves those that may do then; until no server answers."""
        away: UnreachableError | None = None
        for number, request in enumerate(requests):
            error = ends[number]
            if number < answered and not (isinstance(error, ApiError) and error.code in {401, 429}):
                continue
            ends[number] = away
            try:
                if away is None:
                    await self._repeated(request.method, request.target, request.body, request.media)
            except UnreachableError as found:
                ends[number] = away = found
            except KubernetesError as found:
                ends[number] = found
        return ends

    @property
    def _query(self) -> dict[str, str]:
        """Of a write."""
        return {"fieldManager": self.manager}

    # ---- requests

    async def upgrade(self) -> tuple[Stream, str, Headers]:
        """A connection of its own for a request that changes its protocol, such as to a WebSocket's.

        What the request's target begins with, and its headers, come with it; the caller closes the stream.
        Raises UnreachableError, CredentialsError.
        """
        await self._bucket.take()
        headers = [(b"User-Agent", self._agent.encode()), *await self._credentials.headers()]
        stream, before = await self._transport.stream()
        return stream, before, headers

    async def raw(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        media: bytes = JSON,
    ) -> bytes:
        """The body of an answer. Repeats what was refused for a moment, and reads that got no answer.

        Raises ApiError and its kinds, UnreachableError, CredentialsError.
        """
        return await self._repeated(method, _target(path, query), body, media)

    async def _repeated(self, method: str, target: str, body: bytes | None, media: bytes) -> bytes:
        renewed = False
        for number in range(1, TRIES + 1):
            last = number == TRIES
            try:
                return await self._once(method, target, body, media)
            except ApiError as error:
                if error.code == 401 and not renewed and self._credentials.renewable:
                    renewed = True
                elif last or not _repeatable(error, method):
                    raise
                else:
                    await anyio.sleep(min(error.retry_after or 0.1 * 2**number, 10.0))
            except UnreachableError:
                if last or method != "GET":  # a write may have happened
                    raise
                await anyio.sleep(0.05 * 2**number)
        raise AssertionError  # pragma: no cover

    async def _once(self, method: str, target: str, body: bytes | None, media: bytes) -> bytes:
        async with self._sent(method, target, body, media, quiet=self._timeout) as answer:
            if answer.status >= 300:
                raise await self._refusal(answer)
            return await answer.body()

    async def _refusal(self, answer: StreamedResponse) -> ApiError:
        found, location = answer.header(b"retry-after"), answer.header(b"location")
        error = api_error(answer.status, await answer.body(), found, location)
        if error.code != 401 or not (expired := self._credentials.expired()):
            return error
        status = msgspec.structs.replace(error.status, message=f"{error.status.message}; {expired}")
        return status_error(status, error.retry_after)

    @asynccontextmanager
    async def _sent(
        self, method: str, target: str, body: bytes | None, media: bytes, *, quiet: float
    ) -> AsyncIterator[StreamedResponse]:
        waited = await self._bucket.take()
        headers, version = await self._headers(), self._credentials.version
        if body is not None:
            headers += [(b"Content-Type", media), (b"Content-Length", str(len(body)).encode())]
        with self.calls.timed(method, target, self.server, waited) as call:
            try:
                repeatable = method != "POST" and media != MEDIA["json"]  # the same twice is as once
                sending = self._transport.send(
                    method, target, headers, body, head=self._timeout, quiet=quiet, repeatable=repeatable
                )
                async with sending as answer:
                    call.answered(answer.status)
                    if answer.status == 401:
                        self._credentials.refused(version)  # the next request has others
                    if answer.status in AWAY:
                        self._transport.failed(answer.server)
                    else:
                        self.reach.found()
                    yield answer
            except (
                UnreachableError
            ) as error:  # a server, or what stands before it, may break off without a word
                if expired := self._credentials.expired():
                    raise UnreachableError(f"{error}; {expired}") from error
                raise

    async def _headers(self) -> Headers:
        """Of every request. Raises CredentialsError."""
        return [
            (b"User-Agent", self._agent.encode()),
            (b"Accept", b"application/json"),
            *await self._credentials.headers(),
        ]


def _repeatable(error: ApiError, method: str) -> bool:
    if error.code == 429:
        return True  # refused before anything happened
    if error.from_the_future:
        return False
    return method == "GET" and (error.code >= 500 or error.retry_after is not None)


def _json(body: object) -> bytes:
    return msgspec.json.encode(body)


def _delete_options(uid: str, version: str) -> bytes:
    wanted = {key: value for key, value in (("uid", uid), ("resourceVersion", version)) if value}
    options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
    if wanted:
        options["preconditions"] = wanted
    return _json(options)


def _target(path: str, query: Mapping[str, str] | None) -> str:
    plain = quote(path, safe="/:.-_~")
    return f"{plain}?{urlencode(query)}" if query else plain


def _whole(kind: Kind[T], body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"{kind.qualified}: {error}") from error


def _decoded(kind: Kind[T], body: bytes) -> T:
    try:
        return kind.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"{kind.qualified}: {error}") from error


async def _blocks(answer: StreamedResponse) -> AsyncGenerator[bytes]:
    """The lines of a watch, those that came together as one; half a line waits for its end."""
    held = b""
    while part := await answer.part():
        data = held + part if held else part
        begin, end = 0, data.rfind(b"\n") + 1
        while begin < end:
            cut = end
            if end - begin > BLOCK:  # at the last end of a line within, or the first one after
                cut = data.rfind(b"\n", begin, begin + BLOCK) + 1 or data.index(b"\n", begin) + 1
            yield data[begin:cut]
            begin = cut
        held = data[end:]
        if len(held) > LONGEST_LINE:
            raise MalformedError(f"watch: an event of more than {LONGEST_LINE} bytes")
