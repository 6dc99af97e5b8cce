"""Scheduling of ring readers: one at a time, in order, with pauses while pods are added."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import anyio
import pytest

from cells.hubble.flow import FlowFilter
from cells.hubble.observer import FlowObserver
from cells.hubble.ring import ReaderScheduler
from cells.hubble.rpc.observer import GetFlowsRequest
from cells.observe.events import Sample
from tests.support.waiting import settled
from tests.unit.cni_server.fakes import FakeNode
from tests.unit.cni_server.harness import Harness, harness
from tests.unit.hubble.agent import TRACE, Agent

pytestmark = pytest.mark.anyio
EVENTS = 2000


def filled() -> FlowObserver:
    sources = Agent(hubble_event_buffer_capacity=4095).sources
    sources.process([Sample(0, bytes(bytearray(TRACE))) for _ in range(EVENTS)])
    return sources.observer


async def searched(observer: FlowObserver) -> int:
    """Search all events for what is not there; how many rounds the event loop made meanwhile."""
    request = GetFlowsRequest(whitelist=(FlowFilter(source_pod=("none/",)),))
    rounds = 0
    async with anyio.create_task_group() as tasks:

        async def search() -> None:
            assert [batch async for batch in observer.get_flows(request)] == []
            tasks.cancel_scope.cancel()

        tasks.start_soon(search)
        while True:
            rounds += 1
            await asyncio.sleep(0)
    return rounds


async def add_pods(node: Harness) -> None:
    """One after the other, for ever."""
    for number in itertools.count():
        assert (await node.call("ADD", f"cid{number}", pod=f"pod{number}")).code == 0
        await anyio.sleep(0.02)


class Reader:
    """Reads numbers from a list, some in a turn."""

    def __init__(self, turns: ReaderScheduler, events: list[int], wanted: int) -> None:
        self.position = 0
        self.turns, self.events, self.wanted = turns, events, wanted

    def read(self) -> int | None:
        self.position += 1
        found = self.events[self.position - 1]
        return found if found == self.wanted else None

    async def next(self) -> int:
        return await self.turns.read(self.read, lambda: self.position == len(self.events))


async def test_readers_take_turns_in_their_order() -> None:
    turns, events, order = ReaderScheduler(), list[int](), list[str]()

    async def follow(name: str) -> None:
        reader = Reader(turns, events, 1)
        for _ in range(3):
            await reader.next()
            order.append(name)

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(follow, name)
        await settled()
        events += [1, 1, 1]
        turns.wake()
    assert order == [*"abc"] * 3


async def test_few_clients_are_served_in_a_round_of_the_loop() -> None:
    turns, events, rounds, seen = ReaderScheduler(), list[int](), 0, list[int]()

    async def follow() -> None:
        await Reader(turns, events, 1).next()
        seen.append(rounds)

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(follow)
        await settled()
        events.append(1)
        turns.wake()
        while len(seen) < 40:
            rounds += 1
            await asyncio.sleep(0)
    assert max(Counter(seen).values()) < 10


async def test_a_reader_is_woken_by_what_it_looks_for_alone() -> None:
    turns, events = ReaderScheduler(), list[int]()
    reader = Reader(turns, events, 2)
    found = asyncio.create_task(reader.next())
    await settled()
    events += [1] * 5
    turns.wake()
    await settled()
    assert (found.done(), reader.position) == (False, 5)
    events += [1, 2, 3]
    turns.wake()
    assert await found == 2
    assert reader.position == 7


async def test_a_reader_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    turns, events, done = ReaderScheduler(), list[int](), list[str]()

    async def follow(name: str) -> None:
        await Reader(turns, events, 1).next()
        done.append(name)

    followers = [asyncio.create_task(follow(name)) for name in "abcd"]
    await settled()
    followers[0].cancel()
    events.append(1)
    turns.wake()
    followers[2].cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    assert done == ["b", "d"]


async def test_a_reader_that_fails_leaves_its_turn_to_the_next() -> None:
    turns = ReaderScheduler()

    def fail() -> int:
        raise LookupError("no event")

    failing = asyncio.create_task(turns.read(fail, lambda: False))
    assert await turns.read(lambda: 1, lambda: False) == 1
    with pytest.raises(LookupError, match="no event"):
        await failing


async def test_clients_pause_while_pods_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    without = await searched(filled())
    async with harness(tmp_path) as node, anyio.create_task_group() as tasks:
        tasks.start_soon(add_pods, node)
        await settled()
        assert await searched(filled()) > 5 * without
        tasks.cancel_scope.cancel()


async def test_the_agent_counts_and_exports_flows_without_pauses_while_pods_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    sources = Agent(hubble_event_buffer_capacity=4095).sources
    got = rounds = 0
    async with harness(tmp_path) as node, anyio.create_task_group() as tasks:

        async def read() -> None:
            nonlocal got
            async for events in sources.observer.follow():
                got += len(events)

        tasks.start_soon(read)
        await settled()
        assert (await node.call("ADD")).code == 0
        sources.process([Sample(0, bytes(bytearray(TRACE))) for _ in range(EVENTS)])
        while got < EVENTS:
            rounds += 1
            await asyncio.sleep(0)
        tasks.cancel_scope.cancel()
    assert rounds < EVENTS
