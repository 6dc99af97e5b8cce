"""Where a source puts the objects of one kind: its table, and the row that says how the source is.

Needs: a table of objects, the table of source statuses, Health, Logger.   Gives: Sink.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

import anyio.lowlevel
import msgspec

from cells.kubernetes.objects import Key, Kind, Object
from cells.kubernetes.source.events import ObjectEvents
from cells.kubernetes.source.forgotten import Forgotten
from cells.kubernetes.source.status import SourceStatus, State
from lifecycle import Health, Logger, Table

T = TypeVar("T", bound=Object)

PART = 500
"""Objects of a list that are taken in at once."""
MOST_TOLD = 10
"""How many broken objects are listed per kind."""


class Sink(Generic[T]):
    """The one writer of a table of objects."""

    def __init__(
        self,
        kind: Kind[T],
        table: Table[T],
        statuses: Table[SourceStatus],
        health: Health,
        log: Logger,
        forgotten: Forgotten | None = None,
        events: ObjectEvents | None = None,
    ) -> None:
        self._kind = kind
        self._events = events or ObjectEvents()
        self._forgotten = forgotten
        self._table = table
        self._statuses = statuses
        self._parent = health
        self._log = log
        self._first = table.initializer(f"first list of {kind.qualified}")
        self._broken: dict[str, str] = {}
        self._synced = False

    @property
    def kind(self) -> Kind[T]:
        """The kind."""
        return self._kind

    @cached_property
    def _health(self) -> Health:
        return self._parent.child(self._kind.plural)

    def begin(self) -> None:
        """There is a source: its status is shown from now on."""
        self._status(SourceStatus(self._kind.qualified, "waiting", 0, False, 0.0))
        self._health.ok("waiting for the first list")

    def without_source(self) -> None:
        """There is none: the table is complete."""
        self._first.done()

    def known(self, key: Key) -> T | None:
        """The row there is."""
        return self._table.get(key)

    def replace(self, rows: Mapping[Key, T], broken: Sequence[str] = (), state: State = "watching") -> None:
        """Make these the rows: a list came whole."""
        self._count({**dict.fromkeys(self._gone(rows)), **rows}, broken)
        with self._table.txn() as txn:
            txn.replace_all(rows.values())
        self._complete(broken, state)

    def _gone(self, rows: Mapping[Key, T]) -> list[Key]:
        """What is known and not among these."""
        return [row.key for row in self._table.all() if row.key not in rows]

    def _count(self, rows: Mapping[Key, T | None], broken: Sequence[str]) -> None:
        kind, events = self._kind.kind, self._events
        for key, row in rows.items():
            events.changed(kind, self._table.get(key), row)
        events.unreadable(kind, len(broken))

    def _complete(self, broken: Sequence[str], state: State) -> None:
        self._broken = dict(_split(one) for one in broken)
        self._synced = True
        self._first.done()
        self._heard(state)

    async def listed(self, rows: Mapping[Key, T], broken: Sequence[str] = ()) -> None:
        """A server's list came whole. If it lacks most of what is known, that stays in force for now.

        Of a long list a part is taken in at a time, so that others have their turn: first what is new, last
        what is gone.
        """
        gone = self._gone(rows)
        if self._forgotten is None or not self._synced or 2 * len(gone) <= len(self._table):
            rest = iter(rows.values())
            for _ in range((len(rows) - 1) // PART):
                part = list(islice(rest, PART))
                self._count({row.key: row for row in part}, ())
                with self._table.txn() as txn:
                    for row in part:
                        txn.put(row)
                if self._forgotten is not None:  # lest they are taken out of force meanwhile
                    self._forgotten.told(self._kind.qualified, [row.key for row in part])
                await anyio.lowlevel.checkpoint()
            last = list(rest)
            self._count({**{row.key: row for row in last}, **dict.fromkeys(gone)}, broken)
            with self._table.txn() as txn:
                for row in last:
                    txn.put(row)
                for key in gone:
                    txn.delete(key)
            self._complete(broken, "watching")
            if self._forgotten is not None:
                self._forgotten.listed(self._kind.qualified)
            return
        self._broken.clear()
        self.change(rows, broken)
        self._forgotten.lost(self._kind.qualified, gone, len(rows), self._drop)

    def _drop(self, keys: Collection[Key]) -> None:
        """These are gone after all."""
        self._count(dict.fromkeys(keys), ())
        with self._table.txn() as txn:
            for key in keys:
                txn.delete(key)
        self._heard("watching")

    def change(
        self, rows: Mapping[Key, T | None], broken: Sequence[str] = (), state: State = "watching"
    ) -> None:
        """Put and delete rows: None for one that is gone."""
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
        if self._forgotten is not None and rows:
            self._forgotten.told(self._kind.qualified, rows.keys())
        self._heard(state)

    def watching(self) -> None:
        """A watch has begun."""
        self._heard("watching")

    def absent(self) -> None:
        """No server serves the kind: the table is complete, and empty."""
        self._first.done()
        before = self._now
        self._status(msgspec.structs.replace(before, state="absent", error="", objects=len(self._table)))
        self._health.ok("not served")

    def failed(self, error: Exception) -> None:
        """The source has trouble; what is known stays in force."""
        before = self._now
        text = str(error) or type(error).__name__
        if before.error != text:
            self._log.warning("objects cannot be followed", kind=self._kind.qualified, error=text)
        self._status(msgspec.structs.replace(before, state="failing", error=text, objects=len(self._table)))
        heard = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(before.changed)) if before.changed else ""
        self._health.degraded(
            f"{self._kind.qualified}: {text}; {f'last event {heard}' if heard else 'nothing heard yet'}"
        )

    @property
    def _now(self) -> SourceStatus:
        found = self._statuses.get(self._kind.qualified)
        return found or SourceStatus(self._kind.qualified, "waiting", 0, False, 0.0)

    def _heard(self, state: State) -> None:
        told = tuple(f"{name}: {why}" for name, why in sorted(self._broken.items()))
        before = self._now
        for one in told:
            if one not in before.broken:
                self._log.warning("object cannot be read", object=one)
        status = SourceStatus(
            self._kind.qualified, state, len(self._table), self._synced, time.time(), "", told[:MOST_TOLD]
        )
        self._status(status)
        if told:
            more = f" and {len(told) - 1} more" if len(told) > 1 else ""
            self._health.degraded(f"cannot be read: {told[0]}{more}; the last good one stays in force")
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
