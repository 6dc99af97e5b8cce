"""The events of ``hive monitor``: live ones, optionally preceded by stored ones.

A stored event has the names of its time, since its pod may have been deleted.
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


class Seen(NamedTuple):
    """An event with its time and the CPU of its buffer."""

    event: Event
    time: datetime
    cpu: int | None
    names: Mapping[str, Any] | None = None
    """Names of its time, as sent by the agent; None for a live event."""


class NamesThen:
    """Names of an event's time, by default the current ones."""

    def __init__(self, agent_socket: Path, *, numeric: bool) -> None:
        self.now = Names(agent_socket, TIMEOUT)
        self.shown: EventNames = NUMBERS if numeric else self
        """The names for output."""
        self._then: Mapping[str, Any] = {}

    def at(self, seen: Seen) -> None:
        """Use the names of this event from now on."""
        self._then = seen.names or {}

    def endpoint(self, number: int, /) -> str:
        """Return ``namespace/name`` of an endpoint's pod."""
        return self._known("endpoints", str(number)) or self.now.endpoint(number)

    def identity(self, number: int, /) -> str:
        """Return the short labels of an identity."""
        return labels_text(self._known("identities", str(number)) or ()) or self.now.identity(number)

    def address(self, address: str, /) -> str:
        """Return the pod, service or node with an address."""
        return self._known("pods", address) or self._known("services", address) or self.now.address(address)

    def pod(self, address: str, /) -> str:
        """Return the pod with an address, on any node."""
        return self._known("pods", address) or self.now.pod(address)

    def _known(self, kind: str, key: str) -> Any:
        return self._then.get(kind, {}).get(key, "")


def stored_and_live(
    agent_socket: Path, since: int | None, last: int | None, shows: Callable[[Seen], bool], *, named: bool
) -> Iterator[Seen]:
    """Yield stored events since a time, or the last N selected ones, then live events.

    Raises click.ClickException with one line if the agent stores none, and when it stops.
    """
    query = urlencode({"since": since or 0, "names": str(named).lower()})
    return _recalled(follow(f"/hive/events?{query}", agent_socket), since, last, shows)


def _recalled(
    lines: Iterable[Mapping[str, Any]], since: int | None, last: int | None, shows: Callable[[Seen], bool]
) -> Iterator[Seen]:
    held: deque[Seen] = deque()
    events = 0
    past = True
    for line in lines:
        if "history" in line:
            _mention(line["history"], since)
        elif "live" in line:
            yield from held
            held.clear()
            past = False
            click.echo(LISTENING, err=True)
        elif shows(seen := _seen(line)):
            if last is None or not past:
                yield seen
                continue
            held.append(seen)
            events += not isinstance(seen.event, Lost)
            while events > last:
                events -= not isinstance(held.popleft().event, Lost)


def _mention(history: Mapping[str, Any], since: int | None) -> None:
    """Print where the stored events start, if that is later than requested."""
    begins = history["begins"]
    if begins is None:
        click.echo("the agent holds no events yet", err=True)
    elif since is not None and begins > since and history["held"] == history["capacity"]:
        click.echo(
            f"the agent's events begin at {_local(begins):%H:%M:%S}: it holds {history['held']}"
            " (hubble-event-buffer-capacity)",
            err=True,
        )


def _seen(line: Mapping[str, Any]) -> Seen:
    if "data" not in line:
        return Seen(Lost(line.get("lost", 0), line.get("cpu")), _local(line["time"]), line.get("cpu"))
    data = binascii.a2b_base64(line["data"])
    return Seen(decode(data), _local(line["time"]), line.get("cpu"), line.get("names"))


def _local(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / _NANOSECONDS).astimezone()
