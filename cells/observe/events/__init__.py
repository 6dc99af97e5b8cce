"""Events of packets, requests and the agent, as typed records: drops, traces, policy verdicts and others.

Reads the perf event array cilium_events while there are subscribers (monitor, Hubble), and passes undecoded
events to them. Without subscribers there are no buffers, and events cost nothing.

    with events.subscribe() as subscription:
        async for batch in subscription:
            for each in batch:
                print(event_text(each if isinstance(each, Lost) else decode(each.data)))

Settings: monitor-num-pages, monitor-queue-size.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Self

import anyio
from anyio import to_thread
from msgspec import Meta

from cells.base.metrics import Collector, MetricFamily, counter
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.flows import METRIC_EGRESS, METRIC_INGRESS, METRIC_SERVICE, MetricsKey, MetricsValue
from cells.observe.events.access_log import (
    LookupRecord,
    Party,
    RequestRecord,
    lookup_sample,
    request_sample,
)
from cells.observe.events.reader import Reader
from cells.observe.events.records import (
    AgentNotification,
    Drop,
    Event,
    Lost,
    Raw,
    Sample,
    Trace,
    TraceSock,
    Verdict,
    decode,
)
from cells.observe.events.text import (
    DROP_REASONS,
    FORWARD_REASONS,
    MATCH_TYPES,
    NUMBERS,
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    TRACE_REASONS,
    EventNames,
    Packet,
    dissect,
    event_text,
    notification_name,
    reason_name,
)
from lifecycle import Hook, Lifecycle, Member, Settings, config, module, provide

__all__ = [
    "DROP_REASONS",
    "FORWARD_REASONS",
    "MATCH_TYPES",
    "NUMBERS",
    "OBSERVATION_POINTS",
    "SOCKET_POINTS",
    "SOCKET_PROTOCOLS",
    "TRACE_REASONS",
    "AgentNotification",
    "Drop",
    "Event",
    "EventNames",
    "Events",
    "EventsSettings",
    "LookupRecord",
    "Lost",
    "Packet",
    "Party",
    "Raw",
    "RequestRecord",
    "Sample",
    "Subscription",
    "Trace",
    "TraceSock",
    "Verdict",
    "cell",
    "counted",
    "decode",
    "dissect",
    "event_text",
    "lookup_sample",
    "notification_name",
    "reason_name",
    "request_sample",
]


# Settings of the events cell.

MAX_PAGES: Final = 1 << 14


class EventsSettings(Settings, frozen=True):
    """Buffers for the datapath's events. They take no memory without a client."""

    monitor_num_pages: int = 64
    """Pages of each CPU's event buffer, a power of two."""

    monitor_queue_size: Annotated[int, Meta(ge=1)] = 4096
    """Events queued for each client before further ones are lost to it."""

    def faults(self) -> Iterator[str]:
        pages = self.monitor_num_pages
        if not 1 <= pages <= MAX_PAGES or pages & (pages - 1):
            yield f"monitor-num-pages={pages}: expected a power of two, 1 to {MAX_PAGES}"


# Subscriptions, each with a queue of events.


class Subscription:
    """The events of one subscriber: iterate in one task; each step returns all queued events.

    The iteration ends when the agent stops. Events that do not fit into the queue are lost: a Lost event
    marks the place, and ``lost`` counts them, including those that the kernel lost.
    """

    def __init__(self, queue_size: int) -> None:
        self.lost = 0
        self._queue_size = queue_size
        self._queue: list[Sample | Lost] = []
        self._unreported_lost = 0
        self._changed = anyio.Event()
        self._stopped = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample | Lost]:
        while not self._queue:
            if self._stopped:
                raise StopAsyncIteration
            self._changed = anyio.Event()
            await self._changed.wait()
        events, self._queue = self._queue, []
        if self._unreported_lost:
            events.append(Lost(self._unreported_lost))
            self._unreported_lost = 0
        return events

    def publish(self, event: Sample | Lost) -> None:
        """Queue an event, or count it as lost."""
        if isinstance(event, Lost):
            self.lost += event.count
        if len(self._queue) >= self._queue_size:
            self._count_lost(event)
            return
        self._queue.append(event)
        self._changed.set()

    def _count_lost(self, event: Sample | Lost) -> None:
        if isinstance(event, Lost):
            self._unreported_lost += event.count
        else:
            self._unreported_lost += 1
            self.lost += 1

    def end(self) -> None:
        """End the iteration after the queued events."""
        self._stopped = True
        self._changed.set()


class Events:
    """The datapath's packet events, for any number of subscribers.

    The first subscriber attaches the buffers, and the last detaches them: without buffers, each event costs
    the datapath one failing call.
    """

    def __init__(self, settings: EventsSettings, maps: Maps, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self.pages = settings.monitor_num_pages
        """Pages of each CPU's buffer."""
        self._maps = maps
        self._reader: Reader | None = None
        self._subscriptions: list[Subscription] = []
        self._stopped = False
        lifecycle.append(Hook("offer events", self._start, self._stop))

    @contextmanager
    def subscribe(self, queue_size: int | None = None) -> Iterator[Subscription]:
        """Subscribe to all events from now on, with a queue of ``queue_size`` events.

        Synchronous, on the event loop. Raises HiveError if the kernel provides no buffers. Another reader of
        cilium_events, such as ``bpftool map event_pipe``, replaces this one: the last to attach receives the
        events.
        """
        subscription = Subscription(queue_size or self._settings.monitor_queue_size)
        if self._reader is None and not self._stopped:
            self._reader = Reader(self._maps.events, self._settings.monitor_num_pages, self._publish)
        if self._stopped:
            subscription.end()
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
            if not self._subscriptions:
                self._close()

    @property
    def watched(self) -> bool:
        """Whether there are subscribers."""
        return bool(self._subscriptions)

    def publish(self, data: bytes) -> None:
        """Publish an event of the agent itself."""
        self._publish(Sample(0, data))

    def _publish(self, event: Sample | Lost) -> None:
        for subscription in self._subscriptions:
            subscription.publish(event)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def _start(self) -> None:
        self._stopped = False

    async def _stop(self) -> None:
        self._stopped = True
        self._close()
        for subscription in self._subscriptions:
            subscription.end()


# Metrics of dropped and forwarded packets.
#
# Source: Cilium 1.17, cilium_drop_count_total and others, from the map cilium_metrics.

_DIRECTIONS: Final = {METRIC_INGRESS: "INGRESS", METRIC_EGRESS: "EGRESS", METRIC_SERVICE: "SERVICE"}
_INVALID: Final = 2
"""The only drop reason below 130."""
_FIRST_DROP: Final = 130

Counts = Iterable[tuple[MetricsKey, MetricsValue]]


def packet_metrics(maps: Maps) -> Member[Collector]:
    """Provide dropped and forwarded packets as metrics; a thread reads the map."""

    async def collect() -> Iterable[MetricFamily]:
        return list(counted(await to_thread.run_sync(_read, maps.metrics.id)))

    return Collector("packets", collect)


def _read(map_id: int) -> list[tuple[MetricsKey, MetricsValue]]:
    with map_by_id(map_id, "cilium_metrics") as table:
        return [(MetricsKey.unpack(key), MetricsValue.unpack(value)) for key, value in table.items()]


def counted(counts: Counts) -> Iterator[MetricFamily]:
    """Sum the counters over source files and lines, and over all reasons of forwarding."""
    dropped: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    forwarded: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for key, value in counts:
        direction = _DIRECTIONS.get(key.direction, "UNKNOWN")
        is_drop = key.reason == _INVALID or key.reason >= _FIRST_DROP
        sums = dropped[reason_name(key.reason), direction] if is_drop else forwarded[direction,]
        sums[0] += value.packets
        sums[1] += value.octets
    for kind, sums_of, labels, text in (
        ("drop", dropped, "reason direction", "dropped, tagged by drop reason and ingress/egress direction"),
        ("forward", forwarded, "direction", "forwarded, tagged by ingress/egress direction"),
    ):
        for position, unit, what in ((0, "count", "Total packets"), (1, "bytes", "Total bytes")):
            series = {labels_of: sums[position] for labels_of, sums in sums_of.items()}
            yield counter(f"cilium_{kind}_{unit}_total", f"{what} {text}", series, labels, fixed=True)


cell = module(
    "events",
    "Events of packets from the datapath",
    config(EventsSettings),
    provide(Events, packet_metrics),
)
