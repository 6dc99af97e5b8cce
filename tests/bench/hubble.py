"""Hubble: events received and flows sent per second, and the memory of a full ring buffer.

On a node: the delay from a packet until a client has its flow, alone and beside ninety-nine other clients;
the agent's processor time for that; and its memory with and without Hubble.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from cells.hubble.codec import decode, encode
from cells.hubble.export.files import FlowLog, RotatingFile
from cells.hubble.flow import Flow
from cells.hubble.metrics.kinds import FlowMetrics, metrics_of
from cells.hubble.observer import SeenEvent
from cells.hubble.rpc.observer import GetFlowsRequest, GetFlowsResponse
from cells.hubble.sources import EventSources
from cells.observe.events import Sample as Event
from hive.lab import pods
from hive.lab.children import Child, Stop
from hive.lab.node import Lab
from hive.observe.hubble_client import HubbleClient
from hive.observe.hubble_filters import FlowSelection
from tests.bench.hubble_clients import SOCKET, connected, read_rest, read_until
from tests.bench.nodes import agent_cpu, our_lab
from tests.bench.startup import memory
from tests.bench.stats import Figure, Row, Sample, percentile
from tests.unit.hubble.agent import TRACE, Agent

METRICS = "dns drop tcp flow port-distribution icmp httpV2 kafka flows-to-world policy"
CONTEXTS = "sourceContext=pod;destinationContext=pod"
CAPACITIES = {4095: 4.0, 65535: None}
"""Events of a ring buffer: limit in MiB."""
BATCH, BATCHES = 200, 500
RAW, FOLLOWED = 500_000.0, 40_000.0
"""What is to be reached, a second of one core."""
CLIENTS = 100
PACKETS, PAUSE = 250, 0.02
"""Of a round, each to a port of its own, and the seconds between two."""
FIRST_PORT = 20_000
LATEST = 5.0
"""Limit in ms from a packet until a client has its flow, for 99 of 100 packets."""
WITHIN, LATE = 30.0, 10.0
"""Seconds until clients follow, and until they have the last flow."""
_Result = TypeVar("_Result")


def _agent(capacity: int) -> EventSources:
    return Agent(hubble_event_buffer_capacity=capacity).sources


def _batch() -> list[Event]:
    """Return events as the kernel's buffers provide them: bytes of their own."""
    return [Event(0, bytes(bytearray(TRACE))) for _ in range(BATCH)]


def raw() -> float:
    """Return the µs of an event without a reader."""
    sources, batches = _agent(4095), [_batch() for _ in range(BATCHES)]
    began = time.process_time()
    for batch in batches:
        sources.process(batch)
    return (time.process_time() - began) / (BATCH * BATCHES) * 1e6


async def followed(clients: int = 1) -> float:
    """Return the µs of an event for each of several clients, up to the bytes of their answers."""
    sources, batches = _agent(4095), [_batch() for _ in range(BATCHES // 5 // clients or 1)]
    every = [sources.observer.get_flows(GetFlowsRequest(follow=True)) for _ in range(clients)]
    sources.process(_batch())
    got = [0 for _ in every]
    for answers in every:
        await anext(answers)  # from now on it gets every one
    wanted = 0
    began = time.process_time()
    for batch in batches:
        sources.process(batch)
        wanted += len(batch)
        for number, answers in enumerate(every):
            while got[number] < wanted:
                got[number] += len(await anext(answers))
    took = time.process_time() - began
    for answers in every:
        await answers.aclose()
    return took / (wanted * clients) * 1e6


async def seen(use: Callable[[list[SeenEvent]], object]) -> float:
    """Return the µs of an event that a part of the agent follows and uses."""
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
            sources.process(batch)
            wanted += len(batch)
            while got < wanted:
                await checkpoint()
        took = time.process_time() - began
        tasks.cancel_scope.cancel()
    return took / wanted * 1e6


def exported(folder: Path) -> float:
    """Return the µs of an event that is written to a file."""
    lines = FlowLog("bench", str(folder / "events.log"), (), (), ()).check()
    file = RotatingFile(folder / "events.log", size=10 << 20, backups=1, compress=False)
    try:
        return anyio.run(seen, lambda events: file.write([*filter(None, map(lines.line, events))]))
    finally:
        file.close()


def counted() -> float:
    """Return the µs of an event that every metric counts, by the names of both pods."""
    metrics = FlowMetrics(metrics_of(f"{name}:{CONTEXTS}" for name in METRICS.split()))

    def count(events: list[SeenEvent]) -> None:
        for one in events:
            if isinstance(one.event, Flow):
                metrics.process(one.event)

    return anyio.run(seen, count)


def full(capacity: int) -> float:
    """Return the MiB of a full ring buffer."""
    sources = _agent(capacity)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(capacity // BATCH + 1):
        sources.process(_batch())
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / 2**20


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Measure each figure once a round; those of the file and of metrics as multiples of a client's."""
    taken, given, shared, written, by_all = [], [], [], [], []
    for _ in range(rounds):
        taken.append(raw())
        given.append(anyio.run(followed))
        shared.append(anyio.run(followed, CLIENTS) / given[-1])
        written.append(exported(folder) / given[-1])
        by_all.append(counted() / given[-1])
    return [
        Figure("Hubble, an event read by none", "µs", Sample(tuple(taken)), 1e6 / RAW),
        Figure("Hubble, an event one client follows", "µs", Sample(tuple(given)), 1e6 / FOLLOWED),
        Figure(
            f"Hubble, one of {CLIENTS} clients that follow, per lone client's", "times", Sample(tuple(shared))
        ),
        Figure("Hubble, an event in a file, per client's", "times", Sample(tuple(written))),
        Figure("Hubble, an event in all metrics, per client's", "times", Sample(tuple(by_all))),
        *(
            Figure(f"Hubble, a ring full of {capacity:,} events", "MiB", Sample((full(capacity),)), most)
            for capacity, most in CAPACITIES.items()
        ),
    ]


class Packets(NamedTuple):
    """Results for the packets of a round."""

    latest: float
    """ms after which 99 of 100 had reached the client as flows."""
    processor: float
    """µs of the agent for each packet."""


def _request() -> bytes:
    """Return the clients' request: each new UDP flow, once, where it reaches a pod."""
    selection = FlowSelection()
    selection.add("type", "trace:to-endpoint")
    selection.add("protocol", "udp")
    allowed, denied = selection.lists()
    return encode(GetFlowsRequest(follow=True, whitelist=allowed, blacklist=denied))


def _follow(path: Path, seen: Callable[[list[bytes]], None]) -> None:
    """Call a function with all flows, in a thread that ends with the process."""

    def read() -> None:
        with HubbleClient(f"unix://{path}", WITHIN) as client:
            for batch in client.stream("observer.Observer/GetFlows", _request()):
                seen(batch)

    threading.Thread(target=read, daemon=True).start()


def _port(answer: bytes) -> int:
    """Return the destination port of a flow's packet; 0 for flows other than UDP."""
    flow = decode(GetFlowsResponse, answer).flow
    return flow.l4.UDP.destination_port if flow and flow.l4 and flow.l4.UDP else 0


def others(stop: Stop, path: Path, count: int, ready: str) -> list[int]:
    """Follow with several clients, create a file once all do, and return how many packets each received."""
    with connected(count, _request(), path) as clients:
        waiting = set(clients)
        for client in read_until(stop, clients, keep=True):
            if client in waiting and client.data:
                waiting.remove(client)
                if not waiting:
                    Path(ready).touch()
        read_rest(clients)
        wanted = range(FIRST_PORT, FIRST_PORT + PACKETS)
        return [len({port for port in map(_port, client.messages()) if port in wanted}) for client in clients]


def latencies(path: Path, send: Callable[[int], object]) -> list[float]:
    """Return the ms from a packet until a client of the socket has its flow, for each of PACKETS.

    Raises RuntimeError if a flow does not arrive.
    """
    came: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def seen(batch: list[bytes]) -> None:
        now = time.perf_counter_ns()
        for each in batch:
            came.put((_port(each), now))

    _follow(path, seen)
    probe(send, lambda: not came.empty())
    sent = {}
    for port in range(FIRST_PORT, FIRST_PORT + PACKETS):
        sent[port] = time.perf_counter_ns()
        send(port)
        time.sleep(PAUSE)
    took: dict[int, float] = {}
    while len(took) < PACKETS:
        try:
            port, now = came.get(timeout=LATE)
        except queue.Empty:
            raise RuntimeError(f"{PACKETS - len(took)} of {PACKETS} packets have no flow") from None
        if port in sent:
            took.setdefault(port, (now - sent[port]) / 1e6)
    return list(took.values())


def probe(send: Callable[[int], object], done: Callable[[], bool]) -> None:
    """Send packets, each to another port, since each flow is reported once, until the condition is true."""
    until = time.monotonic() + WITHIN
    for port in range(FIRST_PORT - 1, 0, -1):
        if done():
            return
        if time.monotonic() > until:
            raise RuntimeError(f"clients have no flow of a packet within {WITHIN:g} s")
        send(port)
        time.sleep(PAUSE)


def _inside(use: Callable[[Callable[[int], object]], _Result], address: str) -> _Result:
    """Run in a pod: call a function with one that sends a packet to a port of that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return use(lambda port: sender.sendto(b"hubble", (address, port)))


def packets(made: Lab, pid: int, address: str, clients: int, folder: Path) -> Packets:
    """Send the packets of a round from pod ``a`` to that address, while several clients follow."""
    ready = folder / "hubble-followed"
    ready.unlink(missing_ok=True)
    with made.open_pod("a") as pod:

        def found() -> Packets:
            before = agent_cpu(pid)
            took = pod.run(_inside, lambda send: latencies(SOCKET, send), address, within=WITHIN * 3)
            return Packets(percentile(took, 0.99), (agent_cpu(pid) - before) / PACKETS / 1000)

        if clients == 1:
            return found()
        crowd: Child[list[int]] = pod.start(others, SOCKET, clients - 1, os.fspath(ready))
        try:
            pod.run(_inside, lambda send: probe(send, ready.exists), address, within=WITHIN * 2)
            result = found()
        finally:
            counts = crowd.finish(within=WITHIN)
    if min(counts) < PACKETS:
        raise RuntimeError(f"one of {clients} clients was given {min(counts)} of {PACKETS} flows")
    return result


def on_a_node(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure with and without Hubble in turn; with it, one client and a hundred."""
    found: dict[int, list[Packets]] = defaultdict(list)
    held: dict[bool, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for hubble in (False, True):
            with our_lab("bench-flows", f"--enable-hubble={str(hubble).lower()}") as (made, pid):
                pods.add(made, "a")
                address = pods.add(made, "b").ipv4
                held[hubble].append(memory(pid)["Pss"])
                for clients in (1, CLIENTS) if hubble else ():
                    found[clients].append(packets(made, pid, address, clients, folder))
    rows: list[Row | Figure] = [
        Row(
            "Hubble, memory of the agent (PSS)",
            "KiB",
            Sample(tuple(held[True])),
            "without",
            Sample(tuple(held[False])),
            None,
            faster=False,
        )
    ]
    for clients, of in found.items():
        served = "1 client" if clients == 1 else f"{clients} clients"
        latest = Sample(tuple(one.latest for one in of))
        rows.append(Figure(f"Hubble, packet to flow, p99, {served}", "ms", latest, LATEST))
        processor = Sample(tuple(one.processor for one in of))
        rows.append(Figure(f"Hubble, processor time a packet, {served}", "µs", processor))
    return rows
