"""Hubble: events taken in and flows given out a second, and the memory of a full ring."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint

from cells.hubble.export.files import FlowLog, RotatingFile
from cells.hubble.flow import Flow
from cells.hubble.metrics.kinds import FlowMetrics, metrics_of
from cells.hubble.observer import GetFlowsRequest
from cells.hubble.ring import SeenEvent
from cells.hubble.sources import EventSources
from cells.observe.events import Sample as Event
from tests.bench.stats import Figure, Sample
from tests.unit.hubble.test_sources import TRACE, Agent

METRICS = "dns drop tcp flow port-distribution icmp httpV2 kafka flows-to-world policy"
CONTEXTS = "sourceContext=pod;destinationContext=pod"
CAPACITIES = {4095: 4.0, 65535: None}
"""Events of a ring: MiB that it may take."""
BATCH, BATCHES = 200, 500
RAW, FOLLOWED = 500_000.0, 40_000.0
"""What is to be reached, a second of one core."""


def _agent(capacity: int) -> EventSources:
    return Agent(hubble_event_buffer_capacity=capacity).sources


def _batch() -> list[Event]:
    """As the kernel's buffers give them: bytes of their own."""
    return [Event(0, bytes(bytearray(TRACE))) for _ in range(BATCH)]


def raw() -> float:
    """µs of an event that nobody reads."""
    sources, batches = _agent(4095), [_batch() for _ in range(BATCHES)]
    began = time.process_time()
    for batch in batches:
        sources.take(batch)
    return (time.process_time() - began) / (BATCH * BATCHES) * 1e6


async def followed() -> float:
    """µs of an event that one client follows, up to the bytes of its answer."""
    sources, batches = _agent(4095), [_batch() for _ in range(BATCHES // 5)]
    answers = sources.observer.get_flows(GetFlowsRequest(follow=True))
    sources.take(_batch())
    await anext(answers)  # from now on it gets every one
    got, wanted = 0, 0
    began = time.process_time()
    for batch in batches:
        sources.take(batch)
        wanted += len(batch)
        while got < wanted:
            got += len(await anext(answers))
    took = time.process_time() - began
    await answers.aclose()
    return took / wanted * 1e6


async def seen(use: Callable[[list[SeenEvent]], object]) -> float:
    """µs of an event that a part of the agent follows and uses."""
    sources, batches = _agent(4095), [_batch() for _ in range(BATCHES // 5)]
    events = sources.observer.follow()
    got, wanted, took = 0, 0, 0.0
    async with anyio.create_task_group() as tasks:
        first = anyio.Event()

        async def read() -> None:
            nonlocal got
            first.set()
            async for found in events:
                use(found)
                got += len(found)

        tasks.start_soon(read)
        await first.wait()
        await anyio.wait_all_tasks_blocked()
        began = time.process_time()
        for batch in batches:
            sources.take(batch)
            wanted += len(batch)
            while got < wanted:
                await checkpoint()
        took = time.process_time() - began
        tasks.cancel_scope.cancel()
    return took / wanted * 1e6


def exported(folder: Path) -> float:
    """µs of an event that is written to a file."""
    lines = FlowLog("bench", str(folder / "events.log"), (), (), ()).check()
    file = RotatingFile(folder / "events.log", size=10 << 20, backups=1, compress=False)
    try:
        return anyio.run(seen, lambda events: file.write(filter(None, map(lines.line, events))))
    finally:
        file.close()


def counted() -> float:
    """µs of an event that every metric counts, by the names of both pods."""
    metrics = FlowMetrics(metrics_of(f"{name}:{CONTEXTS}" for name in METRICS.split()))

    def count(events: list[SeenEvent]) -> None:
        for one in events:
            if isinstance(one.event, Flow):
                metrics.process(one.event)

    return anyio.run(seen, count)


def full(capacity: int) -> float:
    """MiB of a full ring."""
    sources = _agent(capacity)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(capacity // BATCH + 1):
        sources.take(_batch())
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / 2**20


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Each figure once a round, one after the other; of a file and of metrics, how many times a client's."""
    taken, given, written, by_all = [], [], [], []
    for _ in range(rounds):
        taken.append(raw())
        given.append(anyio.run(followed))
        written.append(exported(folder) / given[-1])
        by_all.append(counted() / given[-1])
    return [
        Figure("Hubble, an event read by none", "µs", Sample(tuple(taken)), 1e6 / RAW),
        Figure("Hubble, an event one client follows", "µs", Sample(tuple(given)), 1e6 / FOLLOWED),
        Figure("Hubble, an event in a file, per client's", "times", Sample(tuple(written))),
        Figure("Hubble, an event in all metrics, per client's", "times", Sample(tuple(by_all))),
        *(
            Figure(f"Hubble, a ring full of {capacity:,} events", "MiB", Sample((full(capacity),)), most)
            for capacity, most in CAPACITIES.items()
        ),
    ]
