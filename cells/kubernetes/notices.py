"""Events: what happened to an object, for those who look at it (``kubectl describe``).

Needs: Client.   Gives: EventRecorder, EVENTS.
Source: KEP-383, events.k8s.io/v1: one object a series, patched when the same thing happens again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Literal, NamedTuple

from msgspec import field

from cells.kubernetes.client import Client, NotFoundError
from cells.kubernetes.leases import micro_time
from cells.kubernetes.objects import Kind, Object

SERIES: Final = 256
"""How many series are remembered."""
LONGEST: Final = 1024
"""Characters of a note."""


class Event(Object, frozen=True, gc=False):
    """An event."""

    reason: str = ""
    note: str = ""
    type: str = field(default="")


EVENTS: Final = Kind(Event, "events.k8s.io/v1", "events")


class About(NamedTuple):
    """The object an event is about."""

    kind: Kind[Any]
    name: str
    namespace: str = ""
    uid: str = ""


class _Series(NamedTuple):
    name: str
    namespace: str
    times: int


class EventRecorder:
    """Writes events; the same again is counted in the first one's series."""

    def __init__(self, client: Client, controller: str, instance: str) -> None:
        self._client = client
        self._controller = controller
        self._instance = instance
        self._series: OrderedDict[tuple[About, str, str], _Series] = OrderedDict()

    async def tell(
        self,
        about: About,
        reason: str,
        note: str,
        *,
        action: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Something happened. Raises ApiError, UnreachableError."""
        key = (about, reason, action)
        known = self._series.get(key)
        if known is not None and await self._again(key, known):
            return
        namespace = about.namespace or "default"
        now = micro_time()
        regarding = {"apiVersion": about.kind.api_version, "kind": about.kind.kind, "name": about.name}
        if about.namespace:
            regarding["namespace"] = about.namespace
        if about.uid:
            regarding["uid"] = about.uid
        made = await self._client.create(
            EVENTS,
            {
                "apiVersion": EVENTS.api_version,
                "kind": "Event",
                "metadata": {"generateName": f"{about.name}-", "namespace": namespace},
                "eventTime": now,
                "regarding": regarding,
                "reason": reason,
                "action": action,
                "note": note[:LONGEST],
                "type": kind,
                "reportingController": self._controller,
                "reportingInstance": self._instance,
            },
            namespace,
        )
        self._series[key] = _Series(made.name, namespace, 1)
        while len(self._series) > SERIES:
            self._series.popitem(last=False)

    async def _again(self, key: tuple[About, str, str], known: _Series) -> bool:
        count = known.times + 1
        series = {"series": {"count": count, "lastObservedTime": micro_time()}}
        try:
            await self._client.patch(EVENTS, known.name, series, known.namespace)
        except NotFoundError:  # the server forgets events after an hour
            del self._series[key]
            return False
        self._series[key] = known._replace(times=count)
        self._series.move_to_end(key)
        return True
