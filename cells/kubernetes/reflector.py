"""Keeps a table equal to one kind of objects of an API server: list, watch, and again after trouble.

Source: lists and watches through Client, fills Table[T].
Source: Kubernetes API concepts (efficient detection of changes; watch bookmarks; streaming lists), KEP-3157.

What is known stays in force whatever happens: a table changes only by a server's event about an object, or by
a list that came whole.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from cells.kubernetes.client.client import Client, WatchEvent, events
from cells.kubernetes.client.errors import (
    ApiError,
    ExpiredError,
    KubernetesError,
    MalformedError,
    NotFoundError,
    ServerStatus,
    UnreachableError,
    status_error,
)
from cells.kubernetes.objects.kind import Kind, Object, decode
from cells.kubernetes.sink import Sink
from lifecycle.jobs import TimeSlice

__all__ = ["Reflector"]


T = TypeVar("T", bound=Object)
Part = TypeVar("Part")

PAGE: Final = 500
"""Objects of one page: a few milliseconds of decoding."""
WATCH_SECONDS: Final = (300, 600)
"""How long one watch lasts, chosen at random, so that many do not end together."""
SHORTEST: Final = 1.0
"""Seconds that a watch without an event lasts; an earlier end counts as a failure, as in client-go."""
SILENCE: Final = 30.0
"""Seconds beyond its end after which a watch counts as broken."""
PRESENT: Final = frozenset({"ADDED", "MODIFIED"})
INITIAL_END: Final = "k8s.io/initial-events-end"
REFUSALS: Final = 3
"""Failures in a row after which a watch that is answered 500 is thought to be refused for its version."""
LONGEST_RETRY: Final = 60.0
"""Seconds that a server may have a kind wait before it is asked for again (Retry-After)."""
ABSENT_PAUSE: Final = 10.0
"""Seconds between two checks for a kind that is not served."""


class HeadMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Version, name and namespace of an object."""

    resource_version: str = ""
    name: str = ""
    namespace: str = ""


class Head(msgspec.Struct, frozen=True, gc=False):
    """What is read of an object that no longer exists, or cannot be read whole."""

    metadata: HeadMeta = HeadMeta()


class BookmarkMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Version of a bookmark, and the annotation that marks the end of the initial events."""

    resource_version: str = ""
    annotations: dict[str, str] | None = None


class Bookmark(msgspec.Struct, frozen=True, gc=False):
    """What is read of a bookmark."""

    metadata: BookmarkMeta = BookmarkMeta()


_HEAD: Final = msgspec.json.Decoder(Head)
_BOOKMARK: Final = msgspec.json.Decoder(Bookmark)
_STATUS: Final = msgspec.json.Decoder(ServerStatus)
_RAW_LIST: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)


class Reflector(Generic[T]):
    """Lists a kind and watches it, for ever."""

    def __init__(
        self,
        client: Client,
        kind: Kind[T],
        sink: Sink[T],
        *,
        query: dict[str, str] | None = None,
        namespace: str = "",
        first_pause: float = 0.2,
        longest_pause: float = 30.0,
    ) -> None:
        self._client = client
        self._kind = kind
        self._sink = sink
        self._query = query or {}
        self._namespace = namespace
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._streams = True
        """Whether the server is thought to list by a watch."""
        self._version = ""
        self._doubted = False
        """Whether the server may be another one than the version is of: it was away, or stopped."""
        self._failures = 0
        """Requests in a row that a server refused."""
        self._unanswered = 0
        """Requests in a row, since a server sent something, that none answered."""
        self._expired = 0
        """Lists and watches in a row, since a watch brought something, that were refused as too old."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self._turn()
            except KubernetesError as error:
                await self._after(error)

    async def _turn(self) -> None:
        """One list, if there is need of it, and one watch."""
        if self._version and self._doubted:
            await self._confirm()
        if not self._version:
            await self._list()
        self._doubted = False
        await self._watch()

    async def _confirm(self) -> None:
        """See whether the store has come as far as what is known of it.

        One that was replaced by an older copy, or an empty one, would let a watch wait in silence until it
        has as many changes behind it as the earlier.
        """
        query = {
            **self._query,
            "limit": "1",
            "resourceVersion": self._version,
            "resourceVersionMatch": "NotOlderThan",
        }
        try:
            await self._client.page(self._kind, query, self._namespace)
        except ApiError as error:
            if not error.from_the_future:
                raise
            self._version = ""

    async def _after(self, error: KubernetesError) -> None:
        """What follows from a failure: what to do next, and when."""
        if isinstance(error, ExpiredError):
            self._version = ""
            self._expired += 1
            if self._expired == 1:  # ordinary: a restart of the server forgets old versions
                return
        if isinstance(error, NotFoundError):
            self._version = ""
            self._sink.absent()
            self._failures = self._unanswered = 0
            await anyio.sleep(ABSENT_PAUSE * (0.5 + random.random()))  # noqa: S311
            return
        if isinstance(error, MalformedError) or (isinstance(error, ApiError) and error.code == 400):
            self._version = ""  # who knows what was missed
        if isinstance(error, ApiError) and error.code == 500 and self._failures >= REFUSALS:
            self._version = ""  # a version that cannot be read is 500 on a watch
        self._sink.failed(error)
        if isinstance(error, UnreachableError):
            self._doubted = True
            self._unanswered += 1
            in_a_row = self._unanswered
        else:  # a server is back: what it refuses is asked again soon, however long there was none
            self._unanswered = 0
            self._failures += 1
            in_a_row = max(self._failures, self._expired - 1)
        pause = min(self._longest_pause, self._first_pause * 2 ** min(in_a_row - 1, 16))
        pause *= 0.5 + random.random()  # noqa: S311  # spreads load, guards no secret
        if isinstance(error, ApiError) and error.retry_after is not None:
            after = min(error.retry_after, LONGEST_RETRY) * (1 + random.random() / 4)  # noqa: S311
            pause = max(pause if self._failures > 1 else 0.0, after)
        await self._client.reach.pause(pause)

    # ---- lists

    async def _list(self) -> None:
        if self._streams:
            try:
                if await self._stream():
                    return
            except ApiError as error:
                if error.code not in {400, 422, 403, 405}:
                    raise
                self._streams = False  # an older server, or one that has it switched off
        try:
            await self._pages({"limit": str(PAGE)})
        except ExpiredError:
            await self._pages({})  # its versions go faster than pages come: all in one answer

    async def _pages(self, limit: dict[str, str]) -> None:
        """A list, page by page; it counts only when it came whole."""
        found: dict[Any, T] = {}
        query = {**self._query, **limit}
        broken: list[str] = []
        while True:
            page, version, following = self._decoded(
                await self._client.page(self._kind, query, self._namespace), broken
            )
            found.update((row.key, row) for row in page)
            if not following:
                break
            query["continue"] = following
            await anyio.lowlevel.checkpoint()
        await self._sink.listed(found, broken)
        self._version = version
        self._failures = self._unanswered = 0

    def _decoded(self, body: bytes, broken: list[str]) -> tuple[list[T], str, str]:
        """The rows of a page, its version, and where it goes on."""
        try:
            whole = self._kind.page_decoder.decode(body)
        except msgspec.ValidationError:
            return self._one_by_one(body, broken)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedError(f"list of {self._kind.qualified}: {error}") from error
        rows = [self._kind.stored(row) for row in whole.items or ()]
        return rows, whole.metadata.resource_version, whole.metadata.continue_

    def _one_by_one(self, body: bytes, broken: list[str]) -> tuple[list[T], str, str]:
        """The same when some object does not follow its definition: it keeps its last good row."""
        try:
            parts = _RAW_LIST.decode(body)
            head = msgspec.json.decode(parts["metadata"], type=dict[str, Any])
            items = _RAW_ITEMS.decode(parts.get("items", msgspec.Raw(b"[]"))) or []
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
            raise MalformedError(f"list of {self._kind.qualified}: {error}") from error
        rows = [row for item in items if (row := self._row(item, broken)) is not None]
        return rows, str(head.get("resourceVersion") or ""), str(head.get("continue") or "")

    def _row(self, raw: msgspec.Raw, broken: list[str]) -> T | None:
        try:
            row: T = self._kind.stored(self._kind.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            known, name = self._last_good(raw)
            broken.append(f"{name}: {error}")
            return known
        return row

    def _last_good(self, raw: msgspec.Raw) -> tuple[T | None, str]:
        try:
            metadata = decode(raw, _HEAD).metadata
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, f"{self._kind.plural}/?"
        name = f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name
        return self._sink.known((metadata.namespace, metadata.name)), f"{self._kind.plural}/{name}"

    async def _stream(self) -> bool:
        """A list as the beginning of a watch; whether it came whole, for a proxy in between may cut it short.

        Raises ApiError when the server does not know of it.
        """
        query = {
            **self._query,
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS[0]),
        }
        found: dict[Any, T] = {}
        broken: list[str] = []
        time_slice = TimeSlice()
        async with self._client.watch(self._kind, query, self._namespace, silence=SILENCE) as blocks:
            async for block in blocks:
                if (rows := self._present(block)) is not None:
                    found.update(rows)
                    await time_slice.pause()
                    continue
                for event in events(block):
                    if event.type == "ERROR":
                        raise _refusal(event)
                    if event.type != "BOOKMARK":
                        self._gather(event, found, broken)
                        continue
                    metadata = _object_of(event, _BOOKMARK).metadata
                    if (metadata.annotations or {}).get(INITIAL_END) == "true":
                        await self._sink.listed(found, broken)
                        self._version = metadata.resource_version
                        self._failures = self._unanswered = 0
                        return True  # the rest is the ordinary watch's
                await time_slice.pause()
        return False

    def _present(self, block: bytes) -> dict[Any, T] | None:
        """The rows of a block that has only existing, readable objects.

        It is read in one go. Of any other block None: it is looked at event by event.
        """
        stored, rows = self._kind.stored, dict[Any, T]()
        try:
            for one in self._kind.present_decoder.decode_lines(block):
                row = stored(one.object)
                rows[row.key] = row
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return rows or None

    def _gather(self, event: WatchEvent, found: dict[Any, T], broken: list[str]) -> None:
        if event.type == "DELETED":
            metadata = _object_of(event, _HEAD).metadata
            key = (metadata.namespace, metadata.name)
            found.pop(key, None)
            self._mended(key, broken)
        else:
            self._put(event, found, broken)

    def _put(self, event: WatchEvent, rows: dict[Any, Any], broken: list[str]) -> None:
        """One more object among these; of one that cannot be read, what is among them stays."""
        before = len(broken)
        row = self._row(event.object, broken)
        if row is None:
            return
        if len(broken) > before:
            rows.setdefault(row.key, row)
        else:
            rows[row.key] = row
            self._mended(row.key, broken)

    def _mended(self, key: tuple[str, str], broken: list[str]) -> None:
        """What was wrong with an object before is so no more."""
        if broken:
            name = "/".join(part for part in (self._kind.plural, *key) if part)
            broken[:] = [one for one in broken if not one.startswith(f"{name}: ")]

    # ---- watches

    async def _watch(self) -> None:
        seconds = random.randint(*WATCH_SECONDS)  # noqa: S311
        query = {
            **self._query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        async with self._client.watch(
            self._kind, query, self._namespace, silence=seconds + SILENCE
        ) as blocks:
            self._sink.watching()
            time_slice, began = TimeSlice(), time.monotonic()
            silent = True
            async for block in blocks:
                if (rows := self._present(block)) is not None:
                    version = _object_of(_last(block), _HEAD).metadata.resource_version
                    self._sink.change(rows)
                    self._version = version or self._version
                else:
                    self._take(events(block))
                self._failures = self._unanswered = self._expired = 0
                silent = False
                await time_slice.pause()
            lasted = time.monotonic() - began
        self._doubted |= lasted < seconds - 1  # a server ended it that stops
        if silent and lasted < SHORTEST:
            raise UnreachableError("the server ended a watch at once")

    def _take(self, batch: list[WatchEvent]) -> None:
        """All events of a block at once. Raises the ERROR among them, once the rest is taken."""
        refusal: KubernetesError | None = None
        rows: dict[Any, T | None] = {}
        broken: list[str] = []
        last: WatchEvent | None = None
        for event in batch:
            if event.type == "ERROR":
                refusal = _refusal(event)
                break
            if event.type == "DELETED":
                metadata = _object_of(event, _HEAD).metadata
                key = (metadata.namespace, metadata.name)
                rows[key] = None
                self._mended(key, broken)
            elif event.type in PRESENT:
                self._put(event, rows, broken)
            elif event.type != "BOOKMARK":
                refusal = MalformedError(f"watch of {self._kind.qualified}: an event {event.type!r}")
                break
            last = event
        version = _object_of(last, _HEAD).metadata.resource_version if last is not None else ""
        self._sink.change(rows, broken)
        self._version = version or self._version
        if refusal is not None:
            raise refusal


def _last(block: bytes) -> WatchEvent:
    """The last event of a block with events that are known to be sound."""
    whole = block.rstrip()
    return events(whole[whole.rfind(b"\n") + 1 :])[0]


def _refusal(event: WatchEvent) -> KubernetesError:
    try:
        return status_error(decode(event.object, _STATUS))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return MalformedError(f"watch: an error that is not a Status: {error}")


def _object_of(event: WatchEvent, decoder: msgspec.json.Decoder[Part]) -> Part:
    try:
        return decode(event.object, decoder)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"watch: {error}") from error
