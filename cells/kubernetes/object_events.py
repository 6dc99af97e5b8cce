"""Events about objects, as shown by ``kubectl describe``.

Source: KEP-383, events.k8s.io/v1: one Event per series, patched when the same event happens again.
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
"""Maximum characters of a note."""
AGAIN: Final = 1800.0
"""Seconds after which an event counts as repeated: reports of several agents at one time count once."""
_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class Event(Object, frozen=True, gc=False):
    """An Event object."""

    reason: str = ""
    note: str = ""
    type: str = field(default="")


EVENTS: Final = Kind(Event, "events.k8s.io/v1", "events")


class Regarding(NamedTuple):
    """The object that an event is about."""

    kind: Kind[Any]
    name: str
    namespace: str = ""
    uid: str = ""


class EventDraft(msgspec.Struct, frozen=True):
    """A warning about an object; it is reported while its row produces it."""

    about: Regarding
    reason: str
    """In UpperCamelCase. Drafts of one object and reason become one event with all notes."""
    note: str
    action: str
    shared: bool = True
    """Whether agents of all nodes produce the same warning, so that only a few of them report it."""


class EventSource(msgspec.Struct, frozen=True):
    """A table, and the function that returns the warnings of a row."""

    name: str
    table: ReadTable[Any, Any]
    drafts: Callable[[Any], Iterable[EventDraft]]
    concerns: Callable[[Any], bool] | None = None
    """Whether a changed row may have warnings; None to examine all rows."""

    def changes(self) -> Changes[Any, Any]:
        """Return the changes of rows that may have warnings, or may have had some."""
        concerns = self.concerns
        if concerns is None:
            return self.table.changes()

        def matters(_: object, *rows: Any) -> bool:
            return any(row is not None and concerns(row) for row in rows)

        return self.table.changes(only=matters)


class EventRecorder:
    """Writes events. An event's name is derived from its contents, so equal reports write one event.

    ``again``: seconds after which an event counts as repeated.
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
        self._repeat_after = again

    async def report(
        self,
        about: Regarding,
        reason: str,
        note: str,
        *,
        action: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Create an event, or count a repetition in its series. Raises KubernetesError."""
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
        """Count a repetition in the event's series, unless the last one is recent."""
        from cells.kubernetes.client.errors import NotFoundError

        try:
            current = await self._client.whole(EVENTS, name, namespace)
            series = current.get("series") or {}
            last = _time(series.get("lastObservedTime") or current.get("eventTime"))
            now = self._clock()
            if last is not None and (now - last).total_seconds() < self._repeat_after:
                return
            again = {"count": int(series.get("count") or 1) + 1, "lastObservedTime": now.strftime(_TIME)}
            version = current["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": version}, "series": again}
            await self._client.patch(EVENTS, name, body, namespace)
        except NotFoundError:
            return  # expired at this moment: the next report creates a new event


def event_name(about: Regarding, reason: str, note: str) -> str:
    """Return the name of an event, derived from its contents."""
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
