"""The ring of this node's events: fills it, and answers queries of clients.

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
from cells.hubble.ring import FlowRing, ReaderTurns, encode_flow_response, encode_loss_response
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
from cells.observe.events import Lost, Sample

SECOND: Final = 1_000_000_000
RATE_WINDOW: Final = 60 * SECOND
_SLICE: Final = 32
"""Events that one reader builds before other work: about a millisecond."""
_BATCH_BYTES: Final = 64 * 1024
_BATCH_EVENTS: Final = 100
_QUIET: Final = 30.0
"""Seconds after which a follower of records gets an empty batch."""
_SHARED: Final = 64
"""Maximum number of responses that clients with the same filters share."""


class InvalidRequest(ValueError):  # noqa: N818 - clients see its text
    """Fields of a request contradict each other."""


class SeenEvent(msgspec.Struct, frozen=True):
    """An event of the ring."""

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
    """With the names of its moment; None if it does not become a flow, or the reader is live."""


class FlowObserver:
    """Receives this node's events and answers the queries of clients."""

    def __init__(self, capacity: int, origin: FlowOrigin, parser: Parser, version: str) -> None:
        self.origin = origin
        self.lost: dict[str, int] = {}
        """Lost events, by name of the full queue."""
        self.ring = FlowRing(capacity, parser)
        self._version = version
        self._started = time.monotonic_ns()
        self._parties = Parties()
        self._resolver: Resolver | None = None
        self._turns = ReaderTurns(yielding=True)
        self._own_turns = ReaderTurns()
        """Turns of the agent's own readers, which count events and write files."""
        self._flow_answers: WeakValueDictionary[bytes, _FlowAnswers] = WeakValueDictionary()
        """Shared responses in use, by filters and fields."""

    # Events in

    def add(self, records: Iterable[tuple[Sample, Resolver]], now: int) -> None:
        """Add a batch of datapath records, each with the resolver for its flow."""
        ring, parties, resolver = self.ring, self._parties, self._resolver
        for sample, resolver in records:
            ring.add(now, sample, resolver)
            parties.record(sample.data, now)
        self._resolver = resolver
        self.wake()

    def add_event(self, event: HubbleEvent, now: int, record: Sample | None = None) -> None:
        """Add an event that is built already, perhaps from a record."""
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
        """Wake followers: there are new events, or the server stops."""
        self._own_turns.wake()
        self._turns.wake()

    # Queries

    async def get_flows(self, request: GetFlowsRequest) -> AsyncGenerator[list[bytes], None]:
        """Encoded responses of GetFlows, as they are produced.

        Raises InvalidRequest, InvalidFilter and InvalidFieldMask, with the first batch.
        """
        _check(request.first, request.follow)
        passes = compile_filters(request.whitelist, request.blacklist)
        filtered = bool(request.whitelist or request.blacklist)
        paths = request.field_mask or (request.experimental and request.experimental.field_mask) or ()
        mask = FieldMask.parse(paths, Flow)
        asked = encode(
            GetFlowsRequest(whitelist=request.whitelist, blacklist=request.blacklist, field_mask=tuple(paths))
        )
        answers = self._flow_answers.get(asked)
        if answers is None:
            answers = _FlowAnswers(self.ring, self.origin.node_name, passes if filtered else None, mask)
            self._flow_answers[asked] = answers
        query = _Query(
            number=request.number,
            first=request.first,
            follow=request.follow,
            since=request.since,
            until=request.until,
            passes=passes if filtered else None,
            answer=answers.of,
            lost=True,
        )
        async for batch in self._answers(query):
            yield batch

    async def get_agent_events(self, request: GetAgentEventsRequest) -> AsyncGenerator[list[bytes], None]:
        """Encoded responses of GetAgentEvents, as they are produced. Raises InvalidRequest."""

        def response(event: AgentEvent, time: int, node_name: str) -> WireMessage:
            return GetAgentEventsResponse(agent_event=event, node_name=node_name, time=time)

        async for batch in self._of_kind(request, AgentEvent, response):
            yield batch

    async def get_debug_events(self, request: GetDebugEventsRequest) -> AsyncGenerator[list[bytes], None]:
        """Encoded responses of GetDebugEvents, as they are produced. Raises InvalidRequest."""

        def response(event: DebugEvent, time: int, node_name: str) -> WireMessage:
            return GetDebugEventsResponse(debug_event=event, node_name=node_name, time=time)

        async for batch in self._of_kind(request, DebugEvent, response):
            yield batch

    async def follow(self, records: Container[bytes] | None = None) -> AsyncGenerator[list[SeenEvent], None]:
        """All events from now on; a LostEvent replaces those that a slow reader missed.

        ``records``: first bytes of relevant datapath records; no flows are built from others.
        """
        ring, position, node_name = self.ring, self.ring.end, self.origin.node_name

        def read() -> list[SeenEvent] | None:
            nonlocal position
            found: list[SeenEvent] = []
            if position < ring.begin:
                lost, position = self._overtaken(position), ring.begin
                found.append(SeenEvent(lost, time.time_ns(), node_name))
            for number in range(position, min(ring.end, position + _SLICE)):
                position = number + 1
                if records is not None and not ring.may_be(number, records):
                    continue
                if (event := ring.event(number)) is not None:
                    found.append(SeenEvent(event, ring.time_of(number), node_name))
            return found or None

        while True:
            yield await self._own_turns.read(read, lambda: position == ring.end)

    async def records(self, since: int, *, named: bool) -> AsyncGenerator[list[SeenRecord], None]:
        """Present records since a time, ``named`` with their flows, then new ones.

        An empty batch separates the two, and follows after a pause without new ones. A Lost replaces those
        that a slow reader missed.
        """
        ring = self.ring
        position, there = ring.begin, ring.end
        past = True

        def read() -> list[SeenRecord] | None:
            nonlocal position
            found: list[SeenRecord] = []
            if position == ring.end:  # nothing came: who serves this may have stopped
                return found
            if position < ring.begin:
                lost, position = self._overtaken(position), ring.begin
                found.append(SeenRecord(Lost(lost.num_events_lost), time.time_ns()))
            for number in range(position, min(there if past else ring.end, position + _SLICE)):
                position = number + 1
                came, record = ring.time_of(number), ring.record(number)
                if record is not None and (came >= since or not past):
                    event = ring.event(number) if named and past else None
                    found.append(SeenRecord(record, came, event if type(event) is Flow else None))
            return found or ([] if past and position >= there else None)

        while past:
            found = await self._turns.read(read, lambda: False)
            if found:
                yield found
            past = position < there
        yield []
        while True:
            found = []
            with anyio.move_on_after(_QUIET):
                found = await self._turns.read(read, lambda: position == ring.end)
            yield found

    def server_status(self) -> ServerStatusResponse:
        """Counts and capacity of the ring."""
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
        """Namespaces in flows of the last hour."""
        cluster = self.origin.node_name.rpartition("/")[0]
        names = self._parties.namespaces(self._resolver, time.time_ns())
        return GetNamespacesResponse(
            namespaces=tuple(
                ObservedNamespace(cluster="" if cluster == "default" else cluster, namespace=name)
                for name in names
            )
        )

    def _rate(self, now: int) -> float:
        """Flows a second, in the last minute or since the oldest event."""
        ring, flows, oldest = self.ring, 0, now
        for number in range(ring.end - 1, ring.begin - 1, -1):
            came = ring.time_of(number)
            if now - came > RATE_WINDOW:
                oldest = now - RATE_WINDOW
                break
            oldest = came
            flows += ring.is_flow(number)
        return flows * SECOND / (now - oldest) if now > oldest else 0.0

    # How a query is answered

    def _of_kind(
        self,
        request: GetAgentEventsRequest | GetDebugEventsRequest,
        kind: type[AgentEvent] | type[DebugEvent],
        response: Callable[..., WireMessage],
    ) -> AsyncGenerator[list[bytes], None]:
        _check(request.first, request.follow)
        node_name, ring = self.origin.node_name, self.ring

        def answer(number: int) -> bytes:
            event = ring.event(number)
            if type(event) is not kind:
                return b""
            return encode(response(event, ring.time_of(number), node_name))

        return self._answers(
            _Query(
                number=request.number,
                first=request.first,
                follow=request.follow,
                since=request.since,
                until=request.until,
                answer=answer,
            )
        )

    async def _answers(self, query: _Query) -> AsyncGenerator[list[bytes], None]:
        ring = self.ring
        position = await self._turns.read(self._start(query), lambda: False)
        left = 0 if query.follow else query.number
        ended = not query.follow and position >= ring.end

        def read() -> list[bytes] | None:
            nonlocal position, left, ended
            batch: list[bytes] = []
            position, ended = self._slice(query, position, batch, left)
            if left:
                left -= min(left, sum(not _is_loss(one) for one in batch) if query.lost else len(batch))
                ended = ended or not left
            ended = ended or (position >= ring.end and not query.follow)
            return batch if batch or ended else None

        while not ended:
            if batch := await self._turns.read(read, lambda: position >= ring.end):
                yield batch

    def _slice(self, query: _Query, position: int, batch: list[bytes], left: int) -> tuple[int, bool]:
        """Answer some events from `position` on.

        Returns the next position, and whether the query has ended.
        """
        ring, size, sent = self.ring, 0, 0
        if position < ring.begin:
            lost_events, position = self._overtaken(position), ring.begin
            if query.lost:
                batch.append(encode_loss_response(lost_events, time.time_ns(), self.origin.node_name))
        for number in range(position, min(ring.end, position + _SLICE)):
            position = number + 1
            slot = ring.slot(number)
            lost = type(slot.event) is LostEvent
            if not lost:
                came = slot.time
                if query.until is not None and came > query.until:
                    return position, True
                if query.since is not None and came < query.since:
                    continue
            elif not query.lost:
                continue
            if answer := query.answer(number):
                batch.append(answer)
                size += len(answer)
                sent += not lost
            if (left and sent >= left) or size >= _BATCH_BYTES or len(batch) >= _BATCH_EVENTS:
                break
        return position, False

    def _start(self, query: _Query) -> Callable[[], int | None]:
        """A search for the number of the first event to answer."""
        ring = self.ring
        counted, number = 0, ring.end

        def search() -> int | None:
            nonlocal counted, number
            if query.first and query.since is None:
                return ring.begin
            if query.follow and not query.number and query.since is None:
                return max(ring.begin, ring.end - 1)
            for _ in range(_SLICE if query.passes else _SLICE * 32):
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

    def _overtaken(self, position: int) -> LostEvent:
        missed = self.ring.begin - position
        self._count_lost(LostEventSource.HUBBLE_RING_BUFFER, missed)
        return LostEvent(source=LostEventSource.HUBBLE_RING_BUFFER, num_events_lost=missed)


class _Query(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a client, for events of any kind."""

    number: int
    first: bool
    follow: bool
    since: int | None
    until: int | None
    passes: Predicate | None = None
    """None: all events pass."""
    answer: Callable[[int], bytes]
    """The response with the event of a number; empty if the event does not match."""
    lost: bool = False
    """Whether losses are reported, regardless of filters and times."""

    def counts(self, ring: FlowRing, number: int) -> bool:
        """Whether an event counts while the start of the answer is looked for."""
        if self.passes is None:
            return ring.holds(number)
        event = ring.event(number)
        return event is not None and self.passes(event)


class _FlowAnswers:
    """Responses of GetFlows with the same filters and fields, built once for all clients."""

    def __init__(self, ring: FlowRing, node_name: str, passes: Predicate | None, mask: FieldMask) -> None:
        self._ring = ring
        self._node_name = node_name
        self._passes = passes
        self._mask = mask
        self._recent: list[tuple[int, bytes]] = [(-1, b"")] * _SHARED

    def of(self, number: int) -> bytes:
        """The response with the event of this number; empty if it does not match."""
        place = number % _SHARED
        known, response = self._recent[place]
        if known != number:
            response = self._response(number)
            self._recent[place] = number, response
        return response

    def _response(self, number: int) -> bytes:
        event = self._ring.event(number)
        if type(event) is LostEvent:
            return self._ring.flow_response(number, self._node_name)
        if type(event) is not Flow or (self._passes is not None and not self._passes(event)):
            return b""
        if not self._mask:
            return self._ring.flow_response(number, self._node_name)
        return encode_flow_response(self._mask.apply(event))


def _check(first: bool, follow: bool) -> None:
    if first and follow:
        raise InvalidRequest("first cannot be specified with follow")


def _is_loss(response: bytes) -> bool:
    """Whether an encoded response of GetFlows contains lost events: its field 3 comes first."""
    return response[0] == 3 << 3 | 2
