"""What is in line for the load-balancing maps, written in an order in which no entry points at none.

Frontends share backends, so these are in a line of their own: an entry is written before any slot that names
it, and goes only once no slot does that is still in the maps. Everything else is in line for its frontend.
Writes of many frontends that may be done at once are done with one system call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, Protocol

from anyio import to_thread

from cells.services import FrontendKey
from cells.services.map_entries import (
    AFFINITY_MATCH,
    BACKENDS,
    MAGLEV,
    REVERSE_NAT,
    SERVICES,
    SOURCE_RANGES,
    Batch,
    IdsExhaustedError,
    LookUpTable,
    MapKey,
    MapWrite,
    batched,
    service_key,
)
from lifecycle import HiveError

Owner = FrontendKey | None
"""Whom writes are in line for; None: nobody, what is left of an earlier agent."""

Entries = dict[str, dict[bytes, bytes]]
"""Entries by map."""

FAILURES = (OSError, HiveError, IdsExhaustedError)

TABLE: Final = b""
"""What stands for a lookup table, which is large: that it is there."""

LOOK_UP_TABLES: Final = frozenset(MAGLEV.values())
_BACKENDS: Final = frozenset(BACKENDS.values())
_SERVICES: Final = frozenset(SERVICES.values())

(
    _AFFINITY_DELETED,
    _RANGES_DELETED,
    _RANGES,
    _LOOK_UP,
    _SLOTS,
    _REVERSE_NAT,
    _FRONTENDS,
    _FRONTENDS_DELETED,
    _SLOTS_DELETED,
    _LOOK_UP_DELETED,
    _REVERSE_NAT_DELETED,
    _AFFINITY,
) = _PHASES = range(12)
"""What may be written at once, in the order in which most frontends want it."""

_PHASE_OF: Final = {
    AFFINITY_MATCH: (_AFFINITY_DELETED, _AFFINITY),
    **dict.fromkeys(SOURCE_RANGES.values(), (_RANGES_DELETED, _RANGES)),
    **dict.fromkeys(REVERSE_NAT.values(), (_REVERSE_NAT_DELETED, _REVERSE_NAT)),
    **dict.fromkeys(LOOK_UP_TABLES, (_LOOK_UP_DELETED, _LOOK_UP)),
}
"""Of a deletion, and of a write."""

_OF_TABLES: Final = frozenset({_LOOK_UP, _LOOK_UP_DELETED})


class ServiceMaps(Protocol):
    """The maps themselves. All raise OSError; a write to a full map raises MapFullError."""

    def dump(self) -> Entries:
        """Every entry of every map, of lookup tables TABLE; called in a thread, at any time."""
        ...

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it with None; gone already is fine."""
        ...

    def write_many(self, batch: Batch) -> None:
        """Set entries of one map at once, or remove them all; some may have been written when it raises."""
        ...

    def write_tables(self, writes: Sequence[MapWrite]) -> None:
        """The same of lookup tables, for which the kernel waits; called in a thread, at any time."""
        ...


InLine = deque[tuple[int, Batch]]
"""Batches, each of one phase."""


class PendingWrites:
    """Writes in line, by frontend; and what the maps hold of those that were written."""

    def __init__(self, maps: ServiceMaps) -> None:
        self._maps = maps
        self.entries: Entries = {}
        """What the maps hold."""
        self._tables: dict[MapKey, frozenset[bytes] | None] = {}
        """The backends that lookup tables in the maps may lead to; None: it is not known which."""
        self._todo: dict[Owner, InLine] = {}
        self._fresh: list[Batch] = []
        """Backends that are to be written before any slot."""
        self._failed: dict[MapKey, bytes] = {}
        """The same of those that could not be."""
        self._unwanted: dict[MapKey, None] = {}
        """Backends that nobody wants any more."""

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._todo

    def hold(self, entries: Mapping[str, Mapping[bytes, bytes]]) -> None:
        """The maps hold this already. Lookup tables are to be made anew; what they lead to is not known."""
        self.entries = {name: dict(held) for name, held in entries.items() if name not in LOOK_UP_TABLES}
        self._tables = {MapKey(name, key): None for name in LOOK_UP_TABLES for key in entries.get(name, ())}

    def mark_dirty(self, owner: Owner) -> None:
        """Something is to be done for the frontend, though it is not known yet what."""
        self._todo.setdefault(owner, deque())

    def add(self, owner: Owner, batches: Iterable[Batch], *, first: bool = False) -> None:
        """Of what is in line for the frontend that goes on which holds still, then these; or these first."""
        own: list[tuple[int, Batch]] = []
        for batch in batches:
            if batch.map in _BACKENDS:
                self._add_backends(batch)
            elif owner is None:
                own += _phased(batch)
            else:
                own.append((_phase(batch), batch))
        if left := self._todo.get(owner):
            again = {write.where for _, batch in own for write in batch.writes()}
            remaining = [
                (phase, _one(write))
                for phase, batch in left
                for write in batch.writes()
                if write.where not in again
            ]
            # What was left may rest on what is new: a count on another slot.
            own = [*own, *remaining] if first else sorted([*remaining, *own], key=lambda each: each[0])
        self._todo[owner] = deque(own)

    def _add_backends(self, batch: Batch) -> None:
        if batch.values is not None:
            self._fresh.append(batch)
            if self._unwanted:
                for key in batch.keys:
                    self._unwanted.pop(MapKey(batch.map, key), None)
            return
        self._failed |= self._take_fresh()
        for key in batch.keys:
            self._failed.pop(where := MapKey(batch.map, key), None)
            if key in self.entries.get(batch.map, ()):
                self._unwanted[where] = None

    def _take_fresh(self) -> dict[MapKey, bytes]:
        batches, self._fresh = self._fresh, []
        writes = (write for batch in batches for write in batch.writes())
        return {where: value for where, value in writes if value is not None}

    async def write(self, owners: Collection[Owner]) -> dict[Owner, Exception]:
        """Write what is in line for them; who failed, of whom the rest stays in line.

        When not all fits, as much as does: one after the other, and nothing of what cannot be served.
        """
        planned = {owner: list(self._todo[owner]) for owner in owners if owner in self._todo}
        failures = self._without_backends(planned, self._write_backends())
        attempted = [owner for owner in planned if owner not in failures]
        failed = await self._write_together(attempted)
        self._undo({owner: planned[owner] for owner in failed})
        for owner, error in failed.items():
            failures |= await self._write_together([owner]) if len(attempted) > 1 else {owner: error}
            if owner in failures:
                self._undo({owner: planned[owner]})
        if error_of_backends := self._delete_backends():
            for owner in owners:
                self.mark_dirty(owner)
                failures.setdefault(owner, error_of_backends)
        return failures

    def _undo(self, planned: Mapping[Owner, Sequence[tuple[int, Batch]]]) -> None:
        """Take back what was written of frontends that are not served at all: others may need the room."""
        for owner, batches in planned.items():
            if owner is None or self._is_served(owner):
                continue
            for phase, batch in reversed(batches):
                if batch.values is None or phase == _LOOK_UP:
                    continue
                for key in reversed(batch.keys):
                    if key in self.entries.get(batch.map, ()):
                        self._write_one(MapWrite(MapKey(batch.map, key), None))
            self._todo[owner] = deque(batches)

    def _is_served(self, owner: FrontendKey) -> bool:
        where = service_key(owner, 0)
        return where.key in self.entries.get(where.map, ())

    async def _write_together(self, owners: Collection[Owner]) -> dict[Owner, Exception]:
        """What is in line for them, phase by phase; who failed."""
        active = {owner: self._todo[owner] for owner in owners if owner in self._todo}
        failures: dict[Owner, Exception] = {}
        while active:
            for owner in failures:
                active.pop(owner, None)
            for phase in _PHASES:
                group = list(_take(active, phase))
                if group and phase in _OF_TABLES:
                    failures |= await self._write_tables(group)
                elif group:
                    failures |= self._write_group(group)
            for owner in [each for each, queue in active.items() if not queue]:
                del active[owner], self._todo[owner]
        return failures

    def _write_backends(self) -> dict[bytes, Exception]:
        """Those in line; by number who could not be."""
        if not self._failed and all(self._write_at_once(batch) for batch in _joined(self._fresh)):
            self._fresh = []
            return {}
        writes = self._failed | self._take_fresh()
        self._failed = {}
        failed: dict[bytes, Exception] = {}
        for where, value in writes.items():
            if error := self._write_one(MapWrite(where, value)):
                failed[where.key] = error
                self._failed[where] = value
        return failed

    @staticmethod
    def _without_backends(
        waiting: Mapping[Owner, Iterable[tuple[int, Batch]]], failed: Mapping[bytes, Exception]
    ) -> dict[Owner, Exception]:
        """Who wants to write slots that name backends which could not be written."""
        found: dict[Owner, Exception] = {}
        for owner, queue in waiting.items() if failed else ():
            for phase, batch in queue:
                values = batch.values if phase == _SLOTS else None
                if values and (error := next(filter(None, (failed.get(one[:4]) for one in values)), None)):
                    found[owner] = error
                    break
        return found

    def _delete_backends(self) -> Exception | None:
        """Of those that nobody wants, those that nothing leads to which somebody failed to change."""
        if not self._unwanted or (named := self._named()) is None:
            return None
        failure = None
        for batch in batched(MapWrite(where, None) for where in self._unwanted if where.key not in named):
            errors = (
                [None] * len(batch.keys)
                if self._write_at_once(batch)
                else map(self._write_one, batch.writes())
            )
            for key, error in zip(batch.keys, errors, strict=True):
                failure = failure or error
                if error is None:
                    del self._unwanted[MapKey(batch.map, key)]
        return failure

    def _named(self) -> set[bytes] | None:
        """Numbers of backends that the maps lead to where that is still to be changed; None: maybe all.

        By slots, and by lookup tables, which may be older or newer than the slots.
        """
        found: set[bytes] = set()
        for owner, queue in self._todo.items():
            for phase, batch in queue:
                if phase in {_SLOTS, _SLOTS_DELETED}:
                    of_map = self.entries.get(batch.map, {})
                    found.update(of_map[key][:4] for key in batch.keys if key in of_map)
                elif phase in _OF_TABLES and owner is not None and self._is_served(owner):
                    for key in batch.keys:
                        led_to = self._tables.get(MapKey(batch.map, key), frozenset())
                        if led_to is None:
                            return None
                        found |= led_to
        return found

    async def _write_tables(self, group: Sequence[tuple[Owner, Batch]]) -> dict[Owner, Exception]:
        writes = [write for _, batch in group for write in batch.writes()]
        try:
            await to_thread.run_sync(self._maps.write_tables, writes)
        except FAILURES as error:
            for where, value in writes:  # some may have been
                held = self._tables.get(where, frozenset())
                self._tables[where] = held | _led_to(value) if held is not None else None
            return self._put_back(group, dict.fromkeys([owner for owner, _ in group], error))
        self.tables_written(writes)
        return {}

    def tables_written(self, writes: Iterable[MapWrite]) -> None:
        """The maps hold these lookup tables now."""
        for write in writes:
            if write.value is None:
                self._tables.pop(write.where, None)
            else:
                self._tables[write.where] = _led_to(write.value)
            self._written(write)

    def _write_group(self, group: Sequence[tuple[Owner, Batch]]) -> dict[Owner, Exception]:
        by_map: dict[str, list[tuple[Owner, Batch]]] = defaultdict(list)
        for owned in group:
            by_map[owned[1].map].append(owned)
        failures: dict[Owner, Exception] = {}
        for of_map in by_map.values():
            (joined,) = _joined([batch for _, batch in of_map])
            if self._write_at_once(joined):
                continue
            errors: dict[Owner, Exception] = {}
            back: list[tuple[Owner, Batch]] = []
            for owner, batch in of_map:
                for write in batch.writes():
                    if error := self._write_one(write):
                        errors[owner] = error
                        back.append((owner, _one(write)))
            failures |= self._put_back(back, errors)
        return failures

    def _put_back(
        self, group: Iterable[tuple[Owner, Batch]], failures: dict[Owner, Exception]
    ) -> dict[Owner, Exception]:
        by_owner: dict[Owner, list[tuple[int, Batch]]] = defaultdict(list)
        for owner, batch in group:
            by_owner[owner].append((_phase(batch), batch))
        for owner, back in by_owner.items():
            self._todo[owner].extendleft(reversed(back))
        return failures

    def _write_at_once(self, batch: Batch) -> bool:
        """With one call; whether that worked. Where it did not, nobody knows which were written."""
        keys, values = batch.keys, batch.values
        if len(keys) == 1:
            return self._write_one(next(batch.writes())) is None
        try:
            self._maps.write_many(batch)
        except FAILURES:
            return False
        of_map = self.entries.setdefault(batch.map, {})
        if values is not None:
            of_map.update(zip(keys, values, strict=True))
        else:
            for key in keys:
                of_map.pop(key, None)
        return True

    def _write_one(self, write: MapWrite) -> Exception | None:
        try:
            self._maps.write(*write)
        except FAILURES as error:
            return error
        self._written(write)
        return None

    def _written(self, write: MapWrite) -> None:
        (name, key), value = write
        if value is None:
            self.entries.get(name, {}).pop(key, None)
        else:
            self.entries.setdefault(name, {})[key] = TABLE if name in LOOK_UP_TABLES else value


def _take(active: Mapping[Owner, InLine], phase: int) -> Iterator[tuple[Owner, Batch]]:
    """What each has at the head of its line that is of this phase."""
    for owner, queue in active.items():
        while queue and queue[0][0] == phase:
            yield owner, queue.popleft()[1]


def _joined(batches: Iterable[Batch]) -> list[Batch]:
    """One for each map, of batches that all set entries, or all remove them."""
    keys: dict[str, list[bytes]] = defaultdict(list)
    values: dict[str, list[bytes]] = {}
    for batch in batches:
        keys[batch.map] += batch.keys
        if batch.values is not None:
            values.setdefault(batch.map, []).extend(batch.values)
    return [Batch(name, of_map, values.get(name)) for name, of_map in keys.items()]


def _one(write: MapWrite) -> Batch:
    (name, key), value = write
    return Batch(name, (key,), (value,) if value is not None else None)


def _phased(batch: Batch) -> Iterator[tuple[int, Batch]]:
    """Parts of a batch, each of one phase."""
    for phase, group in groupby(map(_one, batch.writes()), key=_phase):
        yield phase, _joined(group)[0]


def _phase(batch: Batch) -> int:
    """Of a batch that is all of one."""
    name, keys, values = batch
    if name in _SERVICES:
        is_slot = keys[0][-6:-4] != b"\0\0"
        if values is None:
            return _SLOTS_DELETED if is_slot else _FRONTENDS_DELETED
        return _SLOTS if is_slot else _FRONTENDS
    return _PHASE_OF[name][values is not None]


def _led_to(table: bytes | None) -> frozenset[bytes]:
    return table.backends if isinstance(table, LookUpTable) else frozenset()
