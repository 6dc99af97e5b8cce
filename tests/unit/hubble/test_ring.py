"""Queries of the flow ring by clients."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.hubble.codec import InvalidFieldMask, WireMessage, decode, from_json
from cells.hubble.enums import AgentEventType, DebugEventType, FlowVerdict, LostEventSource
from cells.hubble.filters import InvalidFilter
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, FlowEndpoint, FlowFilter, HubbleEvent, LostEvent
from cells.hubble.hubble import check_capacity
from cells.hubble.observer import FlowObserver, InvalidRequest
from cells.hubble.parser import FlowOrigin, Parser
from cells.hubble.parser.resolver import Resolver
from cells.hubble.rpc.observer import (
    GetAgentEventsRequest,
    GetAgentEventsResponse,
    GetDebugEventsRequest,
    GetDebugEventsResponse,
    GetFlowsRequest,
    GetFlowsResponse,
)
from cells.observe.events import Lost, Sample
from tests.support.examples import scaled
from tests.support.waiting import settled
from tests.unit.hubble.recordings import recorded, recording
from tests.unit.hubble.worlds import world

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND
ORIGIN = FlowOrigin("default/node1")
RPCS: dict[str, tuple[type[WireMessage], Callable[..., AsyncGenerator[list[bytes], None]]]] = {
    "GetFlows": (GetFlowsRequest, FlowObserver.get_flows),
    "GetAgentEvents": (GetAgentEventsRequest, FlowObserver.get_agent_events),
    "GetDebugEvents": (GetDebugEventsRequest, FlowObserver.get_debug_events),
}
ERRORS = {"InvalidArgument": InvalidRequest, "Unknown": InvalidFilter}
ENDLESS = re.compile(r"getflows/(none|one)/(follow|first).*|(agent|debug)events/none/first.*")
"""Cilium waits or streams without an end on a ring of no event or one."""


def observer_of(capacity: int) -> FlowObserver:
    return FlowObserver(capacity, ORIGIN, Parser(ORIGIN), "cilium v1.17.0")


def _event(letter: str, number: int) -> HubbleEvent:
    match letter:
        case "f" | "d":
            return Flow(
                uuid=f"flow-{number}",
                time=BEGIN + number * SECOND,
                node_name="default/node1",
                verdict=FlowVerdict.FORWARDED if letter == "f" else FlowVerdict.DROPPED,
                source=FlowEndpoint(namespace="ns1"),
            )
        case "a":
            return AgentEvent(type=AgentEventType.AGENT_STARTED)
        case "g":
            return DebugEvent(type=DebugEventType.DBG_GENERIC, message=f"debug-{number}")
    return LostEvent(source=LostEventSource.PERF_EVENT_RING_BUFFER, num_events_lost=number)


def write(observer: FlowObserver, letters: str, begin: int = 0) -> None:
    for number, letter in enumerate(letters, begin):
        observer.add_event(_event(letter, number), BEGIN + number * SECOND)


def _shown(rpc: str, data: bytes) -> str:
    if rpc == "GetAgentEvents":
        event = decode(GetAgentEventsResponse, data)
        return f"agent-{((event.time or 0) - BEGIN) // SECOND}"
    if rpc == "GetDebugEvents":
        debug = decode(GetDebugEventsResponse, data)
        return debug.debug_event.message if debug.debug_event else ""
    answer = decode(GetFlowsResponse, data)
    if answer.lost_events is not None:
        lost = answer.lost_events
        return f"lost:{LostEventSource(lost.source).name}:{lost.num_events_lost}"
    return answer.flow.uuid if answer.flow else ""


async def _read(
    rpc: str, answers: AsyncGenerator[list[bytes], None], write_more: Callable[[], None] | None
) -> list[str]:
    """All that is answered; of a follower, until nothing more comes."""
    found: list[str] = []

    async def collect() -> None:
        async for batch in answers:
            found.extend(_shown(rpc, each) for each in batch)

    if write_more is None:
        await collect()
        return found
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        await settled()
        write_more()
        await settled()
        tasks.cancel_scope.cancel()
    return found


def _expected(case: dict[str, Any]) -> list[str]:
    """Without the loss that Cilium reports of the end of its own ring."""
    lost = "lost:HUBBLE_RING_BUFFER:1"
    answers = [str(each) for each in case["responses"]]
    return answers[1:] if answers[:1] == [lost] else answers


@pytest.mark.parametrize(
    "case",
    [case for case in recorded("observer_rpc") if not ENDLESS.fullmatch(case["name"])],
    ids=lambda case: case["name"],
)
def test_a_query_is_answered_as_recorded(case: dict[str, Any]) -> None:
    """Cilium shows the event written last once another follows: it is written with the later ones here."""
    message, method = RPCS[case["rpc"]]
    request = from_json(message, case["request"])
    observer, events = observer_of(case["ring_capacity"]), case["events"]
    write(observer, events[:-1])
    later = case.get("events_written_while_following")

    def write_more() -> None:
        write(observer, (events[-1:] + later)[:-1], max(0, len(events) - 1))

    answers = method(observer, request)
    if case["error"]:
        with pytest.raises(ERRORS[case["error"]["grpc_code"]], match=re.escape(case["error"]["message"])):
            anyio.run(_read, case["rpc"], answers, None)
        return
    found = anyio.run(_read, case["rpc"], answers, write_more if later else None)
    assert found == _expected(case)


@pytest.mark.parametrize(
    "case",
    [case for case in recorded("observer_status") if "capacity" in case],
    ids=lambda case: case["name"],
)
def test_a_capacity_is_one_less_than_a_power_of_two(case: dict[str, Any]) -> None:
    if case.get("error"):
        with pytest.raises(ValueError, match=case["error"]):
            check_capacity(case["capacity"])
    else:
        check_capacity(case["capacity"])


@pytest.mark.parametrize(
    "case",
    [case for case in recorded("observer_status") if "ring_capacity" in case],
    ids=lambda case: case["name"],
)
def test_the_status_reports_how_full_the_ring_is(case: dict[str, Any]) -> None:
    observer = observer_of(case["ring_capacity"])
    write(observer, "f" * case["events_written"])
    status = observer.server_status()
    assert (status.num_flows, status.max_flows) == (case["num_flows"], case["max_flows"])
    assert status.seen_flows == case["events_written"]
    assert (status.flows_rate == 0) == case["flows_rate_is_zero"]


@pytest.mark.parametrize(
    ("letters", "ages", "rate"),
    [
        ("af", (50, 10), 0.1),  # an agent event does not extend the time of the flows
        ("afff", (90, 20, 10, 5), 0.15),
        ("fff", (90, 20, 10), 2 / 60),
        ("ffa", (20, 10, 5), 0.1),
        ("aag", (50, 10, 5), 0.0),
        ("", (), 0.0),
    ],
)
def test_the_rate_is_that_of_the_last_minute_or_since_the_oldest_flow(
    letters: str, ages: tuple[int, ...], rate: float
) -> None:
    observer, now = observer_of(7), time.time_ns()
    for number, (letter, age) in enumerate(zip(letters, ages, strict=True)):
        observer.add_event(_event(letter, number), now - age * SECOND)
    assert observer.server_status().flows_rate == pytest.approx(rate, rel=0.05)


def _records(*names: str, known: str = "main") -> list[tuple[Sample, Resolver]]:
    perf = recording("pipeline")["perf_events"]
    return [(Sample(1, bytes.fromhex(perf[name])), world(known)) for name in names]


def _flows(observer: FlowObserver, request: GetFlowsRequest) -> list[Flow]:
    async def read() -> list[Flow]:
        batches = [batch async for batch in observer.get_flows(request)]
        answers = [decode(GetFlowsResponse, each) for batch in batches for each in batch]
        return [answer.flow for answer in answers if answer.flow is not None]

    return anyio.run(read)


def test_records_that_become_no_event_do_not_count() -> None:
    observer = observer_of(63)
    records = _records("trace", "drop", "sock", "recorder", "short", "badpacket", "verdict")
    observer.add(records, time.time_ns())
    found = _flows(observer, GetFlowsRequest())
    assert [flow.event_type and flow.event_type.type for flow in found] == [4, 1, 5]
    assert observer.server_status().seen_flows == 3
    assert [each.namespace for each in observer.namespaces().namespaces] == ["default", "kube-system"]


def test_a_flow_has_the_same_uuid_whenever_it_is_read() -> None:
    observer = observer_of(4095)
    observer.add(_records("trace") * 2000, BEGIN)
    first = [flow.uuid for flow in _flows(observer, GetFlowsRequest())]
    assert first == [flow.uuid for flow in _flows(observer, GetFlowsRequest())]
    assert len(set(first)) == 2000
    form = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
    assert all(form.fullmatch(uuid) for uuid in first)


def test_a_flow_has_the_names_of_the_time_it_came() -> None:
    observer = observer_of(7)
    observer.add(_records("trace"), BEGIN)
    observer.add(_records("trace", known="empty"), BEGIN)
    first, second = _flows(observer, GetFlowsRequest())
    assert first.source is not None
    assert second.source is not None
    assert (first.source.pod_name, second.source.pod_name) == ("web-7d4b9c6f5-abcde", "")


def test_masked_flows_have_the_asked_fields_alone() -> None:
    observer = observer_of(7)
    observer.add(_records("drop"), BEGIN)
    request = GetFlowsRequest(field_mask=("verdict", "source.pod_name"))
    source = FlowEndpoint(pod_name="web-7d4b9c6f5-abcde")
    assert _flows(observer, request) == [Flow(verdict=FlowVerdict.DROPPED, source=source)]
    with pytest.raises(InvalidFieldMask):
        _flows(observer, GetFlowsRequest(field_mask=("nope",)))


def test_a_slow_follower_gets_the_number_of_lost_events() -> None:
    observer = observer_of(7)

    async def follow() -> list[GetFlowsResponse]:
        answers = observer.get_flows(GetFlowsRequest(follow=True))
        write(observer, "ff")
        found = [decode(GetFlowsResponse, each) for each in await anext(answers)]
        write(observer, "f" * 20, 2)
        found += [decode(GetFlowsResponse, each) for each in await anext(answers)]
        await answers.aclose()
        return found

    newest, lost, *flows = anyio.run(follow)
    assert newest.flow is not None
    assert newest.flow.uuid == "flow-1"
    assert lost.lost_events == LostEvent(source=LostEventSource.HUBBLE_RING_BUFFER, num_events_lost=13)
    uuids = [answer.flow and answer.flow.uuid for answer in flows]
    assert uuids == [f"flow-{number}" for number in range(15, 22)]
    assert observer.lost == {"hubble_ring_buffer": 13}


def test_a_query_over_a_large_ring_lets_others_work() -> None:
    observer = observer_of(4095)
    observer.add(_records("trace") * 4095, BEGIN)
    request = GetFlowsRequest(whitelist=(FlowFilter(source_pod=("none/",)),))

    async def run() -> int:
        turns = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_drain, observer, request, tasks.cancel_scope)
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()
        return turns

    async def _drain(observer: FlowObserver, request: GetFlowsRequest, scope: anyio.CancelScope) -> None:
        assert [batch async for batch in observer.get_flows(request)] == []
        scope.cancel()

    assert anyio.run(run) > 100


def test_an_exporter_sees_every_event_from_now_on() -> None:
    observer = observer_of(15)
    write(observer, "fff")

    async def run() -> list[HubbleEvent]:
        events = observer.follow()
        found: list[HubbleEvent] = []
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                async for batch in events:
                    found.extend(seen.event for seen in batch)

            tasks.start_soon(read)
            await settled()
            write(observer, "fagl", 3)
            await settled()
            tasks.cancel_scope.cancel()
        return found

    assert [type(event) for event in anyio.run(run)] == [Flow, AgentEvent, DebugEvent, LostEvent]


FILTERS: dict[str, tuple[FlowFilter, Callable[[str, int], bool]]] = {
    "forwarded": (FlowFilter(verdict=(FlowVerdict.FORWARDED,)), lambda letter, _: letter == "f"),
    "dropped": (FlowFilter(verdict=(FlowVerdict.DROPPED,)), lambda letter, _: letter == "d"),
    "named": (FlowFilter(uuid=("flow-3", "flow-7")), lambda letter, at: letter in "fd" and at in {3, 7}),
    "nowhere": (FlowFilter(source_pod=("ns2/",)), lambda _letter, _at: False),
    "here": (FlowFilter(source_pod=("ns1/",)), lambda letter, _: letter in "fd"),
}
"""Filters, and what they mean of an event by its letter and number."""


class Asked(NamedTuple):
    """A request of flows; times are seconds after BEGIN."""

    number: int
    first: bool
    follow: bool
    since: int | None
    until: int | None
    allow: list[str]
    deny: list[str]

    @property
    def request(self) -> GetFlowsRequest:
        return GetFlowsRequest(
            number=self.number,
            first=self.first,
            follow=self.follow,
            since=None if self.since is None else BEGIN + self.since * SECOND,
            until=None if self.until is None else BEGIN + self.until * SECOND,
            whitelist=tuple(FILTERS[name][0] for name in self.allow),
            blacklist=tuple(FILTERS[name][0] for name in self.deny),
        )

    def passes(self, letter: str, number: int) -> bool:
        matched = {name for name, (_, means) in FILTERS.items() if means(letter, number)}
        return (not self.allow or not matched.isdisjoint(self.allow)) and matched.isdisjoint(self.deny)


Came = list[tuple[str, int]]  # what comes into the ring: letters and times


def start_of(asked: Asked, begin: int, came: Came) -> int:
    """The first event that is looked at: counted back from the newest, losses apart."""
    if asked.first and asked.since is None:
        return begin
    if asked.follow and not asked.number and asked.since is None:
        return max(begin, len(came) - 1)
    counted = [
        at for at in reversed(range(begin, len(came))) if came[at][0] != "l" and asked.passes(came[at][0], at)
    ]
    if asked.since is not None:
        found = [at for at in counted if came[at][1] < asked.since]
    else:
        found = counted[asked.number - 1 :] if asked.number else []
    return found[0] if found else begin


def plainly(asked: Asked, capacity: int, came: Came, later: Came) -> list[str]:
    """What is answered, as the rules of GetFlows read: of the ring's events, and of those that come later."""
    begin, end = max(0, len(came) - capacity), len(came)
    start = start_of(asked, begin, came)
    answer: list[str] = []
    sent = 0
    every = came + later
    looked_at: list[int | None] = [*range(start, end)]
    if asked.follow:
        begin = max(0, len(every) - capacity)
        looked_at += [None] * (begin > end) + [*range(max(begin, end), len(every))]
    for at in looked_at:
        if at is None:
            answer.append(f"lost:HUBBLE_RING_BUFFER:{begin - end}")
            continue
        letter, when = every[at]
        if letter == "l":
            answer.append(f"lost:PERF_EVENT_RING_BUFFER:{at}")
            continue
        if asked.until is not None and when > asked.until:
            break
        if (asked.since is None or when >= asked.since) and letter in "fd" and asked.passes(letter, at):
            answer.append(f"flow-{at}")
            sent += 1
            if sent == asked.number and not asked.follow:
                break
    return answer


TIMES = st.integers(0, 8)
EVENTS_THAT_COME = st.lists(st.tuples(st.sampled_from("ffddagl"), TIMES), max_size=24)
NAMES = st.lists(st.sampled_from(sorted(FILTERS)), max_size=2)
QUERIES = st.builds(
    Asked,
    number=st.sampled_from((0, 0, 0, 1, 2, 5)),
    first=st.booleans(),
    follow=st.booleans(),
    since=st.none() | TIMES,
    until=st.none() | TIMES,
    allow=NAMES,
    deny=NAMES,
).filter(lambda asked: not (asked.first and asked.follow))


@settings(deadline=None, max_examples=scaled(600))
@given(QUERIES, st.sampled_from((1, 3, 7, 15)), EVENTS_THAT_COME, EVENTS_THAT_COME)
def test_flows_are_answered_as_the_rules_read(asked: Asked, capacity: int, came: Came, later: Came) -> None:
    observer = observer_of(capacity)

    def write_all(events: Came, begin: int) -> None:
        for number, (letter, when) in enumerate(events, begin):
            observer.add_event(_event(letter, number), BEGIN + when * SECOND)

    write_all(came, 0)
    more = (lambda: write_all(later, len(came))) if asked.follow else None
    found = anyio.run(_read, "GetFlows", observer.get_flows(asked.request), more)
    assert found == plainly(asked, capacity, came, later)


async def _records_of(observer: FlowObserver, since: int, write_more: Callable[[], None]) -> list[object]:
    """What a follower of records gets; "live" where the past ends."""
    found: list[object] = []

    async def collect() -> None:
        async for batch in observer.records(since, named=False):
            found.extend([seen.record for seen in batch] or ["live"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        await settled()
        write_more()
        await settled()
        tasks.cancel_scope.cancel()
    return found


@settings(deadline=None, max_examples=scaled(100))
@given(st.sampled_from((1, 3, 7)), EVENTS_THAT_COME, EVENTS_THAT_COME, TIMES)
def test_records_that_were_there_and_that_come_are_given_once_in_their_order(
    capacity: int, came: Came, later: Came, since: int
) -> None:
    """Of the letters, a flow stands for a record of the datapath, a drop for one of a proxy."""
    observer = observer_of(capacity)

    def write_all(events: Came, begin: int) -> None:
        for number, (letter, when) in enumerate(events, begin):
            if letter == "f":
                observer.add([(Sample(0, b"\4%d" % number), world("empty"))], BEGIN + when * SECOND)
            else:
                record = Sample(0, b"\x81%d" % number) if letter == "d" else None
                observer.add_event(_event(letter, number), BEGIN + when * SECOND, record)

    def given_of(events: Came, begin: int) -> list[object]:
        of_letter: dict[str, Callable[[int], object]] = {
            "f": lambda number: Sample(0, b"\4%d" % number),
            "d": lambda number: Sample(0, b"\x81%d" % number),
            "l": Lost,
        }
        numbered = enumerate((letter for letter, _ in events), begin)
        return [of_letter[letter](number) for number, letter in numbered if letter in of_letter]

    write_all(came, 0)
    found = anyio.run(_records_of, observer, BEGIN + since * SECOND, lambda: write_all(later, len(came)))
    begin = max(0, len(came) - capacity)
    there = [given_of([one], begin + at) for at, one in enumerate(came[begin:]) if one[1] >= since]
    missed = max(0, len(later) - capacity)
    lost: list[object] = [Lost(missed)] if missed else []
    expected = [
        *(one for some in there for one in some),
        "live",
        *lost,
        *given_of(later[missed:], len(came) + missed),
    ]
    assert [one for one in found if one != "live"] == [one for one in expected if one != "live"]
    assert found[: expected.index("live") + 1] == expected[: expected.index("live") + 1]


def test_a_record_that_becomes_no_flow_is_given_as_it_came() -> None:
    observer = observer_of(63)
    records = _records("trace", "sock", "short")
    observer.add(records, BEGIN)
    assert len(_flows(observer, GetFlowsRequest())) == 1
    found = anyio.run(_records_of, observer, 0, lambda: None)
    assert found == [*(sample for sample, _ in records), "live"]


async def _followed(observer: FlowObserver, requests: list[GetFlowsRequest], letters: str) -> list[list[str]]:
    """What so many followers get of events that are written."""
    found: list[list[str]] = [[] for _ in requests]

    async def collect(request: GetFlowsRequest, into: list[str]) -> None:
        async for batch in observer.get_flows(request):
            into.extend(_shown("GetFlows", each) for each in batch)

    async with anyio.create_task_group() as tasks:
        for request, into in zip(requests, found, strict=True):
            tasks.start_soon(collect, request, into)
        await settled()
        write(observer, letters)
        await settled()
        tasks.cancel_scope.cancel()
    return found


def test_filters_of_many_clients_are_asked_once_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HubbleEvent] = []

    def compiled(*_: object) -> Callable[[HubbleEvent], bool]:
        return lambda event: not asked.append(event)  # type: ignore[func-returns-value]

    monkeypatch.setattr("cells.hubble.observer.compile_filters", compiled)
    requests = [GetFlowsRequest(follow=True, whitelist=(FlowFilter(source_pod=("ns1/",)),))] * 20
    assert anyio.run(_followed, observer_of(63), requests, "fff") == [["flow-0", "flow-1", "flow-2"]] * 20
    assert len(asked) == 3


def test_clients_with_other_filters_get_other_flows() -> None:
    filters = [FILTERS[name][0] for name in ("forwarded", "dropped", "nowhere", "forwarded")]
    requests = [GetFlowsRequest(follow=True, whitelist=(one,)) for one in filters]
    found = anyio.run(_followed, observer_of(63), requests, "fdfd")
    assert found == [["flow-0", "flow-2"], ["flow-1", "flow-3"], [], ["flow-0", "flow-2"]]
