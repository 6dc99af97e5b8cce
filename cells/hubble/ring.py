"""The ring of this node's last events.

It stores undecoded datapath records with the resolver of their moment: a client that reads builds the flow.
So events are cheap without readers, and a flow that is read later has the names of its time. Readers take
turns, in the order in which they wait.

Why:    a hundred readers delay the other work of the event loop, above all the ADD of a pod, no longer than
        a few of them. While pods are added, clients get a part of the processor's time: an ADD is a
        millisecond of work of several processes, which readers that follow continuously would delay between
        its steps. A reader's task is woken when it has a result, not for each event.
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
from lifecycle.http import turns_of

FLOW_RECORDS: Final = frozenset((b"\1", b"\3", b"\4", b"\5", b"\7"))
"""First bytes of records that become flows."""
_RECENT: Final = 1024
"""Built events that readers at the same position share."""
_ROUND: Final = 0.0002
"""Approximate time for reading in one turn of the event loop, in seconds."""
_SERVED: Final = 4
"""Maximum number of clients that are answered in one turn: 0.1 ms of work."""
_ADDING: Final = 0.1
"""Seconds since the last call of the CNI plugin for which pods count as being added."""
_WORK: Final = 0.001
"""Approximate time of turns after which clients pause while pods are added, in seconds."""
_PAUSE: Final = 0.009
"""Length of this pause in seconds: clients get a tenth of a processor."""

T = TypeVar("T")


class _Slot(msgspec.Struct, frozen=True, gc=False):
    time: int
    event: Sample | HubbleEvent | None
    """A record of the datapath, an event that was built when it came, or None: a record that becomes none."""
    resolver: Resolver | None = None
    record: Sample | None = None
    """What an event was built of, or a record that becomes none."""


class _Built(msgspec.Struct):
    number: int
    event: HubbleEvent | None
    """None: the record becomes no event."""
    response: bytes = b""
    """Of GetFlows without a mask; empty until a client asks for it."""


class FlowRing:
    """The last events, numbered from 0 in order of arrival."""

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
        """Add an event, replacing the oldest."""
        number = self.end
        self._slots[number % self.capacity] = _Slot(time, event, resolver, record)
        self.end = number + 1
        if type(event) is Sample:
            self.seen_flows += event.data[:1] in FLOW_RECORDS
        elif type(event) is Flow:
            self.seen_flows += 1

    def next_uuid(self) -> str:
        """The UUID of the next event."""
        return self._uuid(self.end)

    def time_of(self, number: int) -> int:
        """When an event in the ring arrived."""
        return self.slot(number).time

    def is_lost(self, number: int) -> bool:
        """Whether an event in the ring reports a loss."""
        return type(self.slot(number).event) is LostEvent

    def is_flow(self, number: int) -> bool:
        """Whether an event in the ring is a flow, or a record that should become one."""
        event = self.slot(number).event
        return event.data[:1] in FLOW_RECORDS if type(event) is Sample else type(event) is Flow

    def holds(self, number: int) -> bool:
        """Whether an event in the ring may be valid: not yet known to be a record without an event."""
        return self.slot(number).event is not None

    def may_be(self, number: int, records: Container[bytes]) -> bool:
        """Whether an event in the ring is one of these records, or not a record of the datapath."""
        event = self.slot(number).event
        return type(event) is not Sample or event.data[:1] in records

    def event(self, number: int) -> HubbleEvent | None:
        """An event in the ring; None for a record without an event."""
        return self._built(number).event

    def record(self, number: int) -> Sample | Lost | None:
        """The undecoded record of an event in the ring; None if the agent created it."""
        slot = self.slot(number)
        if type(slot.event) is LostEvent:
            of_cpu = slot.event.source == LostEventSource.PERF_EVENT_RING_BUFFER
            return Lost(slot.event.num_events_lost, slot.event.cpu if of_cpu else None)
        return slot.event if type(slot.event) is Sample else slot.record

    def flow_response(self, number: int, node_name: str) -> bytes:
        """The response of GetFlows with the flow or loss of this number."""
        built = self._built(number)
        event = built.event
        if not built.response and event is not None:
            if type(event) is Flow:
                built.response = encode_flow_response(event)
            elif type(event) is LostEvent:
                built.response = encode_loss_response(event, self.time_of(number), node_name)
        return built.response

    def slot(self, number: int) -> _Slot:
        """The slot of an event in the ring."""
        slot = self._slots[number % self.capacity]
        end = self.end
        if slot is None or not end - self.capacity <= number < end:
            raise IndexError(f"event {number} is not in the ring")
        return slot

    def _built(self, number: int) -> _Built:
        place = number % _RECENT
        built = self._recent[place]
        if built is None or built.number != number:
            built = self._recent[place] = _Built(number, self._build(number))
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
        """A random UUID for each number, always the same one."""
        text = f"{(number + 1) * self._uuid_step & (1 << 122) - 1:032x}"[-31:]
        return (
            f"{text[:8]}-{text[8:12]}-4{text[12:15]}-{'89ab'[int(text[15], 16) & 3]}{text[16:19]}-{text[19:]}"
        )


_pack_node_name = lru_cache(maxsize=64)(field_packer(GetFlowsResponse, "node_name"))
_pack_time = field_packer(GetFlowsResponse, "time")


def encode_flow_response(flow: Flow) -> bytes:
    """As encode() of a GetFlowsResponse with the flow, its node and its time, but faster."""
    data = encode(flow)
    node_name = _pack_node_name(flow.node_name) if flow.node_name else b""
    time = _pack_time(flow.time) if flow.time is not None else b""
    return b"\x0a" + varint(len(data)) + data + node_name + time


def encode_loss_response(event: LostEvent, time: int, node_name: str) -> bytes:
    """A GetFlowsResponse with lost events."""
    return encode(GetFlowsResponse(lost_events=event, node_name=node_name, time=time))


class _Waiting(msgspec.Struct, eq=False):
    read: Callable[[], Any]
    at_end: Callable[[], bool]
    found: asyncio.Future[Any]


class ReaderTurns:
    """Assigns turns to readers. With ``yielding``, readers pause while pods are added."""

    def __init__(self, *, yielding: bool = False) -> None:
        self._yielding = yielding
        self._waiting: deque[_Waiting] = deque()
        self._idle: dict[_Waiting, None] = {}
        """Readers that have read everything, in the order of their last turns."""
        self._running = False
        self._began: float | None = None
        """When the present turn began; None if there is none."""
        self._worked = 0.0
        """Seconds of turns since the last pause."""

    async def read(self, read: Callable[[], T | None], at_end: Callable[[], bool]) -> T:
        """Call a function in the reader's turns until it returns a result. Returns the result.

        If there is nothing to read, the next turn follows wake(). Raises the error of the function.
        """
        reader = _Waiting(read, at_end, asyncio.get_running_loop().create_future())
        if at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
            self._run()
        try:
            result: T = await reader.found
        finally:
            self._idle.pop(reader, None)
        return result

    def wake(self) -> None:
        """Wake idle readers, as there are new events."""
        if self._idle:
            self._waiting.extend(self._idle)
            self._idle.clear()
            self._run()

    def _run(self) -> None:
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Assign the turns of this turn of the event loop."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._began is not None:
            self._worked += now - self._began
            self._began = None
        if self._worked >= _WORK:
            self._worked = 0.0
            if self._yielding and now - turns_of(loop).preceded_at < _ADDING:
                loop.call_later(_PAUSE, self._next)
                return
        if not self._waiting:
            self._running = False
            return
        self._began = now
        served = 0
        while self._waiting and served < _SERVED and loop.time() - now < _ROUND:
            served += self._give(self._waiting.popleft())
        loop.call_soon(self._next)

    def _give(self, reader: _Waiting) -> bool:
        """Let a reader read. Returns whether it had a result."""
        if reader.found.done():  # its task was cancelled
            return False
        try:
            result = reader.read()
        except Exception as error:  # noqa: BLE001  # its task raises it
            reader.found.set_exception(error)
            return True
        if result is not None:
            reader.found.set_result(result)
            return True
        if reader.at_end():
            self._idle[reader] = None
        else:
            self._waiting.append(reader)
        return False
