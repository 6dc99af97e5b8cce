"""The ring buffer of this node's last events, and the scheduling of its readers.

The ring stores undecoded datapath records, each with the resolver for the names at its time; a flow is built
when a client first reads it. So storing an event is cheap, and a flow read later has the names of its time.
``FlowObserver`` adds the events and reads them for clients through a ReaderScheduler.

Why:    readers get a bounded share of the event loop, so that a hundred of them delay other work, above all
        a CNI ADD, no longer than a few do. While pods are added, clients get a smaller share of the CPU: an
        ADD is a millisecond of work spread over several processes, and continuously reading followers would
        delay each of its steps. A reader's task is woken per result, not per event.
Source: Cilium 1.17, pkg/hubble/container.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

import msgspec

from cells.hubble.codec import encode, field_packer
from cells.hubble.enums import LostEventSource
from cells.hubble.flow import Flow, HubbleEvent, LostEvent
from cells.hubble.hubble import check_capacity
from cells.hubble.parser import EventError, Parser, Stamp
from cells.hubble.parser.resolver import Resolver
from cells.hubble.rpc.observer import GetFlowsResponse
from cells.hubble.scalars import varint
from cells.observe.events import Lost, Sample
from lifecycle.http import fair_queue_of

FLOW_RECORDS: Final = frozenset((b"\1", b"\3", b"\4", b"\5", b"\7"))
"""Message types (first bytes) of records that become flows: drop, capture, trace, policy verdict, socket."""
_RECENT: Final = 1024
"""Number of decoded events that are cached for readers at about the same position."""
_ROUND_SECONDS: Final = 0.0002
"""Time for readers in one iteration of the event loop, in seconds; approximate."""
_MAX_SERVED: Final = 4
"""Maximum number of results for clients in one iteration: sending them takes 0.1 ms."""
_ADD_WINDOW: Final = 0.1
"""Seconds after the last CNI call during which pods count as being added."""
_BUSY_LIMIT: Final = 0.001
"""Seconds of reading after which clients pause while pods are added; approximate."""
_PAUSE: Final = 0.009
"""Length of the pause in seconds: with _BUSY_LIMIT, clients get a tenth of a CPU."""

T = TypeVar("T")


class _Slot(msgspec.Struct, frozen=True, gc=False):
    time: int
    event: Sample | HubbleEvent | None
    """A datapath record, an event built on arrival, or None for a record found not to become an event."""
    resolver: Resolver | None = None
    record: Sample | None = None
    """The record of an event built on arrival, or the record that does not become an event."""


class _Built(msgspec.Struct):
    number: int
    event: HubbleEvent | None
    """None if the record does not become an event."""
    response: bytes = b""
    """The encoded GetFlowsResponse without a field mask; empty until a client requests it."""


class FlowRing:
    """A ring buffer of events, numbered from 0 in order of arrival."""

    def __init__(self, capacity: int, parser: Parser) -> None:
        check_capacity(capacity)
        self.capacity = capacity
        self.end = 0
        """The number of the next event."""
        self.seen_flows = 0
        self._slots: list[_Slot | None] = [None] * capacity
        self._parser = parser
        self._uuid_step = secrets.randbits(122) | 1
        self._recent: list[_Built | None] = [None] * _RECENT

    @property
    def begin(self) -> int:
        """The number of the oldest event in the ring."""
        return max(0, self.end - self.capacity)

    def add(
        self,
        time: int,
        event: Sample | HubbleEvent,
        resolver: Resolver | None = None,
        record: Sample | None = None,
    ) -> None:
        """Append an event; a full ring drops the oldest one."""
        number = self.end
        self._slots[number % self.capacity] = _Slot(time, event, resolver, record)
        self.end = number + 1
        if type(event) is Sample:
            self.seen_flows += event.data[:1] in FLOW_RECORDS
        elif type(event) is Flow:
            self.seen_flows += 1

    def next_uuid(self) -> str:
        """Return the UUID of the next event."""
        return self._uuid(self.end)

    def time_of(self, number: int) -> int:
        """Return the time of arrival of an event, in nanoseconds since 1970."""
        return self.slot(number).time

    def is_lost(self, number: int) -> bool:
        """Whether an event is a LostEvent."""
        return type(self.slot(number).event) is LostEvent

    def is_flow(self, number: int) -> bool:
        """Whether an event is a flow, or a record of a type that becomes a flow."""
        event = self.slot(number).event
        return event.data[:1] in FLOW_RECORDS if type(event) is Sample else type(event) is Flow

    def may_have_event(self, number: int) -> bool:
        """Whether a slot has an event, or a record that is not yet known to become none."""
        return self.slot(number).event is not None

    def matches(self, number: int, records: Container[bytes]) -> bool:
        """Whether an event is a record of one of these types, or not a datapath record."""
        event = self.slot(number).event
        return type(event) is not Sample or event.data[:1] in records

    def event(self, number: int) -> HubbleEvent | None:
        """Return an event, decoded if necessary; None for a record that does not become an event."""
        return self._built(number).event

    def record(self, number: int) -> Sample | Lost | None:
        """Return the undecoded record of an event; None for an event that the agent created."""
        slot = self.slot(number)
        if type(slot.event) is LostEvent:
            of_cpu = slot.event.source == LostEventSource.PERF_EVENT_RING_BUFFER
            return Lost(slot.event.num_events_lost, slot.event.cpu if of_cpu else None)
        return slot.event if type(slot.event) is Sample else slot.record

    def flow_response(self, number: int, node_name: str) -> bytes:
        """Return the encoded GetFlowsResponse with a flow or a LostEvent; empty for other events."""
        built = self._built(number)
        event = built.event
        if not built.response and event is not None:
            if type(event) is Flow:
                built.response = encode_flow_response(event)
            elif type(event) is LostEvent:
                built.response = encode_loss_response(event, self.time_of(number), node_name)
        return built.response

    def slot(self, number: int) -> _Slot:
        """Return the slot of an event. Raises IndexError if the ring does not contain it."""
        slot = self._slots[number % self.capacity]
        end = self.end
        if slot is None or not end - self.capacity <= number < end:
            raise IndexError(f"event {number} is not in the ring")
        return slot

    def _built(self, number: int) -> _Built:
        index = number % _RECENT
        built = self._recent[index]
        if built is None or built.number != number:
            built = self._recent[index] = _Built(number, self._build(number))
        return built

    def _build(self, number: int) -> HubbleEvent | None:
        slot = self.slot(number)
        event = slot.event
        if type(event) is not Sample:
            return cast("HubbleEvent | None", event)
        try:
            stamp = Stamp(slot.time, self._uuid(number))
            return self._parser.read(event.data, event.cpu, stamp, cast("Resolver", slot.resolver))
        except EventError:
            self.seen_flows -= self.is_flow(number)
            self._slots[number % self.capacity] = _Slot(slot.time, None, record=event)
            return None

    def _uuid(self, number: int) -> str:
        """Return the UUID of an event: random, but always the same one for a number."""
        text = f"{(number + 1) * self._uuid_step & (1 << 122) - 1:032x}"[-31:]
        return (
            f"{text[:8]}-{text[8:12]}-4{text[12:15]}-{'89ab'[int(text[15], 16) & 3]}{text[16:19]}-{text[19:]}"
        )


_pack_node_name = lru_cache(maxsize=64)(field_packer(GetFlowsResponse, "node_name"))
_pack_time = field_packer(GetFlowsResponse, "time")


def encode_flow_response(flow: Flow) -> bytes:
    """Encode a GetFlowsResponse with the flow, its node and its time; faster than encode()."""
    data = encode(flow)
    node_name = _pack_node_name(flow.node_name) if flow.node_name else b""
    time = _pack_time(flow.time) if flow.time is not None else b""
    return b"\x0a" + varint(len(data)) + data + node_name + time


def encode_loss_response(event: LostEvent, time: int, node_name: str) -> bytes:
    """Encode a GetFlowsResponse with a LostEvent."""
    return encode(GetFlowsResponse(lost_events=event, node_name=node_name, time=time))


class _RingReader(msgspec.Struct, eq=False):
    read: Callable[[], Any]
    at_end: Callable[[], bool]
    future: asyncio.Future[Any]


class ReaderScheduler:
    """Runs readers of the ring in FIFO order, for a bounded time per iteration of the event loop.

    With ``yielding``, readers pause while pods are added.
    """

    def __init__(self, *, yielding: bool = False) -> None:
        self._yielding = yielding
        self._waiting: deque[_RingReader] = deque()
        self._idle: dict[_RingReader, None] = {}
        """Readers at the end of the ring, in the order in which they last ran."""
        self._scheduled = False
        self._round_start: float | None = None
        """Start of the current round; None if there is none."""
        self._busy = 0.0
        """Seconds of reading since the last pause."""

    async def read(self, read: Callable[[], T | None], at_end: Callable[[], bool]) -> T:
        """Call ``read`` when it is scheduled, until it returns a result; return the result.

        While ``at_end`` is true, the next call waits for wake(). Raises the exception of ``read``.
        """
        reader = _RingReader(read, at_end, asyncio.get_running_loop().create_future())
        if at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
            self._schedule()
        try:
            result: T = await reader.future
        finally:
            self._idle.pop(reader, None)
        return result

    def wake(self) -> None:
        """Schedule the idle readers, after new events."""
        if self._idle:
            self._waiting.extend(self._idle)
            self._idle.clear()
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        """Run readers until the round's time or number of results is used up."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._round_start is not None:
            self._busy += now - self._round_start
            self._round_start = None
        if self._busy >= _BUSY_LIMIT:
            self._busy = 0.0
            if self._yielding and now - fair_queue_of(loop).priority_work_at < _ADD_WINDOW:
                loop.call_later(_PAUSE, self._run_round)
                return
        if not self._waiting:
            self._scheduled = False
            return
        self._round_start = now
        served = 0
        while self._waiting and served < _MAX_SERVED and loop.time() - now < _ROUND_SECONDS:
            served += self._poll(self._waiting.popleft())
        loop.call_soon(self._run_round)

    def _poll(self, reader: _RingReader) -> bool:
        """Call a reader once. Return whether it has ended with a result or an exception."""
        if reader.future.done():  # its task was cancelled
            return False
        try:
            result = reader.read()
        except Exception as error:  # noqa: BLE001  # its task raises it
            reader.future.set_exception(error)
            return True
        if result is not None:
            reader.future.set_result(result)
            return True
        if reader.at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
        return False
