"""The event stream of ``hive monitor``: live events, optionally preceded by stored ones.

Stored events have the names valid at their time, since their pods may have been deleted.
"""

import binascii
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import click

from cells.observe.events import NUMBERS, Event, EventNames, Lost, decode
from hive.client import TIMEOUT, follow
from hive.names import Names, labels_text
from hive.observe.hubble_flags import parse_time

LISTENING: Final = "Listening for events; press ctrl-C to quit"
_NANOSECONDS: Final = 1_000_000_000


class Moment(click.ParamType[int]):
    """A time in nanoseconds since 1970, given as a time or relative to now."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click.ParamType."""
        if isinstance(value, int):
            return value
        try:
            moment = parse_time(str(value))
        except ValueError:
            self.fail(
                f"{value!r}: expected how long ago, such as 5m or 1h30m, or a time, such as"
                " 2026-11-28T08:00:00Z",
                param,
                ctx,
            )
        if moment > time.time_ns():
            self.fail(f"{value!r} is still to come: expected a time before now", param, ctx)
        if moment < 0:
            self.fail(f"{value!r} is before 1970: expected a later time", param, ctx)
        return moment


class RecordedEvent(NamedTuple):
    """An event with its time and the CPU of its perf buffer."""

    event: Event
    time: datetime
    cpu: int | None
    names: Mapping[str, Any] | None = None
    """Names valid at its time, sent by the agent; None for a live event."""


class HistoricNames:
    """Resolves numbers and addresses to the names valid at an event's time, or else the current names."""

    def __init__(self, agent_socket: Path, *, numeric: bool) -> None:
        self.current = Names(agent_socket, TIMEOUT)
        self.shown: EventNames = NUMBERS if numeric else self
        """The resolver for output: this one, or numbers only."""
        self._historic: Mapping[str, Any] = {}

    def resolve_as_of(self, recorded: RecordedEvent) -> None:
        """Resolve with the names of this event from now on."""
        self._historic = recorded.names or {}

    def endpoint(self, number: int, /) -> str:
        """Return ``namespace/name`` of an endpoint's pod."""
        return self._historic_name("endpoints", str(number)) or self.current.endpoint(number)

    def identity(self, number: int, /) -> str:
        """Return the short labels of an identity."""
        return labels_text(self._historic_name("identities", str(number)) or ()) or self.current.identity(
            number
        )

    def address(self, address: str, /) -> str:
        """Return the pod, service or node with an address."""
        return (
            self._historic_name("pods", address)
            or self._historic_name("services", address)
            or self.current.address(address)
        )

    def pod(self, address: str, /) -> str:
        """Return the pod with an address, on any node."""
        return self._historic_name("pods", address) or self.current.pod(address)

    def _historic_name(self, kind: str, key: str) -> Any:
        return self._historic.get(kind, {}).get(key, "")


def stored_and_live(
    agent_socket: Path,
    since: int | None,
    last: int | None,
    selects: Callable[[RecordedEvent], bool],
    *,
    named: bool,
) -> Iterator[RecordedEvent]:
    """Yield stored events since a time, or the last N selected ones, then live events.

    Raises click.ClickException with one line if the agent stores none, and when it stops.
    """
    query = urlencode({"since": since or 0, "names": str(named).lower()})
    return _stored_then_live(follow(f"/hive/events?{query}", agent_socket), since, last, selects)


def _stored_then_live(
    lines: Iterable[Mapping[str, Any]],
    since: int | None,
    last: int | None,
    selects: Callable[[RecordedEvent], bool],
) -> Iterator[RecordedEvent]:
    selected: deque[RecordedEvent] = deque()
    events = 0
    replaying = True
    for line in lines:
        if "history" in line:
            _print_history_start(line["history"], since)
        elif "live" in line:
            yield from selected
            selected.clear()
            replaying = False
            click.echo(LISTENING, err=True)
        elif selects(recorded := _recorded_event(line)):
            if last is None or not replaying:
                yield recorded
                continue
            selected.append(recorded)
            events += not isinstance(recorded.event, Lost)
            while events > last:
                events -= not isinstance(selected.popleft().event, Lost)


def _print_history_start(history: Mapping[str, Any], since: int | None) -> None:
    """Print where the stored events start, if that is later than requested."""
    start = history["begins"]
    if start is None:
        click.echo("the agent holds no events yet", err=True)
    elif since is not None and start > since and history["held"] == history["capacity"]:
        click.echo(
            f"the agent's events begin at {_local(start):%H:%M:%S}: it holds {history['held']}"
            " (hubble-event-buffer-capacity)",
            err=True,
        )


def _recorded_event(line: Mapping[str, Any]) -> RecordedEvent:
    if "data" not in line:
        return RecordedEvent(
            Lost(line.get("lost", 0), line.get("cpu")), _local(line["time"]), line.get("cpu")
        )
    data = binascii.a2b_base64(line["data"])
    return RecordedEvent(decode(data), _local(line["time"]), line.get("cpu"), line.get("names"))


def _local(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / _NANOSECONDS).astimezone()
