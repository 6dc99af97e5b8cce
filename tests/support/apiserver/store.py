"""The store: objects, each change with a number, and what a watch needs of the past."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import NamedTuple

from tests.support.apiserver.errors import Obj, Resource

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""


class Event(NamedTuple):
    """One change of one object."""

    revision: int
    type: str
    """ADDED, MODIFIED or DELETED."""
    key: Key
    obj: Obj
    """The object after the change; of a deletion its last state, with the deletion's version."""
    previous: Obj | None


class Collection:
    """The objects of one resource, with their history."""

    def __init__(self) -> None:
        self.objects: dict[Key, Obj] = {}
        self.events: list[Event] = []
        self.floor = 0
        """Events up to this revision are forgotten."""
        self.cache_floor = 0
        """Before this revision not even the cache has a snapshot."""
        self.ended = False
        """Whether nothing listens on the resource any more."""
        self.changed = asyncio.Event()
        self._order: list[Key] | None = None

    def order(self) -> list[Key]:
        """The keys in the order of lists."""
        if self._order is None:
            self._order = sorted(self.objects)
        return self._order

    def put(self, key: Key, obj: Obj) -> Obj | None:
        """Keep an object; the one before."""
        previous = self.objects.get(key)
        if previous is None:
            self._order = None
        self.objects[key] = obj
        return previous

    def pop(self, key: Key) -> Obj:
        """Forget an object; it."""
        self._order = None
        return self.objects.pop(key)

    def snapshot_floor(self, *, cached: bool) -> int:
        """The oldest revision a list can be of: the cache outlives a compaction of the store."""
        return self.cache_floor if cached else self.floor

    def end(self) -> None:
        """End every watch."""
        self.ended = True
        self.changed.set()

    def since(self, revision: int) -> list[Event]:
        """What happened after a revision."""
        return self.events[bisect_right(self.events, revision, key=lambda event: event.revision) :]

    def at(self, revision: int) -> dict[Key, Obj]:
        """The objects as they were."""
        objects = dict(self.objects)
        for event in reversed(self.since(revision)):
            if event.previous is None:
                objects.pop(event.key, None)
            else:
                objects[event.key] = event.previous
        return objects


class Store:
    """Every object of a cluster, under one counter of revisions."""

    def __init__(self) -> None:
        self.revision = 100
        self._collections: dict[Resource, Collection] = {}

    def of(self, resource: Resource) -> Collection:
        """The objects of a resource."""
        if (found := self._collections.get(resource)) is None:
            found = self._collections[resource] = Collection()
        return found

    def get(self, resource: Resource, key: Key) -> Obj | None:
        """One object."""
        return self.of(resource).objects.get(key)

    def bump(self) -> int:
        """A revision that changes nothing, as the server's own lease makes them."""
        self.revision += 1
        return self.revision

    def put(self, resource: Resource, key: Key, obj: Obj) -> Obj:
        """Create or change an object; it as stored, with its version."""
        stored = self._versioned(obj)
        collection = self.of(resource)
        previous = collection.put(key, stored)
        self._notify(collection, "MODIFIED" if previous else "ADDED", key, stored, previous)
        return stored

    def delete(self, resource: Resource, key: Key, last: Obj | None = None) -> Obj:
        """Remove an object; its last state, or the one given, with the version of the deletion."""
        collection = self.of(resource)
        previous = collection.pop(key)
        last = self._versioned(previous if last is None else last)
        self._notify(collection, "DELETED", key, last, previous)
        return last

    def compact(self, revision: int | None = None) -> None:
        """Forget the past up to a revision, that of the present by default."""
        upto = self.revision if revision is None else revision
        for collection in self._collections.values():
            collection.floor = max(collection.floor, upto)

    def forget(self) -> None:
        """What a restart forgets: the caches begin at the present."""
        for collection in self._collections.values():
            collection.floor = collection.cache_floor = self.revision
            collection.events = []

    def drop(self, resource: Resource) -> None:
        """A resource is served no more: its watches end."""
        if (found := self._collections.pop(resource, None)) is not None:
            found.end()

    def _versioned(self, obj: Obj) -> Obj:
        version = str(self.bump())
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}}

    def _notify(self, into: Collection, kind: str, key: Key, obj: Obj, previous: Obj | None) -> None:
        into.events.append(Event(self.revision, kind, key, obj, previous))
        into.changed.set()
        into.changed = asyncio.Event()
