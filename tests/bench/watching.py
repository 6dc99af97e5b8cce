"""Events of packets that reach a watcher without loss.

A program outputs events of 100 bytes into the agent's buffers, in bursts a hundred times a second; a client
of the monitor socket counts them. The figure is the highest rate without a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread

from cells import config, maps
from cells.datapath.build import compile_one, find_clang
from cells.datapath.libbpf import LoadedObject
from cells.maps.bpf import test_run as run_program
from cells.maps.node_maps import Maps
from cells.observe import events, monitor
from cells.observe.events import Lost
from cells.observe.monitor import Monitor, Payloads
from hive.lab.namespaces import new_node
from lifecycle import Hive, invoke
from lifecycle.testing import eventually
from tests.bench.stats import Figure, Sample

EMITTER = Path(__file__).parents[1] / "kernel" / "events" / "emit.c"
RATES = (5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000)
SECONDS, BURSTS = 2.0, 100
EVENT = bytes(100)


def root(_maps: Maps, _monitor: Monitor) -> None:
    """The constructor for invoke(): requests the cells."""


@contextlib.asynccontextmanager
async def agent(state_dir: Path) -> AsyncIterator[Hive]:
    """The cells that events pass through."""
    small: dict[str, object] = {
        "bpf-ct-global-tcp-max": 1024,
        "bpf-ct-global-any-max": 1024,
        "policy-map-pool": 1,
        "state-dir": str(state_dir),
    }
    hive = Hive(config.cell, maps.cell, events.cell, monitor.cell, invoke(root), settings=small)
    async with hive.started():
        yield hive


def count(path: Path, expected: int) -> tuple[int, int]:
    """Count events and losses until their sum reaches this number."""
    payloads, seen, lost = Payloads(), 0, 0
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.settimeout(10)
        while seen + lost < expected:
            for each in payloads.feed(client.recv(1 << 18)):
                if isinstance(each, Lost):
                    lost += each.count
                else:
                    seen += 1
    return seen, lost


def emit(program: int, rate: int) -> None:
    """Output events at this rate, in bursts."""
    burst = int(rate / BURSTS)
    began = time.perf_counter()
    for number in range(int(SECONDS * BURSTS)):
        run_program(program, EVENT, repeat=burst)
        time.sleep(max(0.0, began + (number + 1) / BURSTS - time.perf_counter()))


async def highest(folder: Path, emitter: bytes) -> float:
    """Return the highest rate without a loss; 0 if even the lowest has some."""
    best = 0
    async with agent(folder) as hive:
        with LoadedObject(emitter, "emit.o") as loaded:
            loaded.use_maps({"cilium_events": hive.get(Maps).events.fd})
            loaded.load()
            program = loaded.programs()["emit"]
            watch = hive.get(Monitor)
            for rate in RATES:
                total = int(rate / BURSTS) * int(SECONDS * BURSTS)
                counting = asyncio.ensure_future(anyio.to_thread.run_sync(count, watch.path, total))
                await eventually(lambda: watch.watchers == 1)
                await anyio.to_thread.run_sync(emit, program, rate)
                _, lost = await counting
                await eventually(lambda: watch.watchers == 0)
                if lost:
                    break
                best = rate
    return float(best)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return a value a round."""
    emitter = compile_one(find_clang(), EMITTER, folder / "emit.o").read_bytes()
    rates = []
    for _ in range(rounds):
        with new_node() as node:
            rates.append(node.run(anyio.run, highest, Path("/run/cilium"), emitter))
    return [Figure("events of packets a second, none lost", "1/s", Sample(tuple(rates)))]
