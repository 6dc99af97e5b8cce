"""Events: what happened to an object, for those who look at it (``kubectl describe``).

Source: KEP-383, events.k8s.io/v1: one object a series, patched when the same thing happens again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import field

from cells.kubernetes.objects.kind import Kind, Object
from lifecycle import ReadTable
from lifecycle.tables import Changes

if TYPE_CHECKING:
    from cells.kubernetes.client.client import Client

__all__ = ["EVENTS", "EventDraft", "EventRecorder", "EventSource", "Regarding"]


LONGEST: Final = 1024
"""Characters of a note."""
AGAIN: Final = 1800.0
"""Seconds after which the same counts as happening again: agents that report at the same time count once."""
_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class Event(Object, frozen=True, gc=False):
    """An event."""

    reason: str = ""
    note: str = ""
    type: str = field(default="")


EVENTS: Final = Kind(Event, "events.k8s.io/v1", "events")


class Regarding(NamedTuple):
    """The object an event is about."""

    kind: Kind[Any]
    name: str
    namespace: str = ""
    uid: str = ""


class EventDraft(msgspec.Struct, frozen=True):
    """A warning about an object, to be reported for as long as its row is so."""

    about: Regarding
    reason: str
    """In UpperCamelCase; of one object and reason there is one event, with all notes."""
    note: str
    action: str
    shared: bool = True
    """Whether the agents of all nodes find the same, so that a few of them report it."""


class EventSource(msgspec.Struct, frozen=True):
    """A table, and what is to be reported of each of its rows."""

    name: str
    table: ReadTable[Any, Any]
    drafts: Callable[[Any], Iterable[EventDraft]]
    concerns: Callable[[Any], bool] | None = None
    """Of a row, whether there may be drafts, called as the row changes; None where all are looked at."""

    def changes(self) -> Changes[Any, Any]:
        """Of the rows that there may be drafts of, or were."""
        concerns = self.concerns
        if concerns is None:
            return self.table.changes()

        def matters(_: object, *rows: Any) -> bool:
            return any(row is not None and concerns(row) for row in rows)

        return self.table.changes(only=matters)


class EventRecorder:
    """Writes events. The name of one follows from what it reports: who reports the same writes the same.

    ``again``: seconds after which the same counts as happening again.
    """

    def __init__(
        self,
        client: Client,
        controller: str,
        instance: str,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        *,
        again: float = AGAIN,
    ) -> None:
        self._client = client
        self._controller = controller
        self._instance = instance
        self._clock = clock
        self._again = again

    async def report(
        self,
        about: Regarding,
        reason: str,
        note: str,
        *,
        action: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Something happened; again, if that is long since. Raises KubernetesError."""
        from cells.kubernetes.client.errors import ConflictError

        namespace = about.namespace or "default"
        note = note if len(note) <= LONGEST else f"{note[: LONGEST - 4]} ..."
        name = event_name(about, reason, note)
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": self._clock().strftime(_TIME),
            "regarding": _reference(about),
            "reason": reason,
            "action": action,
            "note": note,
            "type": kind,
            "reportingController": self._controller,
            "reportingInstance": self._instance,
        }
        try:
            await self._client.create(EVENTS, body, namespace)
        except ConflictError:
            await self._count(name, namespace)

    async def _count(self, name: str, namespace: str) -> None:
        """Another one in the event's series, unless the last one was just now."""
        from cells.kubernetes.client.errors import NotFoundError

        try:
            there = await self._client.whole(EVENTS, name, namespace)
            series = there.get("series") or {}
            last = _time(series.get("lastObservedTime") or there.get("eventTime"))
            now = self._clock()
            if last is not None and (now - last).total_seconds() < self._again:
                return
            again = {"count": int(series.get("count") or 1) + 1, "lastObservedTime": now.strftime(_TIME)}
            version = there["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": version}, "series": again}
            await self._client.patch(EVENTS, name, body, namespace)
        except NotFoundError:
            return  # forgotten by the server in this moment: the next time it is a new one


def event_name(about: Regarding, reason: str, note: str) -> str:
    """The name of the event of this."""
    what = (about.kind.qualified, about.namespace, about.name, about.uid, reason, note)
    number = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    return f"{about.name[:200].rstrip('-.')}.{number}"


def _reference(about: Regarding) -> dict[str, str]:
    found = {"apiVersion": about.kind.api_version, "kind": about.kind.kind, "name": about.name}
    more = {"namespace": about.namespace, "uid": about.uid}
    return found | {key: value for key, value in more.items() if value}


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
