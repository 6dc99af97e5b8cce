"""Stores this node's events in the ring, and answers the queries of clients.

``EventSources`` adds events; the Observer service, metrics, exporters and ``hive monitor`` read them.

Source: Cilium 1.17, pkg/hubble/observer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Container, Iterable
from typing import Final
from weakref import WeakValueDictionary

import anyio
import msgspec

from cells.hubble.codec import FieldMask, WireMessage, encode
from cells.hubble.enums import LostEventSource
from cells.hubble.filters import Predicate, compile_filters
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, HubbleEvent, LostEvent
from cells.hubble.parser import FlowOrigin, Parser
from cells.hubble.parser.resolver import Parties, Resolver
from cells.hubble.ring import FlowRing, ReaderScheduler, encode_flow_response, encode_loss_response
from cells.hubble.rpc.observer import (
    GetAgentEventsRequest,
    GetAgentEventsResponse,
    GetDebugEventsRequest,
    GetDebugEventsResponse,
    GetFlowsRequest,
    GetNamespacesResponse,
    ObservedNamespace,
    ServerStatusResponse,
)
from cells.hubble.scalars import is_valid_time
from cells.observe.events import Lost, Sample

_Request = GetFlowsRequest | GetAgentEventsRequest | GetDebugEventsRequest
SECOND: Final = 1_000_000_000
RATE_WINDOW: Final = 60 * SECOND
_SLICE: Final = 32
"""Number of events that one reader decodes in a row: about a millisecond."""
_BATCH_BYTES: Final = 64 * 1024
_BATCH_EVENTS: Final = 100
_KEEPALIVE: Final = 30.0
"""Seconds without events after which records() yields an empty batch."""
_SHARED_RESPONSES: Final = 64
"""Number of cached responses for clients with the same filters."""


class InvalidRequest(ValueError):  # noqa: N818 - clients see its text
    """A request sets fields that exclude each other."""


class InvalidTime(ValueError):  # noqa: N818 - clients see its text
    """A request has a time outside of the range of google.protobuf.Timestamp."""


class SeenEvent(msgspec.Struct, frozen=True):
    """An event read from the ring."""

    event: HubbleEvent
    time: int
    """Nanoseconds since 1970."""
    node_name: str
    """``cluster/node``."""


class SeenRecord(msgspec.Struct, frozen=True):
    """An undecoded record of the datapath or a proxy, or a loss."""

    record: Sample | Lost
    time: int
    """Nanoseconds since 1970."""
    flow: Flow | None = None
    """The flow with the names of its time; None for live records and records that become none."""


class FlowObserver:
    """Stores this node's events and answers the queries of clients."""

    def __init__(self, capacity: int, origin: FlowOrigin, parser: Parser, version: str) -> None:
        self.origin = origin
        self.lost: dict[str, int] = {}
        """Number of lost events, by the name of the queue or buffer that was full."""
        self.ring = FlowRing(capacity, parser)
        self._version = version
        self._started = time.monotonic_ns()
        self._parties = Parties()
        self._resolver: Resolver | None = None
        self._client_readers = ReaderScheduler(yielding=True)
        self._internal_readers = ReaderScheduler()
        """Scheduler of the agent's own readers: metrics, exporters, drop events."""
        self._flow_responses: WeakValueDictionary[bytes, _FlowResponses] = WeakValueDictionary()
        """Response caches in use, by the encoded filters and field mask."""

    # Adding events

    def add(self, records: Iterable[tuple[Sample, Resolver]], now: int) -> None:
        """Add a batch of datapath records, each with the resolver for its flow."""
        ring, parties, resolver = self.ring, self._parties, self._resolver
        for sample, resolver in records:
            ring.add(now, sample, resolver)
            parties.record(sample.data, now)
        self._resolver = resolver
        self.wake()

    def add_event(self, event: HubbleEvent, now: int, record: Sample | None = None) -> None:
        """Add an event that is already built, with the record that it was built from, if any."""
        self.ring.add(now, event, record=record)
        if isinstance(event, Flow):
            self._parties.flow(event, now)
        elif isinstance(event, LostEvent):
            self._count_lost(event.source, event.num_events_lost)
        self.wake()

    def _count_lost(self, source: int, count: int) -> None:
        name = LostEventSource(source).name.lower()
        self.lost[name] = self.lost.get(name, 0) + count

    def wake(self) -> None:
        """Wake followers after new events, and when the server stops."""
        self._internal_readers.wake()
        self._client_readers.wake()

    # Queries

    async def get_flows(self, request: GetFlowsRequest) -> AsyncGenerator[list[bytes], None]:
        """Yield batches of encoded GetFlowsResponses.

        Raises InvalidRequest, InvalidFilter, InvalidTime and InvalidFieldMask before the first batch.
        """
        _check(request)
        predicate = compile_filters(request.whitelist, request.blacklist)
        _check_times(request)
        filtered = bool(request.whitelist or request.blacklist)
        paths = request.field_mask or (request.experimental and request.experimental.field_mask) or ()
        mask = FieldMask.parse(paths, Flow)
        query_key = encode(
            GetFlowsRequest(whitelist=request.whitelist, blacklist=request.blacklist, field_mask=tuple(paths))
        )
        responses = self._flow_responses.get(query_key)
        if responses is None:
            responses = _FlowResponses(
                self.ring, self.origin.node_name, predicate if filtered else None, mask
            )
            self._flow_responses[query_key] = responses
        query = _Query(
            number=request.number,
            first=request.first,
            follow=request.follow,
            since=request.since,
            until=request.until,
            predicate=predicate if filtered else None,
            response=responses.of,
            lost=True,
        )
        async for batch in self._responses(query):
            yield batch

    async def get_agent_events(self, request: GetAgentEventsRequest) -> AsyncGenerator[list[bytes], None]:
        """Yield batches of encoded GetAgentEventsResponses. Raises InvalidRequest and InvalidTime."""

        def response(event: AgentEvent, time: int, node_name: str) -> WireMessage:
            return GetAgentEventsResponse(agent_event=event, node_name=node_name, time=time)

        async for batch in self._events_of_type(request, AgentEvent, response):
            yield batch

    async def get_debug_events(self, request: GetDebugEventsRequest) -> AsyncGenerator[list[bytes], None]:
        """Yield batches of encoded GetDebugEventsResponses. Raises InvalidRequest and InvalidTime."""

        def response(event: DebugEvent, time: int, node_name: str) -> WireMessage:
            return GetDebugEventsResponse(debug_event=event, node_name=node_name, time=time)

        async for batch in self._events_of_type(request, DebugEvent, response):
            yield batch

    async def follow(self, records: Container[bytes] | None = None) -> AsyncGenerator[list[SeenEvent], None]:
        """Yield new events; a LostEvent replaces those that a slow reader missed.

        ``records`` limits datapath records to these message types (first bytes); others are not decoded.
        """
        ring, position, node_name = self.ring, self.ring.end, self.origin.node_name

        def read() -> list[SeenEvent] | None:
            nonlocal position
            found: list[SeenEvent] = []
            if position < ring.begin:
                lost, position = self._report_missed(position), ring.begin
                found.append(SeenEvent(lost, time.time_ns(), node_name))
            for number in range(position, min(ring.end, position + _SLICE)):
                position = number + 1
                if records is not None and not ring.matches(number, records):
                    continue
                if (event := ring.event(number)) is not None:
                    found.append(SeenEvent(event, ring.time_of(number), node_name))
            return found or None

        while True:
            yield await self._internal_readers.read(read, lambda: position == ring.end)

    async def records(self, since: int, *, named: bool) -> AsyncGenerator[list[SeenRecord], None]:
        """Yield stored records since a time, with their flows if ``named``, then new records.

        An empty batch ends the stored records; further ones follow as keep-alives after a pause. A Lost
        replaces records that a slow reader missed.
        """
        ring = self.ring
        position, live_from = ring.begin, ring.end
        replaying = True

        def read() -> list[SeenRecord] | None:
            nonlocal position
            found: list[SeenRecord] = []
            if position == ring.end:  # woken without an event: the server may have stopped
                return found
            if position < ring.begin:
                lost, position = self._report_missed(position), ring.begin
                found.append(SeenRecord(Lost(lost.num_events_lost), time.time_ns()))
            for number in range(position, min(live_from if replaying else ring.end, position + _SLICE)):
                position = number + 1
                arrived, record = ring.time_of(number), ring.record(number)
                if record is not None and (arrived >= since or not replaying):
                    event = ring.event(number) if named and replaying else None
                    found.append(SeenRecord(record, arrived, event if type(event) is Flow else None))
            return found or ([] if replaying and position >= live_from else None)

        while replaying:
            found = await self._client_readers.read(read, lambda: False)
            if found:
                yield found
            replaying = position < live_from
        yield []
        while True:
            found = []
            with anyio.move_on_after(_KEEPALIVE):
                found = await self._client_readers.read(read, lambda: position == ring.end)
            yield found

    def server_status(self) -> ServerStatusResponse:
        """Return number of flows, capacity of the ring, uptime, version and flow rate."""
        ring = self.ring
        return ServerStatusResponse(
            num_flows=ring.end - ring.begin,
            max_flows=ring.capacity,
            seen_flows=ring.seen_flows,
            uptime_ns=time.monotonic_ns() - self._started,
            version=self._version,
            flows_rate=self._rate(time.time_ns()),
        )

    def namespaces(self) -> GetNamespacesResponse:
        """Return the namespaces in flows of the last hour."""
        cluster = self.origin.node_name.rpartition("/")[0]
        names = self._parties.namespaces(self._resolver, time.time_ns())
        return GetNamespacesResponse(
            namespaces=tuple(
                ObservedNamespace(cluster="" if cluster == "default" else cluster, namespace=name)
                for name in names
            )
        )

    def _rate(self, now: int) -> float:
        """Return flows per second over the last minute, or since the oldest flow if that is newer."""
        ring, flows, oldest = self.ring, 0, now
        for number in range(ring.end - 1, ring.begin - 1, -1):
            if not ring.is_flow(number):
                continue
            arrived = ring.time_of(number)
            if now - arrived > RATE_WINDOW:
                oldest = now - RATE_WINDOW
                break
            oldest = arrived
            flows += 1
        return flows * SECOND / (now - oldest) if now > oldest else 0.0

    # Answering queries

    def _events_of_type(
        self,
        request: GetAgentEventsRequest | GetDebugEventsRequest,
        event_type: type[AgentEvent] | type[DebugEvent],
        to_response: Callable[..., WireMessage],
    ) -> AsyncGenerator[list[bytes], None]:
        _check(request)
        _check_times(request)
        node_name, ring = self.origin.node_name, self.ring

        def response(number: int) -> bytes:
            event = ring.event(number)
            if type(event) is not event_type:
                return b""
            return encode(to_response(event, ring.time_of(number), node_name))

        return self._responses(
            _Query(
                number=request.number,
                first=request.first,
                follow=request.follow,
                since=request.since,
                until=request.until,
                response=response,
            )
        )

    async def _responses(self, query: _Query) -> AsyncGenerator[list[bytes], None]:
        ring = self.ring
        position = await self._client_readers.read(self._search_start(query), lambda: False)
        remaining = 0 if query.follow else query.number
        ended = not query.follow and position >= ring.end

        def read() -> list[bytes] | None:
            nonlocal position, remaining, ended
            batch: list[bytes] = []
            position, ended = self._read_slice(query, position, batch, remaining)
            if remaining:
                remaining -= min(
                    remaining, sum(not _is_lost_event(one) for one in batch) if query.lost else len(batch)
                )
                ended = ended or not remaining
            ended = ended or (position >= ring.end and not query.follow)
            return batch if batch or ended else None

        while not ended:
            if batch := await self._client_readers.read(read, lambda: position >= ring.end):
                yield batch

    def _read_slice(
        self, query: _Query, position: int, batch: list[bytes], remaining: int
    ) -> tuple[int, bool]:
        """Append the responses for up to _SLICE events from `position` on to `batch`.

        Returns the next position, and whether the query has ended.
        """
        ring, size, sent = self.ring, 0, 0
        if position < ring.begin:
            lost_events, position = self._report_missed(position), ring.begin
            if query.lost:
                batch.append(encode_loss_response(lost_events, time.time_ns(), self.origin.node_name))
        for number in range(position, min(ring.end, position + _SLICE)):
            position = number + 1
            slot = ring.slot(number)
            lost = type(slot.event) is LostEvent
            if not lost:
                arrived = slot.time
                if query.until is not None and arrived > query.until:
                    return position, True
                if query.since is not None and arrived < query.since:
                    continue
            elif not query.lost:
                continue
            if response := query.response(number):
                batch.append(response)
                size += len(response)
                sent += not lost
            if (remaining and sent >= remaining) or size >= _BATCH_BYTES or len(batch) >= _BATCH_EVENTS:
                break
        return position, False

    def _search_start(self, query: _Query) -> Callable[[], int | None]:
        """Return a reader that finds the number of the first event to send."""
        ring = self.ring
        counted, number = 0, ring.end

        def search() -> int | None:
            nonlocal counted, number
            if query.first and query.since is None:
                return ring.begin
            if query.follow and not query.number and query.since is None:
                return max(ring.begin, ring.end - 1)
            for _ in range(_SLICE if query.predicate else _SLICE * 32):
                if number <= ring.begin:
                    return ring.begin
                number -= 1
                if ring.is_lost(number) or not query.counts(ring, number):
                    continue
                counted += 1
                if query.since is not None:
                    if ring.time_of(number) < query.since:
                        return number
                elif counted == query.number:
                    return number
            return None

        return search

    def _report_missed(self, position: int) -> LostEvent:
        missed = self.ring.begin - position
        self._count_lost(LostEventSource.HUBBLE_RING_BUFFER, missed)
        return LostEvent(source=LostEventSource.HUBBLE_RING_BUFFER, num_events_lost=missed)


class _Query(msgspec.Struct, frozen=True, kw_only=True):
    """A client's query for events of one type."""

    number: int
    first: bool
    follow: bool
    since: int | None
    until: int | None
    predicate: Predicate | None = None
    """None if all events match."""
    response: Callable[[int], bytes]
    """Returns the encoded response with the event of a number; empty if it does not match."""
    lost: bool = False
    """Whether LostEvents are sent, regardless of filters and times."""

    def counts(self, ring: FlowRing, number: int) -> bool:
        """Whether an event counts towards ``number`` in the search for the first event."""
        if self.predicate is None:
            return ring.may_have_event(number)
        event = ring.event(number)
        return event is not None and self.predicate(event)


class _FlowResponses:
    """Cache of GetFlowsResponses, shared by clients with the same filters and field mask."""

    def __init__(self, ring: FlowRing, node_name: str, predicate: Predicate | None, mask: FieldMask) -> None:
        self._ring = ring
        self._node_name = node_name
        self._predicate = predicate
        self._mask = mask
        self._recent: list[tuple[int, bytes]] = [(-1, b"")] * _SHARED_RESPONSES

    def of(self, number: int) -> bytes:
        """Return the response with the event of this number; empty if it does not match."""
        index = number % _SHARED_RESPONSES
        cached_number, response = self._recent[index]
        if cached_number != number:
            response = self._response(number)
            self._recent[index] = number, response
        return response

    def _response(self, number: int) -> bytes:
        event = self._ring.event(number)
        if type(event) is LostEvent:
            return self._ring.flow_response(number, self._node_name)
        if type(event) is not Flow or (self._predicate is not None and not self._predicate(event)):
            return b""
        if not self._mask:
            return self._ring.flow_response(number, self._node_name)
        return encode_flow_response(self._mask.apply(event))


def _check(request: _Request) -> None:
    if request.first and request.follow:
        raise InvalidRequest("first cannot be specified with follow")


def _check_times(request: _Request) -> None:
    for name, value in (("since", request.since), ("until", request.until)):
        if value is not None and not is_valid_time(value):
            raise InvalidTime(f"{name}: timestamp is not between 0001-01-01 and 9999-12-31")


def _is_lost_event(response: bytes) -> bool:
    """Whether an encoded GetFlowsResponse contains a LostEvent: then field 3 comes first."""
    return response[0] == 3 << 3 | 2
