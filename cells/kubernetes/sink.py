"""Where sources write objects: tables, the state of each source, and objects that a relist lacks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Final, Generic, Literal, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from cells.base.metrics import MetricFamily, counter
from cells.kubernetes.objects.core import NODES
from cells.kubernetes.objects.kind import Key, Kind, Object
from lifecycle import Health, Logger, ReadTable, Table

__all__ = ["MissingObject", "Sink", "SourceStatus"]


# The state of each kind's source.

State = Literal["waiting", "synced", "watching", "failing", "absent"]


class SourceStatus(msgspec.Struct, frozen=True):
    """State of the source of one kind."""

    kind: str
    """``pods``, ``ciliumnodes.cilium.io``."""
    state: State
    """``waiting`` for the first list, ``watching`` (a folder: ``synced``), ``failing``, ``absent``.

    ``absent``: no server serves the kind.
    """
    objects: int
    synced: bool
    """Whether a complete list was read."""
    changed: float
    """Time of the last event, in seconds since the epoch; 0 for none."""
    error: str = ""
    broken: tuple[str, ...] = ()
    """Invalid objects, with the error; their last valid rows stay."""


# Events of sources, as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_kubernetes_events_received_total and cilium_kubernetes_events_total.


class ObjectEvents:
    """Counts created, updated and deleted objects per kind."""

    def __init__(self) -> None:
        self.received: Counter[tuple[str, str, str, str]] = Counter()
        """(kind, action, valid, equal) -> number of events."""
        self.processed: Counter[tuple[str, str, str]] = Counter()
        """(kind, action, status) -> number of events."""

    def changed(self, kind: str, rows: Mapping[Key, Object | None], known: ReadTable[Key, Any]) -> None:
        """Count rows before they are written; None is a deletion, ``known`` is the table before."""
        created = updated = same = deleted = 0
        for key, new in rows.items():
            old = known.get(key)
            if new is None:
                deleted += old is not None
            elif old is None:
                created += 1
            elif old is new or old == new:
                same += 1
            else:
                updated += 1
        for action, equal, count in (
            ("create", "false", created),
            ("update", "false", updated),
            ("update", "true", same),
            ("delete", "false", deleted),
        ):
            if count:
                self.received[kind, action, "true", equal] += count
                self.processed[kind, action, "success"] += count

    def unreadable(self, kind: str, count: int) -> None:
        """Count invalid objects."""
        if count:
            self.received[kind, "update", "false", "false"] += count
            self.processed[kind, "update", "failed"] += count


def families(events: ObjectEvents) -> Iterator[MetricFamily]:
    """Yield the metrics of events."""
    yield counter(
        "cilium_kubernetes_events_received_total",
        "Number of Kubernetes events received labeled by scope, action, valid data and equality",
        dict(events.received),
        "scope action valid equal",
    )
    yield counter(
        "cilium_kubernetes_events_total",
        "Number of Kubernetes events processed labeled by scope, action and execution result",
        dict(events.processed),
        "scope action status",
    )


# Rows that a relist lacks: most of a kind at once, because the API server's store was emptied or restored.
#
# Source: the sinks, when a relist arrives. The rows stay in the tables until the store was refilled, so that
#         an early list does not tear down a node's pods and services.
# Why:    deletions arrive as watch events. A list that lacks more than half of the current rows indicates a
#         store that was replaced by an old copy or an empty one.

SETTLE: Final = 10.0
"""Seconds without a reported object after which the store counts as refilled."""


class MissingObject(msgspec.Struct, frozen=True):
    """An object that a relist lacks; its row is retained until the store was refilled."""

    kind: str
    """``pods``, ``ciliumnodes.cilium.io``."""
    namespace: str
    name: str

    @property
    def row_key(self) -> tuple[str, str, str]:
        """Key of the row."""
        return self.kind, self.namespace, self.name


def missing_objects() -> Table[tuple[str, str, str], MissingObject]:
    """The table ``k8s-missing``."""
    return Table("k8s-missing", key=lambda one: one.row_key, indexes={"kind": lambda one: (one.kind,)})


class MissingObjects:
    """The only writer of ``k8s-missing``; deletes the rows once the store was refilled."""

    def __init__(
        self,
        table: Table[tuple[str, str, str], MissingObject],
        statuses: ReadTable[str, SourceStatus],
        health: Health,
        log: Logger,
    ) -> None:
        self.table = table
        self._statuses = statuses
        self._health = health.child("missing")
        self._log = log
        self.node = ""
        """The name of this node."""
        self._sinks: dict[str, Sink[Any]] = {}
        """The sinks of kinds with missing objects, by kind."""
        self._changed = anyio.Event()

    def add(self, sink: Sink[Any], keys: Collection[Key], listed: int) -> None:
        """Record the objects that a list of ``listed`` objects lacks."""
        kind = sink.kind.qualified
        self._sinks[kind] = sink
        with self.table.txn() as txn:
            for one in self.table.by("kind").get(kind):
                if (one.namespace, one.name) not in keys:
                    txn.delete(one.row_key)
            for namespace, name in keys:
                txn.put(MissingObject(kind, namespace, name))
        self._log.error(
            "a relist lacks most objects: keeping their rows", kind=kind, missing=len(keys), listed=listed
        )
        self._report()

    def reported(self, kind: str, keys: Collection[Key]) -> None:
        """Remove objects that the server has reported, as existing or deleted."""
        if kind not in self._sinks:
            return
        with self.table.txn() as txn:
            for namespace, name in keys:
                txn.delete((kind, namespace, name))
        self._report()

    def listed(self, kind: str) -> None:
        """Remove all objects of the kind: a list lacked few or no rows."""
        if self._sinks.pop(kind, None) is not None:
            with self.table.txn() as txn:
                for one in self.table.by("kind").get(kind):
                    txn.delete(one.row_key)
            self._report()

    async def run(self) -> None:
        """Delete the rows once the store was refilled and no more objects arrive; runs forever.

        It waits while a kind that was synced cannot be watched, since its objects are unknown. A kind that
        was never synced, such as a forbidden one, has no rows.
        """
        while True:
            changed = self._changed
            if not len(self.table):
                self._health.ok("no objects are missing")
                await changed.wait()
                continue
            with anyio.move_on_after(None if self._is_empty() else SETTLE) as quiet:
                await changed.wait()
            broken = any(one.state == "failing" and one.synced for one in self._statuses.all())
            if quiet.cancelled_caught and not broken:
                self._release()

    def _is_empty(self) -> bool:
        """Whether the store is not refilled yet: it lacks this node's own object."""
        return (NODES.qualified, "", self.node) in self.table

    def _release(self) -> None:
        kinds = {one.kind for one in self.table.all()}
        for kind in sorted(kinds):
            keys = [(one.namespace, one.name) for one in self.table.by("kind").get(kind)]
            self._log.warning("deleting rows of missing objects", kind=kind, objects=len(keys))
            self._sinks[kind].drop(keys)
        self._sinks.clear()
        with self.table.txn() as txn:
            txn.replace_all([])

    def _report(self) -> None:
        if count := len(self.table):
            kinds = ", ".join(sorted({one.kind for one in self.table.all()}))
            self._health.degraded(f"a relist lacks {count} objects ({kinds}): their rows are retained")
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


# The writer of one kind's table, and of the row with its source's state.

T = TypeVar("T", bound=Object)

PART = 500
"""Objects of a list that are written in one transaction."""
MOST_REPORTED = 10
"""Maximum number of invalid objects listed per kind."""


class Sink(Generic[T]):
    """The only writer of a table of objects."""

    def __init__(
        self,
        kind: Kind[T],
        table: Table[tuple[str, str], T],
        statuses: Table[str, SourceStatus],
        health: Health,
        log: Logger,
        missing_objects: MissingObjects | None = None,
        events: ObjectEvents | None = None,
        namespace: str = "",
    ) -> None:
        self.namespace = namespace
        """The namespace of the objects; empty for all namespaces."""
        self._kind = kind
        self._events = events or ObjectEvents()
        self._missing_objects = missing_objects
        self._table = table
        self._statuses = statuses
        self._parent = health
        self._log = log
        self._first = table.initializer(f"first list of {kind.qualified}")
        self._broken: dict[str, str] = {}
        self._synced = False

    @property
    def kind(self) -> Kind[T]:
        """The kind of the objects."""
        return self._kind

    @cached_property
    def _health(self) -> Health:
        return self._parent.child(self._kind.plural)

    def begin(self) -> None:
        """Publish the source's status: there is a source."""
        self._status(SourceStatus(self._kind.qualified, "waiting", 0, False, 0.0))
        self._health.ok("waiting for the first list")

    def without_source(self) -> None:
        """Mark the table as initialized: there is no source."""
        self._first.done()

    def known(self, key: Key) -> T | None:
        """Return the current row of a key."""
        return self._table.get(key)

    def replace(self, rows: Mapping[Key, T], broken: Sequence[str] = (), state: State = "watching") -> None:
        """Replace all rows by those of a complete list."""
        self._count({**dict.fromkeys(self._missing(rows)), **rows}, broken)
        with self._table.txn() as txn:
            txn.replace_all(rows.values())
        self._complete(broken, state)

    def _missing(self, rows: Mapping[Key, T]) -> list[Key]:
        """Return the keys of current rows that are not in ``rows``."""
        return [row.key for row in self._table.all() if row.key not in rows]

    def _count(self, rows: Mapping[Key, T | None], broken: Sequence[str]) -> None:
        self._events.changed(self._kind.kind, rows, self._table)
        self._events.unreadable(self._kind.kind, len(broken))

    def _complete(self, broken: Sequence[str], state: State) -> None:
        self._broken = dict(_split(one) for one in broken)
        self._synced = True
        self._first.done()
        self._record_state(state)

    async def listed(self, rows: Mapping[Key, T], broken: Sequence[str] = ()) -> None:
        """Apply a server's complete list.

        If it lacks most of the current rows, the missing rows stay for now.

        A long list is written in parts, with a yield to the event loop in between: new and changed rows
        first, deletions last.
        """
        removed = self._missing(rows)
        if self._missing_objects is None or not self._synced or 2 * len(removed) <= len(self._table):
            rest = iter(rows.items())
            for _ in range((len(rows) - 1) // PART):
                part = dict(islice(rest, PART))
                self._count(part, ())
                with self._table.txn() as txn:
                    for row in part.values():
                        txn.put(row)
                if self._missing_objects is not None:  # so that run() does not delete them meanwhile
                    self._missing_objects.reported(self._kind.qualified, part.keys())
                await anyio.lowlevel.checkpoint()
            last = dict(rest)
            self._count({**last, **dict.fromkeys(removed)}, broken)
            with self._table.txn() as txn:
                for row in last.values():
                    txn.put(row)
                for key in removed:
                    txn.delete(key)
            self._complete(broken, "watching")
            if self._missing_objects is not None:
                self._missing_objects.listed(self._kind.qualified)
            return
        self._broken.clear()
        self.change(rows, broken)
        self._missing_objects.add(self, removed, len(rows))

    def drop(self, keys: Collection[Key]) -> None:
        """Delete rows of missing objects."""
        self._count(dict.fromkeys(keys), ())
        with self._table.txn() as txn:
            for key in keys:
                txn.delete(key)
        self._record_state("watching")

    def change(
        self, rows: Mapping[Key, T | None], broken: Sequence[str] = (), state: State = "watching"
    ) -> None:
        """Put and delete rows; None deletes."""
        self._count(rows, broken)
        with self._table.txn() as txn:
            for key, row in rows.items():
                if row is None:
                    txn.delete(key)
                else:
                    txn.put(row)
        for key in rows:
            self._broken.pop(_name(self._kind, key), None)
        self._broken.update(_split(one) for one in broken)
        if self._missing_objects is not None and rows:
            self._missing_objects.reported(self._kind.qualified, rows.keys())
        self._record_state(state)

    def watching(self) -> None:
        """Record that a watch has started."""
        self._record_state("watching")

    def absent(self) -> None:
        """Record that no server serves the kind: the table is initialized."""
        self._first.done()
        before = self._now
        self._status(msgspec.structs.replace(before, state="absent", error="", objects=len(self._table)))
        self._health.ok("not served")

    def failed(self, error: Exception) -> None:
        """Record an error of the source; all rows stay."""
        before = self._now
        text = str(error) or type(error).__name__
        if before.error != text:
            self._log.warning("objects cannot be watched", kind=self._kind.qualified, error=text)
        self._status(msgspec.structs.replace(before, state="failing", error=text, objects=len(self._table)))
        heard = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(before.changed)) if before.changed else ""
        self._health.degraded(
            f"{self._kind.qualified}: {text}; {f'last event {heard}' if heard else 'no event yet'}"
        )

    @property
    def _now(self) -> SourceStatus:
        found = self._statuses.get(self._kind.qualified)
        return found or SourceStatus(self._kind.qualified, "waiting", 0, False, 0.0)

    def _record_state(self, state: State) -> None:
        reported = tuple(f"{name}: {why}" for name, why in sorted(self._broken.items()))
        before = self._now
        for one in reported:
            if one not in before.broken:
                self._log.warning("object cannot be read", object=one)
        status = SourceStatus(
            self._kind.qualified,
            state,
            len(self._table),
            self._synced,
            time.time(),
            "",
            reported[:MOST_REPORTED],
        )
        self._status(status)
        if reported:
            more = f" and {len(reported) - 1} more" if len(reported) > 1 else ""
            self._health.degraded(f"cannot be read: {reported[0]}{more}; the last good one stays in force")
        else:
            self._health.ok(f"{status.objects} {self._kind.plural}")

    def _status(self, status: SourceStatus) -> None:
        with self._statuses.txn() as txn:
            txn.put(status)


def _split(text: str) -> tuple[str, str]:
    name, _, why = text.partition(": ")
    return name, why


def _name(kind: Kind[T], key: Key) -> str:
    namespace, name = key
    return f"{kind.plural}/{namespace}/{name}" if namespace else f"{kind.plural}/{name}"
