"""What is in line for the load-balancing maps, written in an order in which no entry points at none.

Needs: ServiceMaps.   Gives: PendingWrites; ServiceMaps, what it writes to.

Frontends share backends, so these are in a line of their own: an entry is written before any slot that names
it, and goes only once no slot does that is still in the maps. Everything else is in line for its frontend.
Writes of many frontends that may be done at once are done with one system call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from anyio import to_thread

from cells.services.balancer import (
    AFFINITY_MATCH,
    BACKENDS,
    MAGLEV,
    REVERSE_NAT,
    SERVICES,
    SOURCE_RANGES,
    IdsExhaustedError,
    MapKey,
    Write,
    service_key,
)
from cells.services.model import FrontendKey
from lifecycle import HiveError

Owner = FrontendKey | None
"""Whom writes are in line for; None: nobody, what is left of an earlier agent."""

Entries = dict[str, dict[bytes, bytes]]
"""Entries by map."""

FAILURES = (OSError, HiveError, IdsExhaustedError)

TABLE: Final = b""
"""What stands for a look-up table, which is large: that it is there."""

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
    _REVERSE_NAT_DELETED,
    _AFFINITY,
) = _PHASES = range(11)
"""What may be written at once, in the order in which most frontends want it."""

_PHASE_OF: Final = {
    AFFINITY_MATCH: (_AFFINITY_DELETED, _AFFINITY),
    **dict.fromkeys(SOURCE_RANGES.values(), (_RANGES_DELETED, _RANGES)),
    **dict.fromkeys(REVERSE_NAT.values(), (_REVERSE_NAT_DELETED, _REVERSE_NAT)),
    **dict.fromkeys(LOOK_UP_TABLES, (_LOOK_UP, _LOOK_UP)),
}
"""Of a deletion, and of a write."""


class ServiceMaps(Protocol):
    """The maps themselves. All raise OSError; a write to a full map raises MapFullError."""

    def dump(self) -> Entries:
        """Every entry of every map, of look-up tables TABLE; called in a thread, at any time."""
        ...

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it with None; gone already is fine."""
        ...

    def write_many(self, name: str, writes: Sequence[Write]) -> None:
        """Set entries of one map at once, or remove them all; some may have been written when it raises."""
        ...

    def write_tables(self, writes: Sequence[Write]) -> None:
        """The same of look-up tables, for which the kernel waits; called in a thread, at any time."""
        ...

    def void_verdicts(self) -> None:
        """Have the datapath decide anew about the next packet of every flow."""
        ...


class PendingWrites:
    """Writes in line, by frontend; and what the maps hold of those that were written."""

    def __init__(self, maps: ServiceMaps) -> None:
        self._maps = maps
        self.entries: Entries = {}
        """What the maps hold."""
        self._todo: dict[Owner, deque[tuple[int, Write]]] = {}
        self._backends: dict[MapKey, bytes] = {}
        """Entries that are to be written before any slot."""
        self._gone: dict[MapKey, None] = {}
        """Backends that nobody wants any more."""

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._todo

    def hold(self, entries: Mapping[str, Mapping[bytes, bytes]]) -> None:
        """The maps hold this already."""
        self.entries = {name: dict(of_map) for name, of_map in entries.items()}

    def owe(self, owner: Owner) -> None:
        """Something is to be done for the frontend, though it is not known yet what."""
        self._todo.setdefault(owner, deque())

    def add(self, owner: Owner, writes: Sequence[Write], *, first: bool = False) -> None:
        """Of what is in line for the frontend that goes on which holds still, then these; or these first."""
        own: list[tuple[int, Write]] = []
        for write in writes:
            (name, key), value = where, _ = write
            if name not in _BACKENDS:
                own.append((_phase(write), write))
            elif value is not None:
                self._gone.pop(where, None)
                self._backends[where] = value
            else:
                self._backends.pop(where, None)
                if key in self.entries.get(name, ()):
                    self._gone[where] = None
        if left := self._todo.get(owner):
            again = {write.where for _, write in own}
            kept = [each for each in left if each[1].where not in again]
            # What was left may rest on what is new: a count on another slot.
            own = [*own, *kept] if first else sorted([*kept, *own], key=lambda each: each[0])
        self._todo[owner] = deque(own)

    async def write(self, owners: Collection[Owner]) -> dict[Owner, Exception]:
        """Write what is in line for them; who failed, of whom the rest stays in line.

        When not all fits, as much as does: one after the other, and nothing of what cannot be served.
        """
        planned = {owner: list(self._todo[owner]) for owner in owners if owner in self._todo}
        failures = self._without_backends(planned, self._write_backends())
        begun = [owner for owner in planned if owner not in failures]
        failed = await self._write_together(begun)
        self._undo({owner: planned[owner] for owner in failed})
        for owner, error in failed.items():
            failures |= await self._write_together([owner]) if len(begun) > 1 else {owner: error}
            if owner in failures:
                self._undo({owner: planned[owner]})
        if error_of_backends := self._delete_backends():
            for owner in owners:
                self.owe(owner)
                failures.setdefault(owner, error_of_backends)
        return failures

    def _undo(self, planned: Mapping[Owner, Sequence[tuple[int, Write]]]) -> None:
        """Take back what was written of frontends that are not served at all: others may need the room."""
        for owner, writes in planned.items():
            if owner is None or service_key(owner, 0).key in self.entries.get(SERVICES[_version(owner)], {}):
                continue
            for phase, write in reversed(writes):
                (name, key), value = write
                if value is not None and phase != _LOOK_UP and key in self.entries.get(name, {}):
                    self._write_one(Write(write.where, None))
            self._todo[owner] = deque(writes)

    async def _write_together(self, owners: Collection[Owner]) -> dict[Owner, Exception]:
        """What is in line for them, phase by phase; who failed."""
        active = {owner: self._todo[owner] for owner in owners if owner in self._todo}
        failures: dict[Owner, Exception] = {}
        while active:
            for owner in failures:
                active.pop(owner, None)
            for phase in _PHASES:
                if phase is _LOOK_UP:
                    failures |= await self._write_tables(active)
                elif group := list(_take(active, phase)):
                    failures |= self._write_group(group)
            for owner in [each for each, queue in active.items() if not queue]:
                del active[owner], self._todo[owner]
        return failures

    def _write_backends(self) -> dict[bytes, Exception]:
        """Those in line; by number who could not be."""
        by_map: dict[str, list[Write]] = {}
        for where, value in self._backends.items():
            by_map.setdefault(where.map, []).append(Write(where, value))
        failed: dict[bytes, Exception] = {}
        for name, writes in by_map.items():
            for write, error in self._write_of_map(name, writes):
                if error is not None:
                    failed[write.where.key] = error
                else:
                    del self._backends[write.where]
        return failed

    @staticmethod
    def _without_backends(
        waiting: Mapping[Owner, Iterable[tuple[int, Write]]], failed: Mapping[bytes, Exception]
    ) -> dict[Owner, Exception]:
        """Who wants to write slots that name backends which could not be written."""
        found: dict[Owner, Exception] = {}
        for owner, queue in waiting.items() if failed else ():
            for phase, (_, value) in queue:
                if phase == _SLOTS and value is not None and (error := failed.get(value[:4])):
                    found[owner] = error
                    break
        return found

    def _delete_backends(self) -> Exception | None:
        """Of those that nobody wants, those that no slot names which somebody failed to change."""
        if not self._gone:
            return None
        named = set(self._named())
        by_map: dict[str, list[Write]] = {}
        for where in self._gone:
            if where.key not in named:
                by_map.setdefault(where.map, []).append(Write(where, None))
        failure = None
        for name, writes in by_map.items():
            for write, error in self._write_of_map(name, writes):
                failure = failure or error
                if error is None:
                    del self._gone[write.where]
        return failure

    def _named(self) -> Iterator[bytes]:
        """Numbers of backends in slots that are still to be changed or removed, as the maps hold them."""
        for queue in self._todo.values():
            for phase, ((name, key), _) in queue:
                if phase in {_SLOTS, _SLOTS_DELETED} and (held := self.entries.get(name, {}).get(key)):
                    yield held[:4]

    async def _write_tables(self, active: Mapping[Owner, deque[tuple[int, Write]]]) -> dict[Owner, Exception]:
        group = list(_take(active, _LOOK_UP))
        if not group:
            return {}
        try:
            await to_thread.run_sync(self._maps.write_tables, [write for _, write in group])
        except FAILURES as error:
            return self._put_back(group, dict.fromkeys([owner for owner, _ in group], error))
        for _, write in group:
            self._written(write)
        return {}

    def _write_group(self, group: Sequence[tuple[Owner, Write]]) -> dict[Owner, Exception]:
        by_map: dict[str, list[tuple[Owner, Write]]] = {}
        for owned in group:
            by_map.setdefault(owned[1].where.map, []).append(owned)
        failures: dict[Owner, Exception] = {}
        for name, of_map in by_map.items():
            told = self._write_of_map(name, [write for _, write in of_map])
            failed = [(owned, error) for owned, (_, error) in zip(of_map, told, strict=True) if error]
            errors = {owner: error for (owner, _), error in failed}
            failures |= self._put_back([owned for owned, _ in failed], errors)
        return failures

    def _put_back(
        self, group: Iterable[tuple[Owner, Write]], failures: dict[Owner, Exception]
    ) -> dict[Owner, Exception]:
        by_owner: dict[Owner, list[tuple[int, Write]]] = {}
        for owner, write in group:
            by_owner.setdefault(owner, []).append((_phase(write), write))
        for owner, back in by_owner.items():
            self._todo[owner].extendleft(reversed(back))
        return failures

    def _write_of_map(self, name: str, writes: Sequence[Write]) -> Iterable[tuple[Write, Exception | None]]:
        """All at once; one by one when that does not work, so that it is known which did."""
        if len(writes) > 1:
            try:
                self._maps.write_many(name, writes)
            except FAILURES:
                pass
            else:
                of_map = self.entries.setdefault(name, {})
                if writes[0].value is None:
                    for where, _ in writes:
                        of_map.pop(where.key, None)
                else:
                    of_map.update([(where.key, value) for where, value in writes if value is not None])
                return [(write, None) for write in writes]
        return [(write, self._write_one(write)) for write in writes]

    def _write_one(self, write: Write) -> Exception | None:
        try:
            self._maps.write(*write)
        except FAILURES as error:
            return error
        self._written(write)
        return None

    def _written(self, write: Write) -> None:
        (name, key), value = write
        if value is None:
            self.entries.get(name, {}).pop(key, None)
        else:
            self.entries.setdefault(name, {})[key] = TABLE if name in LOOK_UP_TABLES else value


def _take(active: Mapping[Owner, deque[tuple[int, Write]]], phase: int) -> Iterator[tuple[Owner, Write]]:
    """What each has at the head of its line that is of this phase."""
    for owner, queue in active.items():
        while queue and queue[0][0] == phase:
            yield owner, queue.popleft()[1]


def _version(owner: FrontendKey) -> int:
    return owner.address.ip.version


def _phase(write: Write) -> int:
    (name, key), value = write
    if name in _SERVICES:
        is_slot = key[-6:-4] != b"\0\0"
        if value is None:
            return _SLOTS_DELETED if is_slot else _FRONTENDS_DELETED
        return _SLOTS if is_slot else _FRONTENDS
    return _PHASE_OF[name][value is not None]
