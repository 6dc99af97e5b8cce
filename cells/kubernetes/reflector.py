"""Keeps a table equal to the objects of one kind on an API server: list, watch, recovery from errors.

Objects come from a Client, rows go to a Sink; KubernetesAPI runs a Reflector for each kind. Errors delete
nothing: a table changes only by a watch event of an object, or by a complete list.

Source: client-go/tools/cache/reflector.go; Kubernetes API concepts (efficient detection of changes; watch
bookmarks; streaming lists), KEP-3157.
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

PAGE_SIZE: Final = 500
"""Objects per page: a few milliseconds of decoding."""
WATCH_SECONDS: Final = (300, 600)
"""Duration of a watch, chosen at random, so that watches do not all end together."""
MIN_WATCH_SECONDS: Final = 1.0
"""Minimum seconds of a watch without an event; an earlier end counts as a failure, as in client-go."""
WATCH_GRACE: Final = 30.0
"""Seconds after its requested end when a watch counts as broken."""
PRESENT: Final = frozenset({"ADDED", "MODIFIED"})
INITIAL_END: Final = "k8s.io/initial-events-end"
REFUSALS_BEFORE_RELIST: Final = 3
"""Consecutive refusals after which a 500 is attributed to the resourceVersion of the watch."""
MAX_RETRY_AFTER: Final = 60.0
"""Maximum seconds of a server's Retry-After that the reflector waits."""
ABSENT_PAUSE: Final = 10.0
"""Seconds between two checks for a kind that is not served."""


class HeadMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Version, name and namespace of an object."""

    resource_version: str = ""
    name: str = ""
    namespace: str = ""


class Head(msgspec.Struct, frozen=True, gc=False):
    """The fields that are read of a deleted or an unreadable object."""

    metadata: HeadMeta = HeadMeta()


class BookmarkMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Version of a bookmark, and the annotation that marks the end of the initial list."""

    resource_version: str = ""
    annotations: dict[str, str] | None = None


class Bookmark(msgspec.Struct, frozen=True, gc=False):
    """The fields that are read of a bookmark."""

    metadata: BookmarkMeta = BookmarkMeta()


_HEAD: Final = msgspec.json.Decoder(Head)
_BOOKMARK: Final = msgspec.json.Decoder(Bookmark)
_STATUS: Final = msgspec.json.Decoder(ServerStatus)
_RAW_LIST: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)


class Reflector(Generic[T]):
    """Lists and watches one kind."""

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
        self._supports_streaming = True
        """Whether the server is assumed to support streaming lists."""
        self._version = ""
        self._version_uncertain = False
        """Whether the server may lack the current version, since a server stopped or did not answer."""
        self._consecutive_refusals = 0
        """Number of consecutive requests that a server refused."""
        self._consecutive_unanswered = 0
        """Number of consecutive requests without an answer."""
        self._consecutive_expired = 0
        """Number of consecutive lists and watches that were refused with 410."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._list_and_watch()
            except KubernetesError as error:
                await self._handle_failure(error)

    async def _list_and_watch(self) -> None:
        """List if there is no current version, then run one watch."""
        if self._version and self._version_uncertain:
            await self._check_version()
        if not self._version:
            await self._list()
        self._version_uncertain = False
        await self._watch()

    async def _check_version(self) -> None:
        """Drop the current version if the server's store has not reached it.

        A store that was restored from an older copy, or is empty, would accept a watch at this version, and
        send no event until it has reached the version.
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
            if not error.resource_version_too_large:
                raise
            self._version = ""

    async def _handle_failure(self, error: KubernetesError) -> None:
        """Handle a failure: choose the next step, and wait."""
        if isinstance(error, ExpiredError):
            self._version = ""
            self._consecutive_expired += 1
            if self._consecutive_expired == 1:  # expected: a restarted server has no old versions
                return
        if isinstance(error, NotFoundError):
            self._version = ""
            self._sink.absent()
            self._consecutive_refusals = self._consecutive_unanswered = 0
            await anyio.sleep(ABSENT_PAUSE * (0.5 + random.random()))  # noqa: S311
            return
        if isinstance(error, MalformedError) or (isinstance(error, ApiError) and error.code == 400):
            self._version = ""  # events may have been missed
        if (
            isinstance(error, ApiError)
            and error.code == 500
            and self._consecutive_refusals >= REFUSALS_BEFORE_RELIST
        ):
            self._version = ""  # a server answers 500 to a version that it cannot parse
        self._sink.failed(error)
        if isinstance(error, UnreachableError):
            self._version_uncertain = True
            self._consecutive_unanswered += 1
            consecutive = self._consecutive_unanswered
        else:  # a server answers again: retry soon, however long none answered
            self._consecutive_unanswered = 0
            self._consecutive_refusals += 1
            consecutive = max(self._consecutive_refusals, self._consecutive_expired - 1)
        pause = min(self._longest_pause, self._first_pause * 2 ** min(consecutive - 1, 16))
        pause *= 0.5 + random.random()  # noqa: S311  # spreads load, not a secret
        if isinstance(error, ApiError) and error.retry_after is not None:
            after = min(error.retry_after, MAX_RETRY_AFTER) * (1 + random.random() / 4)  # noqa: S311
            pause = max(pause if self._consecutive_refusals > 1 else 0.0, after)
        await self._client.reachability.pause(pause)

    # ---- lists

    async def _list(self) -> None:
        if self._supports_streaming:
            try:
                if await self._list_by_stream():
                    return
            except ApiError as error:
                if error.code not in {400, 422, 403, 405}:
                    raise
                self._supports_streaming = False  # an older server, or the feature is off
        try:
            await self._list_by_pages({"limit": str(PAGE_SIZE)})
        except ExpiredError:
            await self._list_by_pages({})  # versions expire faster than pages are read: read the list at once

    async def _list_by_pages(self, limit: dict[str, str]) -> None:
        """Read a list page by page; it takes effect only if it is complete."""
        found: dict[Any, T] = {}
        query = {**self._query, **limit}
        broken: list[str] = []
        while True:
            page, version, continue_token = self._decoded(
                await self._client.page(self._kind, query, self._namespace), broken
            )
            found.update((row.key, row) for row in page)
            if not continue_token:
                break
            query["continue"] = continue_token
            await anyio.lowlevel.checkpoint()
        await self._sink.listed(found, broken)
        self._version = version
        self._consecutive_refusals = self._consecutive_unanswered = 0

    def _decoded(self, body: bytes, broken: list[str]) -> tuple[list[T], str, str]:
        """Return the rows of a page, its version, and the token of the next page."""
        try:
            whole = self._kind.page_decoder.decode(body)
        except msgspec.ValidationError:
            return self._decode_each(body, broken)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedError(f"list of {self._kind.qualified}: {error}") from error
        rows = [self._kind.stored(row) for row in whole.items or ()]
        return rows, whole.metadata.resource_version, whole.metadata.continue_

    def _decode_each(self, body: bytes, broken: list[str]) -> tuple[list[T], str, str]:
        """Decode a page object by object; an invalid object keeps its last valid row."""
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
            last_valid, name = self._last_valid_row(raw)
            broken.append(f"{name}: {error}")
            return last_valid
        return row

    def _last_valid_row(self, raw: msgspec.Raw) -> tuple[T | None, str]:
        try:
            metadata = decode(raw, _HEAD).metadata
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, f"{self._kind.plural}/?"
        name = f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name
        return self._sink.known((metadata.namespace, metadata.name)), f"{self._kind.plural}/{name}"

    async def _list_by_stream(self) -> bool:
        """Read a streaming list; return whether it is complete, since a proxy may cut it short.

        Raises ApiError if the server does not support streaming lists.
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
        async with self._client.watch(self._kind, query, self._namespace, silence=WATCH_GRACE) as blocks:
            async for block in blocks:
                if (rows := self._decode_block(block)) is not None:
                    found.update(rows)
                    await time_slice.pause()
                    continue
                for event in events(block):
                    if event.type == "ERROR":
                        raise _status_of_error(event)
                    if event.type != "BOOKMARK":
                        self._apply_initial_event(event, found, broken)
                        continue
                    metadata = _object_of(event, _BOOKMARK).metadata
                    if (metadata.annotations or {}).get(INITIAL_END) == "true":
                        await self._sink.listed(found, broken)
                        self._version = metadata.resource_version
                        self._consecutive_refusals = self._consecutive_unanswered = 0
                        return True  # the ordinary watch follows
                await time_slice.pause()
        return False

    def _decode_block(self, block: bytes) -> dict[Any, T] | None:
        """Return the rows of a block of added and modified, valid objects, decoded at once.

        For any other block return None; the caller then decodes it event by event.
        """
        stored, rows = self._kind.stored, dict[Any, T]()
        try:
            for one in self._kind.present_decoder.decode_lines(block):
                row = stored(one.object)
                rows[row.key] = row
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return rows or None

    def _apply_initial_event(self, event: WatchEvent, found: dict[Any, T], broken: list[str]) -> None:
        if event.type == "DELETED":
            metadata = _object_of(event, _HEAD).metadata
            key = (metadata.namespace, metadata.name)
            found.pop(key, None)
            self._clear_error(key, broken)
        else:
            self._add_row(event, found, broken)

    def _add_row(self, event: WatchEvent, rows: dict[Any, Any], broken: list[str]) -> None:
        """Add an object to the rows; an invalid object keeps an earlier row."""
        before = len(broken)
        row = self._row(event.object, broken)
        if row is None:
            return
        if len(broken) > before:
            rows.setdefault(row.key, row)
        else:
            rows[row.key] = row
            self._clear_error(row.key, broken)

    def _clear_error(self, key: tuple[str, str], broken: list[str]) -> None:
        """Remove an object's earlier error."""
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
            self._kind, query, self._namespace, silence=seconds + WATCH_GRACE
        ) as blocks:
            self._sink.watching()
            time_slice, began = TimeSlice(), time.monotonic()
            no_events = True
            async for block in blocks:
                if (rows := self._decode_block(block)) is not None:
                    version = _object_of(_last_event(block), _HEAD).metadata.resource_version
                    self._sink.change(rows)
                    self._version = version or self._version
                else:
                    self._apply_events(events(block))
                self._consecutive_refusals = self._consecutive_unanswered = self._consecutive_expired = 0
                no_events = False
                await time_slice.pause()
            lasted = time.monotonic() - began
        self._version_uncertain |= lasted < seconds - 1  # the server ended it early: it may be stopping
        if no_events and lasted < MIN_WATCH_SECONDS:
            raise UnreachableError("the server ended a watch at once")

    def _apply_events(self, batch: list[WatchEvent]) -> None:
        """Apply all events of a block. Raises the ERROR event after the events before it were applied."""
        refusal: KubernetesError | None = None
        rows: dict[Any, T | None] = {}
        broken: list[str] = []
        last: WatchEvent | None = None
        for event in batch:
            if event.type == "ERROR":
                refusal = _status_of_error(event)
                break
            if event.type == "DELETED":
                metadata = _object_of(event, _HEAD).metadata
                key = (metadata.namespace, metadata.name)
                rows[key] = None
                self._clear_error(key, broken)
            elif event.type in PRESENT:
                self._add_row(event, rows, broken)
            elif event.type != "BOOKMARK":
                refusal = MalformedError(f"watch of {self._kind.qualified}: an event {event.type!r}")
                break
            last = event
        version = _object_of(last, _HEAD).metadata.resource_version if last is not None else ""
        self._sink.change(rows, broken)
        self._version = version or self._version
        if refusal is not None:
            raise refusal


def _last_event(block: bytes) -> WatchEvent:
    """Return the last event of a block of valid events."""
    whole = block.rstrip()
    return events(whole[whole.rfind(b"\n") + 1 :])[0]


def _status_of_error(event: WatchEvent) -> KubernetesError:
    try:
        return status_error(decode(event.object, _STATUS))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return MalformedError(f"watch: an error that is not a Status: {error}")


def _object_of(event: WatchEvent, decoder: msgspec.json.Decoder[Part]) -> Part:
    try:
        return decode(event.object, decoder)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"watch: {error}") from error
