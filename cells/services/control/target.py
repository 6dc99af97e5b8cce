"""Frontends to map entries, and keeping them so.

An entry never points at one that is not there: the load balancer says in which order to write. Writes that
fail stay in line for their frontend, so that what is tried again goes on where it stopped.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import groupby
from typing import Final

import anyio.lowlevel
from anyio import to_thread

from cells.config.shared import ServiceSettings
from cells.maps.map import Map, create_map, map_by_id
from cells.maps.node_maps import Maps
from cells.services import Frontend, FrontendKey
from cells.services.balancer import LoadBalancer
from cells.services.control.pending import LOOK_UP_TABLES, TABLE, Entries, PendingWrites, ServiceMaps
from cells.services.control.tables import MapFullError, ServedFrontend, Shortage
from cells.services.map_entries import Batch, IdsExhaustedError, MapKey, MapWrite, batched
from lifecycle import BatchError, ReadTable, Table, Target

# The load-balancing maps in the kernel.


class KernelServices:
    """The real :class:`~cells.services.control.pending.ServiceMaps`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: ServiceSettings) -> ServiceMaps:
        """The maps of this node: those that services of these settings need."""
        maps.use("services4", "services6", "backends4", "backends6", "reverse_nat4", "reverse_nat6")
        maps.use("source_range4", "source_range6")
        if settings.session_affinity:
            maps.use("affinity4", "affinity6", "affinity_match")
        if settings.maglev:
            maps.use("maglev4", "maglev6")
        return KernelServices(maps)

    def dump(self) -> Entries:
        """Through descriptors of its own, as the loop may use the others meanwhile."""
        found: Entries = {}
        for held in self._held():
            with map_by_id(held.id, held.spec.name) as table:
                found[held.spec.name] = dict(table.items())
        for outer in (self._maps.maglev4, self._maps.maglev6):
            with map_by_id(outer.id, outer.spec.name) as table:
                found[outer.spec.name] = dict.fromkeys([key for key, _ in table.items()], TABLE)
        return {name: entries for name, entries in found.items() if entries}

    def write_tables(self, writes: Sequence[MapWrite]) -> None:
        """Through descriptors of its own. New tables at once: the kernel waits once for all of them."""
        for outer in (self._maps.maglev4, self._maps.maglev6):
            own = [write for write in writes if write.where.map == outer.spec.name]
            inner = outer.spec.inner
            if not own or inner is None:
                continue
            with map_by_id(outer.id, outer.spec.name, writable=True) as table, ExitStack() as made:
                entries = []
                for where, value in own:
                    if value is None:
                        table.delete(where.key)
                        continue
                    numbers = made.enter_context(create_map(inner))
                    numbers.update(bytes(4), value)
                    entries.append((where.key, struct.pack("<I", numbers.fd)))
                self._update(table, entries)

    @staticmethod
    def _update(table: Map, entries: list[tuple[bytes, bytes]]) -> None:
        with _full(table):
            table.update_batch(entries)

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it."""
        table = self._by_name[where.map]
        if value is None:
            table.delete(where.key)
            return
        with _full(table):
            table.update(where.key, value)

    def write_many(self, batch: Batch) -> None:
        """Set entries, or remove them, with one system call."""
        table = self._by_name[batch.map]
        if batch.values is None:
            table.delete_batch(batch.keys)
        else:
            with _full(table):
                table.update_all(batch.keys, batch.values)

    @cached_property
    def _by_name(self) -> Mapping[str, Map]:
        return {table.spec.name: table for table in self._held()}

    def _held(self) -> Iterator[Map]:
        maps = self._maps
        yield from (maps.backends4, maps.backends6, maps.reverse_nat4, maps.reverse_nat6)
        yield from (maps.services4, maps.services6, maps.affinity_match)
        yield from (maps.source_range4, maps.source_range6)


@contextmanager
def _full(table: Map) -> Iterator[None]:
    """Say what to do about a full map."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise MapFullError(f"{table.spec.name} is full: raise bpf-lb-map-max") from error
        raise


_CHUNK: Final = 256
"""Frontends that are taken over at a time."""


class ServicesTarget(Target[FrontendKey, Frontend, Frontend]):
    """What the maps hold, beside what is to be served.

    The first dump takes over what an earlier agent left, and puts in force what differs: it runs only once
    the table is complete.
    """

    def __init__(
        self,
        table: ReadTable[FrontendKey, Frontend],
        balancer: LoadBalancer,
        maps: ServiceMaps,
        served: Table[FrontendKey, ServedFrontend],
        taken_over: Callable[[], None] = lambda: None,
        shortage: Shortage | None = None,
    ) -> None:
        self._table = table
        self._balancer = balancer
        self._maps = maps
        self._served = served
        self._pending = PendingWrites(maps)
        self._mark_taken_over = taken_over
        self._shortage = shortage if shortage is not None else Shortage()
        self._taken_over = False
        self._planned: dict[FrontendKey, Frontend] = {}
        """Frontends whose writes are in line."""

    async def observe(self) -> Mapping[FrontendKey, Frontend]:
        """The frontends that the maps hold as they should. Mends what somebody else wrote."""
        held = await to_thread.run_sync(self._maps.dump)
        if self._taken_over:
            await self._mend(held)
        else:
            await self._take_over(held)
        return {one.key: one.frontend for one in self._served.all() if one.key not in self._pending}

    async def put(self, batch: Mapping[FrontendKey, Frontend]) -> None:
        """Serve frontends. Raises BatchError."""
        failures = self._plan(batch.values())
        failures |= await self._write_of([key for key in batch if key not in failures])
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[FrontendKey]) -> None:
        """Serve frontends no more. Raises BatchError."""
        for key in batch:
            self._pending.add(key, self._balancer.delete(key), first=True)
            self._planned.pop(key, None)
        failures = await self._write_of(batch)
        self._shortage.note(batch, {})
        with self._served.txn() as rows:
            for key in batch:
                if key not in failures:
                    rows.delete(key)
        if failures:
            raise BatchError(failures)

    def _plan(self, frontends: Iterable[Frontend]) -> dict[FrontendKey, Exception]:
        """Line up what serving them takes; those that cannot be served."""
        failures: dict[FrontendKey, Exception] = {}
        for frontend in frontends:
            try:
                self._pending.add(frontend.key, self._balancer.upsert(frontend))
                self._planned[frontend.key] = frontend
            except IdsExhaustedError as error:
                failures[frontend.key] = error
        return failures

    async def _take_over(self, held: Entries) -> None:
        """Go on from what the maps hold: as long as nothing differs, nothing is written."""
        # Lookup tables are made anew, with their frontends; what is left of others goes with the next sweep.
        self._pending.hold(held)
        self._taken_over = True
        # Before anything else: what is planned next may get the numbers of what goes.
        self._pending.add(None, [*self._balancer.restore(held), *self._balancer.discard_off(held)])
        await self._write_rest()
        for frontends in _chunks(self._table.all()):
            failed = self._plan(frontends)
            failed |= await self._write_of([one.key for one in frontends if one.key not in failed])
            for key in failed:
                self._pending.mark_dirty(key)  # put() tries again, and tells
            await anyio.lowlevel.checkpoint()
        synced = self._balancer.synced()
        for owner, batches in synced.items():
            self._pending.add(owner, batches)
        # Frontends that are not served go first: their lookup tables may lead to backends that no slot names.
        await self._write_rest()
        await self._write_of([key for key in synced if key is not None])  # of what fails the rest is put()
        if held:
            with self._served.txn() as rows:
                for one in self._served.all():
                    rows.put(self._served_row(one.frontend))
        self._mark_taken_over()

    async def _mend(self, held: Entries) -> None:
        """Write what others changed: what is pointed at first, and what is too much last."""
        await self._write_rest()
        missing, extra = _differences(held, self._pending.entries)
        in_order = (*sorted(missing, key=_rank), *sorted(extra, key=_rank, reverse=True))
        for (name, _), group in groupby(in_order, key=lambda each: (each.where.map, _rank(each))):
            if name in LOOK_UP_TABLES:
                tables = [self._with_table(each) for each in group]
                await to_thread.run_sync(self._maps.write_tables, tables)
                self._pending.tables_written(tables)
            else:
                for batch in batched(group):
                    self._maps.write_many(batch)

    def _with_table(self, write: MapWrite) -> MapWrite:
        if write.value is None:
            return write
        return MapWrite(write.where, self._balancer.look_up_table(write.where))

    async def _write_rest(self) -> None:
        """What is in line for no frontend. Raises what writing does."""
        for error in (await self._pending.write([None])).values():
            raise error

    async def _write_of(self, keys: Collection[FrontendKey]) -> dict[FrontendKey, Exception]:
        """What is in line for frontends; who failed. Those that are served now are told of."""
        failures = {key: error for key, error in (await self._pending.write(keys)).items() if key is not None}
        self._shortage.note(keys, failures)
        with self._served.txn() as rows:
            for key in keys:
                if key not in failures and (frontend := self._planned.pop(key, None)) is not None:
                    rows.put(self._served_row(frontend))
        return failures

    def _served_row(self, frontend: Frontend) -> ServedFrontend:
        held = self._balancer.installed[frontend.key]
        same = held.frontend is frontend or held.frontend == frontend
        return ServedFrontend(held.id, frontend, None if same else held.frontend)


def _differences(held: Entries, wanted: Entries) -> tuple[list[MapWrite], list[MapWrite]]:
    """What is missing, or is another, and what is too much."""
    missing, extra = [], []
    for name in {*held, *wanted}:
        here, there = held.get(name, {}), wanted.get(name, {})
        if here != there:
            missing += [
                MapWrite(MapKey(name, key), there[key]) for key in there if here.get(key) != there[key]
            ]
            extra += [MapWrite(MapKey(name, key), None) for key in here if key not in there]
    return missing, extra


def _chunks(frontends: Sequence[Frontend]) -> Iterator[Sequence[Frontend]]:
    for first in range(0, len(frontends), _CHUNK):
        yield frontends[first : first + _CHUNK]


def _rank(write: MapWrite) -> tuple[bool, bool, str]:
    """Backends and translations before frontends, and of these the slots before slot 0."""
    is_frontend = "_services_" in write.where.map
    slot = write.where.key[-6:-4] if is_frontend else b""
    return is_frontend, slot == b"\0\0", write.where.map
