"""CiliumIdentity objects to rows of the table ``identities``; and what is in use here keeps its object.

Controller: Table[CiliumIdentity] in, ``identities`` out; writes objects that are missing.
Needs:  Table[CiliumIdentity], Identities, CiliumIdentityAllocator.
Gives:  CiliumIdentityWatch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from cells.cluster.allocation.allocator import CiliumIdentityAllocator
from cells.cluster.allocation.objects import labels_of, meaning
from cells.cluster.allocation.settings import AllocationMode
from cells.cluster.identity import CLUSTER, Identities
from cells.kubernetes import (
    CILIUM_IDENTITIES,
    CiliumIdentity,
    ForgottenObject,
    KubernetesSettings,
)
from lifecycle import Change, Jobs, Logger, Table


class CiliumIdentityWatch:
    """Follows objects, once all are known."""

    def __init__(
        self,
        table: Table[CiliumIdentity],
        identities: Identities,
        objects: CiliumIdentityAllocator,
        settings: KubernetesSettings,
        mode: AllocationMode,
        forgotten: Table[ForgottenObject],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._table = table
        self._identities = identities
        self._objects = objects
        self._writes = settings.asks_api_server
        self._log = log
        self._forgotten = forgotten
        self._known: set[str] = set()
        """The names of the objects that were taken in."""
        self._missing: set[int] = set()
        """Numbers in use without an object, when they were looked at last."""
        if not mode.reads_keys:
            self._first = identities.table.initializer("CiliumIdentity objects")
            jobs.observe("identities", self._rounds, self._follow)
            jobs.observe("lost objects", forgotten.changes, self._look)

    async def _rounds(self) -> AsyncIterator[list[Change[CiliumIdentity]] | None]:
        """None at the beginning: everything is to be looked at."""
        await self._table.wait_initialized()
        changes = self._table.changes(self._table.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[CiliumIdentity]] | None) -> None:
        if changes is None:
            there = {row.name: row for row in self._table.all()}
            for name in {*self._known, *there}:
                self._take(name, there.get(name))
            self._first.done()
        else:
            for change in changes:
                self._take(str(change.key[1]), change.row)  # type: ignore[index]  # as of every table of objects
        if self._writes:
            used = self._identities.in_use() if changes is None else self._touched(changes)
            await self._keep(used)

    async def _look(self, _: list[Change[ForgottenObject]]) -> None:
        """The server has lost objects: those in use here are made again, before others believe them gone."""
        if self._writes and self._table.initialized:
            await self._keep(self._identities.in_use())

    def _touched(self, changes: list[Change[CiliumIdentity]]) -> dict[int, tuple[str, ...]]:
        """The numbers in use here that changes may concern: theirs, and those that had no object so far."""
        names = {str(change.key[1]) for change in changes}  # type: ignore[index]  # as of every table of objects
        numbers = self._missing | {int(name) for name in names if name.isascii() and name.isdigit()}
        used = self._identities.used
        return {number: row.labels for number in numbers if (row := used.get(number)) is not None}

    def _take(self, name: str, row: CiliumIdentity | None) -> None:
        number = int(name) if name.isascii() and name.isdigit() else 0
        if number not in CLUSTER:
            self._log.warning("identity ignored: its name is no number of a cluster's", name=name)
        elif row is None:
            self._known.discard(name)
            self._identities.unlearn(number)
        else:
            self._known.add(name)
            labels = labels_of(row.security_labels)
            self._objects.seen(labels)
            self._identities.learn(number, labels)

    async def _keep(self, used: Mapping[int, tuple[str, ...]]) -> None:
        """These numbers in use have objects, and no mark of the operator's. Raises KubernetesError."""
        for number, labels in used.items():
            there = self._table.get(("", str(number)))
            self._missing.discard(number)
            if there is None:
                self._missing.add(number)
            if there is not None and (CILIUM_IDENTITIES.qualified, "", str(number)) not in self._forgotten:
                await self._objects.keep(number, labels)
            elif self._objects.is_on_its_way(number):
                continue
            elif there is None and self._table.by("labels").get(meaning(labels)):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._objects.restore(number, labels)
