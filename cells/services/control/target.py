"""Writes frontends to the maps ``cilium_lb*`` and repairs the maps: the target of the services reconciler.

Frontends come in from the table ``frontends``; ``LoadBalancer`` plans the writes; ``ServicesTarget`` executes
them and puts a row in the table ``services`` for each frontend in the maps.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import groupby
from typing import Final, Protocol

import anyio.lowlevel
from anyio import to_thread

from cells.maps.bpf import BpfError, PackedColumn
from cells.maps.map import Map, create_map, map_by_id
from cells.maps.node_maps import Maps
from cells.services import Frontend, FrontendKey, LoadBalancerOptions
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import (
    ImplementationDelays,
    MapFullError,
    MapFullFrontends,
    PlannedFrontend,
    ServedFrontend,
)
from cells.services.map_entries import (
    LOOK_UP_TABLES,
    SERVICES,
    TABLE,
    Batch,
    Entries,
    MapKey,
    MapWrite,
    WritePlan,
    batched,
)
from lifecycle import BatchError, HiveError, ReadTable, Table, Target
from lifecycle.jobs import collector_paused
from lifecycle.tables import Initializer

FAILURES: Final = (OSError, HiveError)


class ServiceMaps(Protocol):
    """The load-balancing maps. All methods raise OSError; a write to a full map raises MapFullError."""

    async def dump(self) -> Entries:
        """Return every entry of every map, with TABLE as the value of Maglev tables."""
        ...

    def write(self, batch: Batch) -> None:
        """Set or delete entries of one map; deleting a missing entry is a no-op.

        After an error, some of the entries may have been written.
        """
        ...

    async def write_tables(self, batch: Batch) -> None:
        """Write Maglev tables; the kernel waits for an RCU grace period."""
        ...


class KernelServices:
    """The load-balancing maps in the kernel."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, options: LoadBalancerOptions) -> ServiceMaps:
        """Select the maps that these options need."""
        maps.use("services4", "services6", "backends4", "backends6", "reverse_nat4", "reverse_nat6")
        maps.use("source_range4", "source_range6")
        if options.enable_session_affinity:
            maps.use("affinity4", "affinity6", "affinity_match")
        if options.maglev:
            maps.use("maglev4", "maglev6")
        return KernelServices(maps)

    async def dump(self) -> Entries:
        """Read the maps in a thread, through separate descriptors: the event loop may use the others."""
        return await to_thread.run_sync(self._dump)

    def _dump(self) -> Entries:
        found: Entries = {}
        for held in self._held():
            with map_by_id(held.id, held.spec.name) as table:
                found[held.spec.name] = dict(table.items())
        for outer in (self._maps.maglev4, self._maps.maglev6):
            with map_by_id(outer.id, outer.spec.name) as table:
                found[outer.spec.name] = dict.fromkeys([key for key, _ in table.items()], TABLE)
        return {name: entries for name, entries in found.items() if entries}

    async def write_tables(self, batch: Batch) -> None:
        """Write Maglev tables in a thread, in one batch, so that the kernel waits only once."""
        await to_thread.run_sync(self._write_tables, batch)

    def _write_tables(self, batch: Batch) -> None:
        for outer in (self._maps.maglev4, self._maps.maglev6):
            inner = outer.spec.inner
            if outer.spec.name != batch.map or inner is None:
                continue
            with map_by_id(outer.id, outer.spec.name, writable=True) as table, ExitStack() as created:
                entries = []
                for where, value in batch.writes():
                    if value is None:
                        table.delete(where.key)
                        continue
                    numbers = created.enter_context(create_map(inner))
                    numbers.update(bytes(4), value)
                    entries.append((where.key, struct.pack("<I", numbers.fd)))
                with _map_full_errors(table):
                    table.update_batch(entries)

    def write(self, batch: Batch) -> None:
        """Set or delete entries with one system call."""
        table = self._by_name[batch.map]
        if batch.values is None:
            self._remove(table, batch.keys)
            return
        with _map_full_errors(table):
            if len(batch.keys) == 1:
                table.update(batch.keys[0], batch.values[0])
            else:
                table.update_all(batch.keys, batch.values)

    @staticmethod
    def _remove(table: Map, keys: Sequence[bytes]) -> None:
        if len(keys) > 1:
            try:
                table.delete_batch(keys)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
            else:
                return
        for key in keys:
            table.delete(key)

    @cached_property
    def _by_name(self) -> Mapping[str, Map]:
        return {table.spec.name: table for table in self._held()}

    def _held(self) -> Iterator[Map]:
        maps = self._maps
        yield from (maps.backends4, maps.backends6, maps.reverse_nat4, maps.reverse_nat6)
        yield from (maps.services4, maps.services6, maps.affinity_match)
        yield from (maps.source_range4, maps.source_range6)


@contextmanager
def _map_full_errors(table: Map) -> Iterator[None]:
    """Raise MapFullError with advice if a write fails because the map is full."""
    try:
        yield
    except BpfError as error:
        if error.is_full:
            raise MapFullError(f"{table.spec.name} is full: raise bpf-lb-map-max") from error
        raise


MOST_BACKENDS: Final = 65535
"""Most backends of a frontend: slot 0 counts them in 16 bits."""
_SLOTS: Final = frozenset(SERVICES.values())
_CHUNK: Final = 256
"""Frontends per plan at start-up, and between two checkpoints."""


class ServicesTarget(Target[FrontendKey, Frontend, Frontend]):
    """Writes changed frontends to the maps; the only writer of the table ``services``.

    The first observation restores an earlier agent's entries and writes the differences; it must run only
    once the table is complete. After an error it starts again from the beginning.
    """

    def __init__(
        self,
        table: ReadTable[FrontendKey, Frontend],
        balancer: LoadBalancer,
        maps: ServiceMaps,
        served: Table[FrontendKey, ServedFrontend],
        initial: Initializer | None = None,
        map_full: MapFullFrontends | None = None,
        delays: ImplementationDelays | None = None,
    ) -> None:
        self._delays = delays
        self._table = table
        self._balancer = balancer
        self._maps = maps
        self._served = served
        self._initial = initial
        self._map_full = map_full if map_full is not None else MapFullFrontends()
        self._taken_over = False

    async def observe(self) -> Mapping[FrontendKey, Frontend]:
        """Return the frontends with correct entries in the maps, after reverting foreign changes."""
        held = await self._maps.dump()
        if self._taken_over:
            await self._repair(held)
        else:
            await self._take_over(held)
        unsettled = self._balancer.unsettled
        found = {key: one.frontend for key, one, _ in self._served.items() if key not in unsettled}
        found.update((key, one.frontend) for key, one in unsettled.items() if key not in self._table)
        return found

    async def put(self, batch: Mapping[FrontendKey, Frontend]) -> None:
        """Serve frontends. Raises BatchError."""
        self._report(batch, await self._put(batch.values()) | await self._collect(batch))

    async def drop(self, batch: Collection[FrontendKey]) -> None:
        """Delete frontends. Raises BatchError."""
        failures = await self._drop(batch) | await self._collect(batch)
        self._report(batch, failures)

    def _report(self, batch: Collection[FrontendKey], failures: Mapping[FrontendKey, Exception]) -> None:
        self._map_full.note(batch, failures)
        if self._delays is not None:
            self._delays.written(key for key in batch if key not in failures)
        if failures:
            raise BatchError(failures)

    async def _take_over(self, held: Entries) -> None:
        """Restore the entries of an earlier agent, and write only the differences."""
        if error := await self._write(self._balancer.restore(held)):
            raise error
        keys = self._table.keys()
        unserved = {*self._balancer.unsettled, *self._served.keys()} - {*keys}
        wanted = {key.of_any_protocol for key in keys} if unserved else set()
        replaced = {key for key in unserved if key.of_any_protocol in wanted}
        await self._drop(unserved - replaced)  # drop() retries failed ones
        frontends = self._table.all()
        for first in range(0, len(frontends), _CHUNK):
            chunk = frontends[first : first + _CHUNK]
            self._map_full.note([one.key for one in chunk], await self._put(chunk))  # put() retries them
            if replaced:
                # From an agent with the other bpf-lb-proto-diff: they serve until the chunk is written.
                written = {one.key.of_any_protocol for one in chunk}
                await self._drop(dropped := {key for key in replaced if key.of_any_protocol in written})
                replaced -= dropped
            if first + _CHUNK < len(frontends):
                await anyio.lowlevel.checkpoint()
        await self._collect(())
        self._taken_over = True
        if self._initial is not None:
            self._initial.done()

    async def _put(self, frontends: Collection[Frontend]) -> dict[FrontendKey, Exception]:
        """Write frontends and return the errors; if the maps are too small, write as many as fit."""
        failures: dict[FrontendKey, Exception] = {}
        plan, planned = self._plan(frontends, failures)
        if await self._write(plan) is None:
            self._mark_settled(planned)
            return failures
        for one in planned:
            if not one.was_served:
                await self._undo(one.row.key)
        await self._collect(())
        for one in planned:
            key = one.row.key
            plan, alone = self._plan([one.row.frontend], failures)
            if error := await self._write(plan, singly=True):
                failures[key] = error
                if not one.was_served:
                    await self._undo(key)
                    await self._collect(())
            else:
                self._mark_settled(alone)
        return failures

    def _plan(
        self, frontends: Collection[Frontend], failures: dict[FrontendKey, Exception]
    ) -> tuple[WritePlan, list[PlannedFrontend]]:
        plan = WritePlan()
        failures.update(
            {
                one.key: MapFullError(f"{one.key} has {len(one.backends)} backends: {MOST_BACKENDS} fit")
                for one in frontends
                if len(one.backends) > MOST_BACKENDS
            }
        )
        with collector_paused():
            fitting = [one for one in frontends if one.key not in failures] if failures else frontends
            planned, failed = self._balancer.put_all(fitting, plan)
        failures.update(failed)
        return plan, planned

    def _mark_settled(self, planned: Sequence[PlannedFrontend]) -> None:
        self._balancer.mark_settled(planned)
        if len(planned) == 1:
            self._served.put(planned[0].row)
            return
        with self._served.txn() as rows:
            for one in planned:
                rows.put(one.row)

    async def _drop(self, keys: Collection[FrontendKey]) -> dict[FrontendKey, Exception]:
        """Delete frontends; return the errors."""
        plan = WritePlan()
        for key in keys:
            self._balancer.drop(key, plan)
        if await self._write(plan) is None:
            failures: dict[FrontendKey, Exception] = {}
        else:
            failures = {key: error for key in keys if (error := await self._remove(key)) is not None}
        with self._served.txn() as rows:
            for key in keys:
                if key not in failures:
                    self._balancer.removed(key)
                    rows.delete(key)
        return failures

    async def _remove(self, key: FrontendKey) -> Exception | None:
        plan = WritePlan()
        self._balancer.drop(key, plan)
        return await self._write(plan, singly=True)

    async def _undo(self, key: FrontendKey) -> None:
        """Delete the entries of a frontend that did not fit: they take space from others."""
        if await self._remove(key) is None:
            self._balancer.removed(key)

    async def _collect(self, tried: Iterable[FrontendKey]) -> dict[FrontendKey, Exception]:
        """Delete unused backends; return an error, if any, for each of the ``tried`` frontends."""
        error = await self._write(self._balancer.collect())
        return dict.fromkeys(tried, error) if error is not None else {}

    async def _write(self, plan: WritePlan, *, singly: bool = False) -> Exception | None:
        """Write a plan up to the first error, which is returned.

        Batches of new slots are recorded only after an error: otherwise ``settle`` makes the rows imply them.
        """
        slots: list[Batch] = []
        try:
            for step in plan.batches():
                for batch in _single_entries(step) if singly else (step,):
                    try:
                        if batch.map in LOOK_UP_TABLES:
                            await self._maps.write_tables(batch)
                        else:
                            self._maps.write(batch)
                    except FAILURES as error:
                        self._balancer.record_failed_write(batch)
                        return error
                    if batch.map in _SLOTS and isinstance(batch.keys, PackedColumn):
                        slots.append(batch)
                    else:
                        self._balancer.written(batch)
            slots.clear()  # recorded by mark_settled()
        finally:
            for batch in slots:
                self._balancer.written(batch)
        return None

    async def _repair(self, held: Entries) -> None:
        """Revert foreign changes: set missing entries in order of references, then delete extra ones."""
        self._balancer.resolve_unknown(held)
        missing, extra = _differences(held, await self._wanted(held))
        in_order = (*sorted(missing, key=_write_order), *sorted(extra, key=_write_order, reverse=True))
        for (name, _), group in groupby(in_order, key=lambda each: (each.where.map, _write_order(each))):
            if name in LOOK_UP_TABLES:
                for batch in batched(self._with_tables(list(group))):
                    await self._maps.write_tables(batch)
            else:
                for batch in batched(group):
                    self._maps.write(batch)

    async def _wanted(self, held: Entries) -> Entries:
        """Return all desired entries."""
        balancer = self._balancer
        found = balancer.wanted(held)
        slots: Entries = {name: {**found.get(name, {})} for name in SERVICES.values()}
        of_family = {version: slots[name] for version, name in SERVICES.items()}
        for number, (key, row, _) in enumerate(self._served.items()):
            if key not in balancer.unsettled:
                of_family[key.address[0]].update(balancer.slots_of(row))
            if number % _CHUNK == 0:
                await anyio.lowlevel.checkpoint()
        return found | slots

    def _with_tables(self, writes: Sequence[MapWrite]) -> Iterator[MapWrite]:
        """Yield the writes with Maglev tables in place of TABLE."""
        tables = self._balancer.look_up_tables({one.where for one in writes if one.value is not None})
        for where, value in writes:
            yield MapWrite(where, tables.get(where) if value is not None else None)


def _single_entries(batch: Batch) -> Iterator[Batch]:
    """Split a batch into batches of one entry."""
    for (name, key), value in batch.writes():
        yield Batch(name, (key,), (value,) if value is not None else None)


def _differences(held: Entries, wanted: Entries) -> tuple[list[MapWrite], list[MapWrite]]:
    """Compare maps; return missing or different entries, and extra ones."""
    missing, extra = [], []
    for name in {*held, *wanted}:
        present, desired = held.get(name, {}), wanted.get(name, {})
        if name in LOOK_UP_TABLES:
            present = {key: desired.get(key, TABLE) for key in present}  # compares keys only
        if present != desired:
            missing += [
                MapWrite(MapKey(name, key), value)
                for key, value in desired.items()
                if present.get(key) != value
            ]
            extra += [MapWrite(MapKey(name, key), None) for key in present if key not in desired]
    return missing, extra


def _write_order(write: MapWrite) -> tuple[bool, bool, str]:
    """Return a sort key: backends and reverse NAT before services, slots before slot 0."""
    is_frontend = "_services_" in write.where.map
    slot = write.where.key[-6:-4] if is_frontend else b""
    return is_frontend, slot == b"\0\0", write.where.map
