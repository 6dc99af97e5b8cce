"""Watches: what was, what comes, bookmarks, and how they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

from tests.support.apiserver import errors
from tests.support.apiserver.errors import Obj
from tests.support.apiserver.kinds import Kind
from tests.support.apiserver.options import ListOptions, version_number
from tests.support.apiserver.reads import Selects, selects
from tests.support.apiserver.store import Collection, Event

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

BEFORE_THE_END = (2.0, 1.0)
INITIAL_END = "k8s.io/initial-events-end"


class WatchEvent(NamedTuple):
    """One line of a watch; ``raw`` objects are written as they are, whatever form was asked for."""

    type: str
    obj: Obj
    raw: bool = False


class Watches:
    """Makes the events of watches."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._store = server.store

    def check(self, kind: Kind, options: ListOptions) -> None:
        """Whether the watch can begin. Raises StatusError."""
        selects(kind, options)
        version_number(options.version, watch=True)

    async def events(self, kind: Kind, namespace: str, options: ListOptions) -> AsyncIterator[WatchEvent]:
        """Everything a watch sends, until it ends."""
        stream = _Stream(self._server, kind, namespace, options)
        async for event in stream.run():
            yield event


class _Stream:
    def __init__(self, server: ApiServer, kind: Kind, namespace: str, options: ListOptions) -> None:
        self._server = server
        self._kind = kind
        self._namespace = namespace
        self._options = options
        self._selected: Selects | None = selects(kind, options)
        self._collection: Collection = server.store.of(kind.storage)
        self._loop = asyncio.get_running_loop()
        seconds = options.timeout or random.uniform(1800, 3600)  # noqa: S311
        started = self._loop.time()
        self._end = started + seconds
        self._bookmarks = [self._end - one for one in BEFORE_THE_END if options.timeout and one < seconds]
        self._next_bookmark = started + server.bookmark_every

    async def run(self) -> AsyncIterator[WatchEvent]:
        options, store = self._options, self._server.store
        asked = options.revision
        initial = options.initial_events
        if initial is None:
            initial = asked == 0
        if initial and asked > store.revision:
            await asyncio.sleep(self._server.future_wait)
            yield WatchEvent("ERROR", errors.future_version(asked, store.revision).body, True)
            return
        if initial:
            last = store.revision
            for obj in self._now():
                yield WatchEvent("ADDED", obj)
            if options.initial_events and options.bookmarks:
                yield self._bookmark(last, {INITIAL_END: "true"})
        else:
            last = asked or store.revision
            if last < self._collection.floor:
                yield WatchEvent("ERROR", self._too_old(last), True)
                return
        async for event in self._live(last):
            yield event

    def _now(self) -> list[Obj]:
        found = []
        for key in self._collection.order():
            obj = self._server.converted(self._collection.objects[key], self._kind)
            if self._mine(key[0]) and (self._selected is None or self._selected(obj)):
                found.append(obj)
        return found

    def _mine(self, namespace: str) -> bool:
        return not self._namespace or namespace == self._namespace

    def _too_old(self, asked: int) -> Obj:
        if self._kind.strategy.cached:
            return errors.expired(f"too old resource version: {asked} ({self._collection.floor})").body
        return errors.expired("The resourceVersion for the provided watch is too old.").body

    async def _live(self, last: int) -> AsyncIterator[WatchEvent]:
        while True:
            changed = self._collection.changed
            if last < self._collection.floor:
                yield WatchEvent("ERROR", self._too_old(last), True)
                return
            for event in self._collection.since(last):
                last = event.revision
                if (sent := self._event_for(event)) is not None:
                    yield sent
            if self._collection.ended:
                return
            wait = self._wait()
            if wait is None:
                return
            try:
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                # What has changed in this moment goes first: a client begins after a bookmark, not before it.
                if not changed.is_set() and self._bookmark_due():
                    yield self._bookmark(self._server.store.revision)

    def _wait(self) -> float | None:
        """Seconds until something is due; None when the watch is over."""
        now = self._loop.time()
        if now >= self._end:
            return None
        due = [self._end]
        if self._options.bookmarks:
            due += [self._next_bookmark, *self._bookmarks]
        return max(0.0, min(due) - now)

    def _bookmark_due(self) -> bool:
        now = self._loop.time()
        if not self._options.bookmarks:
            return False
        due = [at for at in self._bookmarks if at <= now]
        self._bookmarks = [at for at in self._bookmarks if at > now]
        if self._next_bookmark <= now:
            self._next_bookmark = now + self._server.bookmark_every
            return True
        return bool(due)

    def _bookmark(self, revision: int, annotations: dict[str, str] | None = None) -> WatchEvent:
        metadata: Obj = {"resourceVersion": str(revision)}
        if annotations:
            metadata["annotations"] = annotations
        obj = {"kind": self._kind.kind, "apiVersion": self._kind.api_version, "metadata": metadata}
        return WatchEvent("BOOKMARK", {**obj, **self._kind.strategy.empty})

    def _event_for(self, event: Event) -> WatchEvent | None:
        if not self._mine(event.key[0]):
            return None
        obj = self._server.converted(event.obj, self._kind)
        if self._selected is None:
            return WatchEvent(event.type, obj)
        before = event.previous is not None and self._selected(
            self._server.converted(event.previous, self._kind)
        )
        after = event.type != "DELETED" and self._selected(obj)
        if before and not after:
            last = obj if event.type == "DELETED" else self._left(event, obj)
            return WatchEvent("DELETED", last)
        if after:
            return WatchEvent("MODIFIED" if before else "ADDED", obj)
        return None

    def _left(self, event: Event, obj: Obj) -> Obj:
        old = self._server.converted(event.previous or {}, self._kind)
        version = obj["metadata"]["resourceVersion"]
        return {**old, "metadata": {**old["metadata"], "resourceVersion": version}}
