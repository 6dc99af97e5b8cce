"""Frontends to map entries, and keeping them so.

Needs: Table[Frontend], LoadBalancer, the maps.   Gives: ServicesTarget, a reconciler's target; ServiceMaps.

An entry never points at one that is not there: the load balancer says in which order to write. Writes that
fail stay in line for their frontend, so that what is tried again goes on where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import anyio.lowlevel
from anyio import to_thread

from cells.services.balancer import IdsExhaustedError, LoadBalancer, MapKey, Write
from cells.services.control.served import ServedFrontend
from cells.services.model import Frontend, FrontendKey
from lifecycle import BatchError, HiveError, ReadTable, Table

Owner = FrontendKey | None
"""Whom writes are in line for; None: nobody, what is left of an earlier agent."""

_CHUNK: Final = 256
"""Frontends that are taken over at a time."""

FAILURES = (OSError, HiveError, IdsExhaustedError)


TABLE: Final = b""
"""What stands for a look-up table, which is large: that it is there."""


class ServiceMaps(Protocol):
    """The maps themselves. All raise OSError; a write to a full map raises HiveError."""

    def dump(self) -> dict[MapKey, bytes]:
        """Every entry of every map, of look-up tables TABLE; called in a thread, at any time."""
        ...

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it with None; gone already is fine."""
        ...

    def write_tables(self, writes: Sequence[Write]) -> None:
        """The same of look-up tables, for which the kernel waits; called in a thread, at any time."""
        ...

    def void_verdicts(self) -> None:
        """Have the datapath decide anew about the next packet of every flow."""
        ...


class ServicesTarget:
    """What the maps hold, beside what is to be served.

    The first dump takes over what an earlier agent left, and puts in force what differs: it runs only once
    the table is complete.
    """

    def __init__(
        self,
        table: ReadTable[Frontend],
        balancer: LoadBalancer,
        maps: ServiceMaps,
        served: Table[ServedFrontend],
        taken_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = table
        self._balancer = balancer
        self._maps = maps
        self._served = served
        self._entries: dict[MapKey, bytes] = {}
        self._tell_taken_over = taken_over
        self._taken_over = False
        self._todo: dict[Owner, deque[Write]] = {}
        self._planned: dict[FrontendKey, Frontend] = {}
        """Frontends whose writes are in line."""

    async def dump(self) -> Mapping[FrontendKey, Frontend]:
        """The frontends that the maps hold as they should. Mends what somebody else wrote."""
        held = await to_thread.run_sync(self._maps.dump)
        if self._taken_over:
            await self._mend(held, self._entries)
        else:
            await self._take_over(held)
        return {one.key: one.frontend for one in self._served.all() if one.key not in self._todo}

    async def put(self, batch: Mapping[FrontendKey, Frontend]) -> None:
        """Serve frontends. Raises BatchError."""
        failures = self._plan(batch.values())
        failures |= await self._write_of([key for key in batch if key not in failures])
        self._maps.void_verdicts()
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[FrontendKey]) -> None:
        """Serve frontends no more. Raises BatchError."""
        for key in batch:
            self._line_up(key, self._balancer.delete(key), first=True)
            self._planned.pop(key, None)
        failures = await self._write_of(batch)
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
                self._line_up(frontend.key, self._balancer.upsert(frontend))
                self._planned[frontend.key] = frontend
            except IdsExhaustedError as error:
                failures[frontend.key] = error
        return failures

    async def _take_over(self, held: Mapping[MapKey, bytes]) -> None:
        """Go on from what the maps hold: as long as nothing differs, nothing is written."""
        by_map: dict[str, dict[bytes, bytes]] = {}
        for where, value in held.items():
            by_map.setdefault(where.map, {})[where.key] = value
        # Look-up tables are made anew, with their frontends; what is left of others goes with the next sweep.
        self._entries = {where: value for where, value in held.items() if not _is_table(where)}
        self._taken_over = True
        writes = [*self._balancer.restore(by_map), *self._balancer.discard_off(by_map)]
        for frontends in _chunks(self._table.all()):
            failed = self._plan(frontends)
            failed |= await self._write_of([one.key for one in frontends if one.key not in failed])
            for key in failed:
                self._todo.setdefault(key, deque())  # put() tries again, and tells
            await anyio.lowlevel.checkpoint()
        self._line_up(None, [*writes, *self._balancer.synced()])
        await self._write_rest()
        self._maps.void_verdicts()
        self._tell_taken_over()

    async def _mend(self, held: Mapping[MapKey, bytes], wanted: Mapping[MapKey, bytes]) -> None:
        """Write what somebody else changed: what is pointed at first, and what is too much last."""
        self._line_up(None, [])
        await self._write_rest()
        missing = [Write(where, wanted[where]) for where in wanted if held.get(where) != wanted[where]]
        extra = [Write(where, None) for where in held if where not in wanted]
        for where, value in (*sorted(missing, key=_rank), *sorted(extra, key=_rank, reverse=True)):
            if not _is_table(where):
                self._maps.write(where, value)
                continue
            table = None if value is None else self._balancer.look_up_table(where)
            await to_thread.run_sync(self._maps.write_tables, [Write(where, table)])

    def _line_up(self, owner: FrontendKey | None, writes: Sequence[Write], *, first: bool = False) -> None:
        """What is left from last time and still holds is to be written, then these; or these `first`."""
        again = {write.where for write in writes}
        left = [write for write in self._todo.get(owner, ()) if write.where not in again]
        self._todo[owner] = deque([*writes, *left] if first else [*left, *writes])

    async def _write_rest(self) -> None:
        """What is in line for no frontend. Raises what writing does."""
        failures = await self._write([None])
        for error in failures.values():
            raise error

    async def _write_of(self, keys: Collection[FrontendKey]) -> dict[FrontendKey, Exception]:
        """What is in line for frontends; who failed."""
        return {key: error for key, error in (await self._write(keys)).items() if key is not None}

    async def _write(self, owners: Collection[Owner]) -> dict[Owner, Exception]:
        """Write what is in line for them, each in its order, tables of all at once; who failed."""
        failures: dict[Owner, Exception] = {}
        while True:
            tables: list[tuple[Owner, Write]] = []
            for owner in owners:
                if owner not in failures and owner in self._todo:
                    try:
                        tables += [(owner, write) for write in self._write_until_table(owner)]
                    except FAILURES as error:
                        failures[owner] = error
            if not tables:
                return failures
            try:
                await to_thread.run_sync(self._maps.write_tables, [write for _, write in tables])
            except FAILURES as error:
                failures |= {owner: error for owner, _ in tables}
                continue
            for owner, write in tables:
                self._written(owner, write)

    def _write_until_table(self, owner: Owner) -> list[Write]:
        """Write what is in line up to the first look-up table, which is returned, or to the end."""
        waiting = self._todo[owner]
        while waiting:
            if _is_table(waiting[0].where):
                return [waiting[0]]
            self._maps.write(*waiting[0])
            self._written(owner, waiting[0])
        del self._todo[owner]
        if owner is not None and (frontend := self._planned.pop(owner, None)) is not None:
            with self._served.txn() as rows:
                rows.put(ServedFrontend(self._balancer.installed[owner].id, frontend))
        return []

    def _written(self, owner: Owner, write: Write) -> None:
        where, value = write
        self._todo[owner].popleft()
        if value is None:
            self._entries.pop(where, None)
        else:
            self._entries[where] = TABLE if _is_table(where) else value


def _is_table(where: MapKey) -> bool:
    return where.map.endswith("_maglev")


def _chunks(frontends: Sequence[Frontend]) -> Iterator[Sequence[Frontend]]:
    for first in range(0, len(frontends), _CHUNK):
        yield frontends[first : first + _CHUNK]


def _rank(write: Write) -> tuple[bool, bool]:
    """Backends and translations before frontends, and of these the slots before slot 0."""
    is_frontend = "_services_" in write.where.map
    slot = write.where.key[-6:-4] if is_frontend else b""
    return is_frontend, slot == b"\0\0"
