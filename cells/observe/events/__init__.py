"""The datapath's packet events: drops, traces and policy verdicts, as typed records.

Source: reads the perf event array cilium_events, passes every record to the subscribers, which decode it.
Needs:  Maps.   Gives: Events, the records and their texts, the names of drop reasons.
Why:    a packet that is dropped must be explainable while it happens, and cost nothing while nobody looks:
        the buffers exist only as long as there is a subscriber.

    with events.subscribe() as subscription:
        async for batch in subscription:
            for each in batch:
                print(event_text(each if isinstance(each, Lost) else decode(each.data)))

Settings: monitor-num-pages, monitor-queue-size.
"""

from collections.abc import Iterable

from cells.maps import Maps
from cells.observe.events.events import Events, Subscription
from cells.observe.events.lookups import LookupRecord, lookup_sample
from cells.observe.events.packet import Packet, dissect
from cells.observe.events.parties import Party
from cells.observe.events.reasons import (
    DROP_REASONS,
    FORWARD_REASONS,
    MATCH_TYPES,
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    TRACE_REASONS,
    reason_name,
)
from cells.observe.events.records import Drop, Event, Lost, Raw, Sample, Trace, TraceSock, Verdict, decode
from cells.observe.events.requests import RequestRecord, request_sample
from cells.observe.events.settings import EventsSettings
from cells.observe.events.text import NUMBERS, EventNames, event_text
from cells.observe.metrics import Collector, Family
from lifecycle import Member, config, module, provide

__all__ = [
    "DROP_REASONS",
    "FORWARD_REASONS",
    "MATCH_TYPES",
    "NUMBERS",
    "OBSERVATION_POINTS",
    "SOCKET_POINTS",
    "SOCKET_PROTOCOLS",
    "TRACE_REASONS",
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
    "RingError",
    "Sample",
    "Subscription",
    "Trace",
    "TraceSock",
    "Verdict",
    "cell",
    "decode",
    "dissect",
    "event_text",
    "lookup_sample",
    "reason_name",
    "request_sample",
]


def packet_metrics(maps: Maps) -> Member[Collector]:
    """Packets dropped and forwarded as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.observe.events.metrics import families

        return await families(maps)

    return Collector("packets", collect)


cell = module(
    "events",
    "Events of packets from the datapath",
    config(EventsSettings),
    provide(Events, packet_metrics),
)
