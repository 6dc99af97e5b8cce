"""Frontends to map entries, and keeping them so.

Needs: Table[Frontend], LoadBalancer, the maps.   Gives: ServicesTarget, a reconciler's target; ServiceMaps.

An entry never points at one that is not there: the load balancer says in which order to write. Writes that
fail stay in line for their frontend, so that what is tried again goes on where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import anyio.lowlevel
from anyio import to_thread

from cells.services.balancer import IdsExhaustedError, LoadBalancer, MapKey, Write
from cells.services.control.served import ServedFrontend
from cells.services.model import Frontend, FrontendKey
from lifecycle import BatchError, HiveError, ReadTable, Table

FAILURES = (OSError, HiveError, IdsExhaustedError)


class ServiceMaps(Protocol):
    """The maps themselves. All raise OSError; a write to a full map raises HiveError."""

    def dump(self) -> dict[MapKey, bytes]:
        """Every entry of every map; called in a thread, at any time."""
        ...

    def write(self, where: MapKey, value: bytes | None) -> None:
        """Set the entry, or remove it with None; gone already is fine."""
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
        self._todo: dict[FrontendKey | None, deque[Write]] = {}

    async def dump(self) -> Mapping[FrontendKey, Frontend]:
        """The frontends that the maps hold as they should. Mends what somebody else wrote."""
        held = await to_thread.run_sync(self._maps.dump)
        if self._taken_over:
            self._mend(held, self._entries)
        else:
            await self._take_over(held)
        return {one.key: one.frontend for one in self._served.all() if one.key not in self._todo}

    async def put(self, batch: Mapping[FrontendKey, Frontend]) -> None:
        """Serve frontends. Raises BatchError."""
        failures: dict[FrontendKey, Exception] = {}
        for frontend in batch.values():
            try:
                self._put(frontend)
            except FAILURES as error:
                failures[frontend.key] = error
        self._maps.void_verdicts()
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[FrontendKey]) -> None:
        """Serve frontends no more. Raises BatchError."""
        failures: dict[FrontendKey, Exception] = {}
        for key in batch:
            try:
                self._run(key, self._balancer.delete(key), first=True)
                with self._served.txn() as rows:
                    rows.delete(key)
            except FAILURES as error:
                failures[key] = error
        if failures:
            raise BatchError(failures)

    def _put(self, frontend: Frontend) -> None:
        self._run(frontend.key, self._balancer.upsert(frontend))
        number = self._balancer.installed[frontend.key].id
        with self._served.txn() as rows:
            rows.put(ServedFrontend(number, frontend))

    async def _take_over(self, held: Mapping[MapKey, bytes]) -> None:
        """Go on from what the maps hold: as long as nothing differs, nothing is written."""
        by_map: dict[str, dict[bytes, bytes]] = {}
        for where, value in held.items():
            by_map.setdefault(where.map, {})[where.key] = value
        self._entries = dict(held)
        self._taken_over = True
        writes = [*self._balancer.restore(by_map), *self._balancer.discard_off(by_map)]
        for frontend in self._table.all():
            try:
                self._put(frontend)
            except FAILURES:
                self._todo.setdefault(frontend.key, deque())  # put() tries again, and tells
            await anyio.lowlevel.checkpoint()
        self._run(None, [*writes, *self._balancer.synced()])
        self._maps.void_verdicts()
        self._tell_taken_over()

    def _mend(self, held: Mapping[MapKey, bytes], wanted: Mapping[MapKey, bytes]) -> None:
        """Write what somebody else changed: what is pointed at first, and what is too much last."""
        self._run(None, [])
        missing = [Write(where, wanted[where]) for where in wanted if held.get(where) != wanted[where]]
        extra = [Write(where, None) for where in held if where not in wanted]
        for write in (*sorted(missing, key=_rank), *sorted(extra, key=_rank, reverse=True)):
            self._maps.write(*write)

    def _run(self, owner: FrontendKey | None, writes: Sequence[Write], *, first: bool = False) -> None:
        """Write in order: what is left from last time and still holds, then these; or these `first`."""
        again = {write.where for write in writes}
        left = [write for write in self._todo.get(owner, ()) if write.where not in again]
        waiting = self._todo[owner] = deque([*writes, *left] if first else [*left, *writes])
        entries = self._entries
        while waiting:
            where, value = waiting[0]
            self._maps.write(where, value)
            if value is None:
                entries.pop(where, None)
            else:
                entries[where] = value
            waiting.popleft()
        del self._todo[owner]


def _rank(write: Write) -> tuple[bool, bool]:
    """Backends and translations before frontends, and of these the slots before slot 0."""
    is_frontend = "_services_" in write.where.map
    slot = write.where.key[-6:-4] if is_frontend else b""
    return is_frontend, slot == b"\0\0"
