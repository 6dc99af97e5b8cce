"""A client of the Kubernetes API: reads, watches, writes.

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
    from cells.kubernetes.client.http import FullResponse, Stream

__all__ = ["Client", "WatchEvent", "events"]


T = TypeVar("T", bound=Object)
Body = Mapping[str, Any]
Change = Literal["json", "merge"]

MEDIA: Final[Mapping[Change, bytes]] = {
    "json": b"application/json-patch+json",
    "merge": b"application/merge-patch+json",
}
JSON: Final = b"application/json"
MAX_ATTEMPTS: Final = 5
"""Number of attempts for a request that may be repeated."""
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})
"""Statuses of an unavailable server, or of a proxy before it: the client switches to the next server."""
MAX_EVENT_SIZE: Final = 16 * 1024 * 1024
"""Maximum bytes of one event; etcd accepts objects of up to 1.5 MiB."""


BLOCK_SIZE: Final = 64 * 1024
"""Bytes of events that are processed at once, some milliseconds of work; a longer event is one block."""


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """One line of a watch."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


_EVENT = msgspec.json.Decoder(WatchEvent)


def events(lines: bytes) -> list[WatchEvent]:
    """Decode the events of lines, but not their objects. Raises MalformedError."""
    try:
        return _EVENT.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"watch: {error}") from error


class Client:
    """Sends rate-limited requests to the API servers, and repeats a request if that is safe."""

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
        self.reachability = transport.reachability

    @property
    def server(self) -> str:
        """The current server."""
        return self._transport.server

    @property
    def manager(self) -> str:
        """The field manager of writes."""
        return self._agent.partition("/")[0]

    async def probe(self) -> None:
        """Run forever: while no server answers, probe for one; an answer wakes those who wait."""
        await self.reachability.probe(self._healthz)

    async def _healthz(self) -> None:
        with contextlib.suppress(KubernetesError):  # any status is an answer; a missing one is recorded
            await self._once("GET", "/healthz", None, b"")

    async def heartbeat(self, silence: float) -> None:
        """Probe the server if it has been silent for so many seconds. Raises KubernetesError.

        Without an answer every connection is replaced: watches on a dead connection would otherwise wait for
        their timeout. There is no second attempt, since it could succeed on a new connection and leave the
        dead one. A refusal by the server is an answer.
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
        """Close every connection, so that watches start again on new ones."""
        await self._transport.reset()

    # ---- reading

    async def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        """Read an object. Raises NotFoundError, ApiError, UnreachableError."""
        return _decoded(kind, await self.raw("GET", kind.path(namespace, name)))

    async def whole(self, kind: Kind[T], name: str, namespace: str = "") -> dict[str, Any]:
        """Read an object with all its fields.

        Raises NotFoundError, ApiError, MalformedError, UnreachableError.
        """
        return _whole(kind, await self.raw("GET", kind.path(namespace, name)))

    async def page(self, kind: Kind[T], query: Mapping[str, str], namespace: str = "") -> bytes:
        """Read one page of a list as bytes. Raises ExpiredError, ApiError, UnreachableError."""
        return await self.raw("GET", kind.path(namespace), query)

    @asynccontextmanager
    async def watch(
        self, kind: Kind[T], query: Mapping[str, str], namespace: str = "", *, silence: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch that yields blocks of complete lines, an event each; ``silence`` seconds end it.

        The head of the answer has the usual timeout, since servers send it before the first event. Raises
        ApiError, UnreachableError, and while events are read MalformedError.
        """
        target = _target(kind.path(namespace), {"watch": "1", **query})
        async with self._sent("GET", target, None, b"", quiet=silence) as answer:
            if answer.status != 200:
                raise await self._refusal(answer)
            blocks = _line_blocks(answer)
            async with aclosing(blocks):
                yield blocks

    # ---- writing

    async def create(self, kind: Kind[T], obj: Body, namespace: str = "") -> T:
        """Create an object. Raises ConflictError (``exists``), ApiError, UnreachableError."""
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
        """Read, change and write an object; repeat after a conflict.

        ``change`` returns None for no change.

        Raises NotFoundError, ConflictError after too many attempts, ApiError, UnreachableError.
        """
        for left in reversed(range(MAX_ATTEMPTS)):
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
        """Replace an object at the resourceVersion in its metadata; return the written object, whole.

        Raises NotFoundError, ConflictError if the object has changed in between, ApiError, UnreachableError.
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
        """Patch an object. A merge patch may have a resourceVersion as a precondition.

        Raises NotFoundError, ConflictError, ApiError, UnreachableError.
        """
        path = kind.path(namespace, name, subresource)
        return _decoded(kind, await self.raw("PATCH", path, self._query, _json(body), MEDIA[how]))

    async def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", version: str = ""
    ) -> bool:
        """Delete an object; return whether it existed. ``uid`` and ``version`` are preconditions.

        Raises ConflictError if a precondition fails, ApiError, UnreachableError.
        """
        try:
            await self.raw("DELETE", kind.path(namespace, name), None, _delete_options(uid, version))
        except NotFoundError:
            return False
        return True

    def deletion(self, kind: Kind[T], name: str, *, uid: str = "", version: str = "") -> WriteRequest:
        """Return the request of delete() for a cluster-scoped object, for send_all()."""
        return WriteRequest("DELETE", _target(kind.path("", name), None), _delete_options(uid, version), JSON)

    def merge(self, kind: Kind[T], name: str, body: Body) -> WriteRequest:
        """Return the request of patch() for a cluster-scoped object, for send_all()."""
        target = _target(kind.path("", name), self._query)
        return WriteRequest("PATCH", target, _json(body), MEDIA["merge"])

    async def send_all(self, requests: Sequence[WriteRequest]) -> list[KubernetesError | None]:
        """Pipeline repeatable writes on one connection; return the error of each, or None for success.

        A request that is throttled, or has no answer before the connection ends, is sent again separately.
        """
        waited = [await self._bucket.take() for _ in requests]
        server, began, quiet = self.server, time.monotonic(), self._timeout
        answers: Sequence[FullResponse] = ()
        failure: KubernetesError | None = None
        try:
            answers = await self._transport.send_all(requests, await self._headers(), quiet=quiet)
        except KubernetesError as error:
            failure = error
        if any(answer.status in UNAVAILABLE_STATUSES for answer in answers):
            self._transport.failed(server)
        elif answers:
            self.reachability.record_answer()
        errors: list[KubernetesError | None] = [failure] * len(requests)
        paths = {one.method: normalised(one.target) for one in requests}
        for number, (request, delayed) in enumerate(zip(requests, waited, strict=True)):
            answer = answers[number] if number < len(answers) else None
            status, at = (answer.status, answer.at) if answer is not None else (None, began)
            self.calls.note(request.method, paths[request.method], server, delayed, status, at - began)
            if answer is not None and answer.status >= 300:
                errors[number] = api_error(answer.status, answer.body, answer.retry_after.decode("latin-1"))
        return errors if failure is not None else await self._resend(requests, errors, len(answers))

    async def _resend(
        self, requests: Sequence[WriteRequest], errors: list[KubernetesError | None], answered: int
    ) -> list[KubernetesError | None]:
        """Send requests again one by one, if that may help, until no server answers."""
        away: UnreachableError | None = None
        for number, request in enumerate(requests):
            error = errors[number]
            if number < answered and not (isinstance(error, ApiError) and error.code in {401, 429}):
                continue
            errors[number] = away
            try:
                if away is None:
                    await self._repeated(request.method, request.target, request.body, request.media)
            except UnreachableError as found:
                errors[number] = away = found
            except KubernetesError as found:
                errors[number] = found
        return errors

    @property
    def _query(self) -> dict[str, str]:
        """Query parameters of a write."""
        return {"fieldManager": self.manager}

    # ---- requests

    async def upgrade(self) -> tuple[Stream, str, Headers]:
        """Open a separate connection for a request that changes its protocol, such as to a WebSocket.

        Returns the stream, the prefix of the request target, and headers; the caller closes the stream.
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
        """Send a request and return the body. Repeats throttled requests, and reads without an answer.

        Raises ApiError and its subclasses, UnreachableError, CredentialsError.
        """
        return await self._repeated(method, _target(path, query), body, media)

    async def _repeated(self, method: str, target: str, body: bytes | None, media: bytes) -> bytes:
        renewed = False
        for number in range(1, MAX_ATTEMPTS + 1):
            last = number == MAX_ATTEMPTS
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
                if last or method != "GET":  # the server may have executed a write
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
                repeatable = method != "POST" and media != MEDIA["json"]  # these are idempotent
                sending = self._transport.send(
                    method, target, headers, body, head=self._timeout, quiet=quiet, repeatable=repeatable
                )
                async with sending as answer:
                    call.answered(answer.status)
                    if answer.status == 401:
                        self._credentials.refused(version)  # the next request reads them again
                    if answer.status in UNAVAILABLE_STATUSES:
                        self._transport.failed(answer.server)
                    else:
                        self.reachability.record_answer()
                    yield answer
            except (
                UnreachableError
            ) as error:  # a server or load balancer may close a connection for an expired certificate
                if expired := self._credentials.expired():
                    raise UnreachableError(f"{error}; {expired}") from error
                raise

    async def _headers(self) -> Headers:
        """Headers of every request. Raises CredentialsError."""
        return [
            (b"User-Agent", self._agent.encode()),
            (b"Accept", b"application/json"),
            *await self._credentials.headers(),
        ]


def _repeatable(error: ApiError, method: str) -> bool:
    if error.code == 429:
        return True  # the server did not execute it
    if error.resource_version_too_large:
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


async def _line_blocks(answer: StreamedResponse) -> AsyncGenerator[bytes]:
    """Yield the complete lines of a watch, grouped as they arrive; an incomplete line waits for its end."""
    partial = b""
    while part := await answer.part():
        data = partial + part if partial else part
        begin, end = 0, data.rfind(b"\n") + 1
        while begin < end:
            cut = end
            if end - begin > BLOCK_SIZE:  # after the last line within the block, or after a longer line
                cut = data.rfind(b"\n", begin, begin + BLOCK_SIZE) + 1 or data.index(b"\n", begin) + 1
            yield data[begin:cut]
            begin = cut
        partial = data[end:]
        if len(partial) > MAX_EVENT_SIZE:
            raise MalformedError(f"watch: an event of more than {MAX_EVENT_SIZE} bytes")
