"""Hubble: events taken in and flows given out a second, and the memory of a full ring."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import anyio

from cells.hubble.observer import GetFlowsRequest
from cells.hubble.sources import EventSources
from cells.observe.events import Sample as Event
from tests.bench.stats import Figure, Sample
from tests.unit.hubble.test_sources import TRACE, Agent

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


def measure(_folder: Path, rounds: int) -> list[Figure]:
    """Each figure once a round."""
    taken, given = [], []
    for _ in range(rounds):
        taken.append(raw())
        given.append(anyio.run(followed))
    return [
        Figure("Hubble, an event read by none", "µs", Sample(tuple(taken)), 1e6 / RAW),
        Figure("Hubble, an event one client follows", "µs", Sample(tuple(given)), 1e6 / FOLLOWED),
        *(
            Figure(f"Hubble, a ring full of {capacity:,} events", "MiB", Sample((full(capacity),)), most)
            for capacity, most in CAPACITIES.items()
        ),
    ]
