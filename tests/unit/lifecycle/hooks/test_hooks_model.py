"""Random graphs of hooks that fail, hang and shield themselves at random: what must hold all the same."""

import asyncio
from typing import Any, Literal

import anyio
import anyio.lowlevel
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lifecycle import Hive, Hook, Lifecycle, StartError, StopError, invoke, provide
from lifecycle.testing import VirtualClock, no_leaks
from tests.support.examples import scaled

Act = Literal["well", "slow", "fail", "hang", "stubborn"]
"""Stubborn ones cannot be cancelled, as a worker thread cannot."""

START_TIMEOUT, STOP_TIMEOUT, BUDGET = 20.0, 10.0, 25.0
GRACE = 2.0


class Node:
    """A hook of the model."""

    def __init__(self, number: int, needs: list[int], start: Act, stop: Act) -> None:
        self.number = number
        self.needs = needs
        self.start = start
        self.stop = stop


@st.composite
def graphs(draw: st.DrawFn, acts: st.SearchStrategy[Act]) -> list[Node]:
    nodes = []
    for number in range(draw(st.integers(1, 7))):
        needs = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        nodes.append(Node(number, needs, draw(acts), draw(acts)))
    return nodes


class World:
    """What happens to the hooks of a graph, and what must never."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.started: set[int] = set()
        self.stop_began: list[int] = []
        self.stopped: set[int] = set()
        self.wrong: list[str] = []
        self.release = asyncio.Event()

    def hive(self, **options: Any) -> Hive:
        kinds: list[Any] = []
        for node in self.nodes:
            kinds.append(self._kind(node, [kinds[need] for need in node.needs]))
        return Hive(
            provide(*kinds),
            invoke(*kinds),
            start_timeout=START_TIMEOUT,
            stop_timeout=STOP_TIMEOUT,
            stop_budget=BUDGET,
            **options,
        )

    def _kind(self, node: Node, below: list[type]) -> type:
        def init(_: Any, lifecycle: Lifecycle, first: Any = None, second: Any = None) -> None:
            lifecycle.append(Hook(str(node.number), lambda: self.start(node), lambda: self.stop(node)))

        names = ["first", "second"][: len(below)]
        init.__annotations__ = {"lifecycle": Lifecycle, **dict(zip(names, below, strict=True))}
        return type(f"K{node.number}", (), {"__init__": init})

    async def start(self, node: Node) -> None:
        if not set(node.needs) <= self.started - set(self.stop_began):
            self.wrong.append(f"{node.number} starts without what it needs")
        await self.act(node.start)
        self.started.add(node.number)

    async def stop(self, node: Node) -> None:
        if node.number in self.stop_began or node.number not in self.started:
            self.wrong.append(f"{node.number} is stopped twice, or before it started")
        self.stop_began.append(node.number)
        await self.act(node.stop)
        self.stopped.add(node.number)

    async def act(self, act: Act) -> None:
        await anyio.lowlevel.checkpoint()
        if act == "slow":
            await anyio.sleep(3)
        elif act == "fail":
            raise OSError("fail")
        elif act == "hang":
            await anyio.sleep_forever()
        elif act == "stubborn":
            with anyio.CancelScope(shield=True):
                await self.release.wait()

    def check(self, took: float) -> None:
        """What must hold when all is over."""
        assert self.wrong == []
        assert set(self.stop_began) == self.started, "a hook that started was not reached"
        stubborn = {node.number for node in self.nodes if node.stop == "stubborn"}
        for node in self.nodes:
            for need in node.needs:
                if node.number in self.started and need in self.stop_began:
                    assert self.stop_began.index(node.number) < self.stop_began.index(need)
        assert self.stopped <= self.started - stubborn
        assert took <= BUDGET + GRACE


async def _run(nodes: list[Node], *, sequential: bool, cancel_after: float | None) -> None:
    world = World(nodes)
    async with no_leaks():
        with VirtualClock() as clock:
            hive = world.hive(sequential=sequential)
            task = asyncio.ensure_future(hive.start())
            if cancel_after is not None:
                await clock.advance(cancel_after)
                task.cancel()
            began = clock.now
            await clock.until(task.done)
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, StartError)
                assert error.exceptions
                event("did not start")
                # until the first fault nothing was bounded but by deadlines, one after the other
                world.check(clock.now - began - START_TIMEOUT * len(nodes))
            elif task.cancelled():
                event("cancelled")
                world.check(clock.now - began)
            else:
                assert world.started == {node.number for node in nodes}
                began = clock.now
                stopping = asyncio.ensure_future(hive.stop())
                await clock.until(stopping.done)
                error = stopping.exception()
                assert error is None or isinstance(error, StopError)
                message = str(error)
                for node in nodes:
                    if node.stop in {"fail", "hang", "stubborn"} and clock.now - began < BUDGET:
                        assert f"hook '{node.number}' (hive)" in message
                event("stopped well" if error is None else "stopped with errors")
                world.check(clock.now - began)
            world.release.set()
            await clock.advance(STOP_TIMEOUT)  # a start that ended late is stopped yet


@settings(max_examples=scaled(150), deadline=None)
@given(graphs(st.sampled_from(["well", "slow", "fail", "hang", "stubborn"])), st.booleans())
def test_whatever_a_start_meets_every_hook_that_started_is_reached_and_all_is_bounded(
    nodes: list[Node], sequential: bool
) -> None:
    anyio.run(lambda: _run(nodes, sequential=sequential, cancel_after=None))


@settings(max_examples=scaled(100), deadline=None)
@given(graphs(st.just("well")), st.data(), st.booleans())
def test_whatever_a_stop_meets_every_hook_is_reached_in_order_and_all_is_bounded(
    nodes: list[Node], data: st.DataObject, sequential: bool
) -> None:
    for node in nodes:
        node.stop = data.draw(st.sampled_from(["well", "slow", "fail", "hang", "stubborn"]))
    anyio.run(lambda: _run(nodes, sequential=sequential, cancel_after=None))


@settings(max_examples=scaled(100), deadline=None)
@given(
    graphs(st.sampled_from(["well", "slow", "hang", "stubborn"])),
    st.sampled_from([0.0, 1.0, 3.0, 4.0, 7.0]),
    st.booleans(),
)
def test_a_start_may_be_cancelled_at_any_time(nodes: list[Node], after: float, sequential: bool) -> None:
    anyio.run(lambda: _run(nodes, sequential=sequential, cancel_after=after))
