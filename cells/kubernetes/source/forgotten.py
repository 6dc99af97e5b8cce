"""Objects that an API server has lost: most of a kind at once, as when its store is emptied and filled again.

Source: what lists leave out. The rows stay in force until the store has been filled again: nothing of a
        node may be torn down because a list came too early.
For:    sinks; those who write objects, to write them again. Needs: nothing.
Gives:  ForgottenObject, Forgotten.
Why:    a watch reports deleted objects. A list that lacks more than half of what was known means
        a server whose store was replaced, by an old copy or an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import anyio
import msgspec

from cells.kubernetes.objects import NODES, Key
from cells.kubernetes.source.status import SourceStatus
from lifecycle import Health, Logger, ReadTable, Table

SETTLE: Final = 10.0
"""Seconds without another object after which the store counts as filled."""


class ForgottenObject(msgspec.Struct, frozen=True):
    """An object that is in force here, and that the server does not know."""

    kind: str
    """``pods``, ``ciliumnodes.cilium.io``."""
    namespace: str
    name: str

    @property
    def row_key(self) -> tuple[str, str, str]:
        """Of its row."""
        return self.kind, self.namespace, self.name


def forgotten_objects() -> Table[ForgottenObject]:
    """The table ``k8s-forgotten``."""
    return Table("k8s-forgotten", key=lambda one: one.row_key, indexes={"kind": lambda one: (one.kind,)})


class Forgotten:
    """The one writer of the table; takes rows out of force when the store has been filled."""

    def __init__(
        self, table: Table[ForgottenObject], statuses: ReadTable[SourceStatus], health: Health, log: Logger
    ) -> None:
        self.table = table
        self._statuses = statuses
        self._health = health.child("forgotten")
        self._log = log
        self.node = ""
        """The name of this node."""
        self._drop: dict[str, Callable[[Collection[Key]], None]] = {}
        self._news = anyio.Event()

    def lost(
        self, kind: str, keys: Collection[Key], left: int, drop: Callable[[Collection[Key]], None]
    ) -> None:
        """A list has ``left`` objects of a kind and lacks these; ``drop`` takes rows out of force."""
        self._drop[kind] = drop
        with self.table.txn() as txn:
            for one in self.table.by("kind").get(kind):
                if (one.namespace, one.name) not in keys:
                    txn.delete(one.row_key)
            for namespace, name in keys:
                txn.put(ForgottenObject(kind, namespace, name))
        self._log.error(
            "the API server has lost objects, they stay in force", kind=kind, lost=len(keys), left=left
        )
        self._tell()

    def told(self, kind: str, keys: Collection[Key]) -> None:
        """The server has reported these objects, existing or deleted."""
        if kind not in self._drop:
            return
        with self.table.txn() as txn:
            for namespace, name in keys:
                txn.delete((kind, namespace, name))
        self._tell()

    def listed(self, kind: str) -> None:
        """A list told all there is, as it should be."""
        if self._drop.pop(kind, None) is not None:
            with self.table.txn() as txn:
                for one in self.table.by("kind").get(kind):
                    txn.delete(one.row_key)
            self._tell()

    async def run(self) -> None:
        """For ever: take lost objects out of force once the store is a cluster's again, and quiet.

        Not while some kind cannot be followed: then its objects are unknown.
        """
        while True:
            news = self._news
            if not len(self.table):
                self._health.ok("nothing is lost")
                await news.wait()
                continue
            with anyio.move_on_after(None if self._is_empty() else SETTLE) as quiet:
                await news.wait()
            if quiet.cancelled_caught and not any(one.state == "failing" for one in self._statuses.all()):
                self._release()

    def _is_empty(self) -> bool:
        """Whether the store has not been filled yet: this node is one of the objects it lacks."""
        return (NODES.qualified, "", self.node) in self.table

    def _release(self) -> None:
        kinds = {one.kind for one in self.table.all()}
        for kind in sorted(kinds):
            keys = [(one.namespace, one.name) for one in self.table.by("kind").get(kind)]
            self._log.warning("lost objects are no longer in force", kind=kind, objects=len(keys))
            self._drop[kind](keys)
        self._drop.clear()
        with self.table.txn() as txn:
            txn.replace_all([])

    def _tell(self) -> None:
        if count := len(self.table):
            kinds = ", ".join(sorted({one.kind for one in self.table.all()}))
            self._health.degraded(f"the API server has lost {count} objects ({kinds}), which stay in force")
        news, self._news = self._news, anyio.Event()
        news.set()
