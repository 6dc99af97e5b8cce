"""The framework alone: graphs, hooks, tables and imports, against its peers.

Rounds are interleaved. Each figure's peer does less than ours where it is marked "manual" or "plain".
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lifecycle import Hive, Hook, Lifecycle, Table, configure_logging, invoke, provide
from tests.bench.graphs import BUILDERS, Built, Shape, collected, timed
from tests.bench.stats import Row, Sample

SIZES = (1_000, 10_000)
HOOKS = 1_000
ROWS = 20_000

GRAPH_FIGURES: tuple[tuple[str, str, Callable[[Built], float], tuple[str, ...]], ...] = (
    ("check", "ms", lambda built: built.check, ("dishka",)),
    ("construct", "ms", lambda built: built.construct, ("dishka", "dependency-injector (manual)")),
    (
        "check + construct",
        "ms",
        lambda built: built.check + built.construct,
        ("dishka", "dependency-injector (manual)", "plain Python"),
    ),
    ("get one again", "µs", lambda built: built.resolve, ("dishka", "dependency-injector (manual)")),
)


@dataclass(frozen=True, slots=True)
class Item:
    """A row."""

    key: int
    value: int


def graphs(rounds: int) -> Iterable[Row]:
    """Measure checking, building and look-up, for every size."""
    for size in SIZES:
        shape = Shape.of(size)
        found: dict[str, list[Built]] = defaultdict(list)
        for index in range(rounds + 1):
            for name, build in BUILDERS.items():
                built = build(shape)
                if index:  # the first round warms up
                    found[name].append(built)
        for what, unit, figure, peers in GRAPH_FIGURES:
            ours = Sample(tuple(map(figure, found["ours"])))
            for peer in peers:
                theirs = Sample(tuple(map(figure, found[peer])))
                yield Row(f"{size:,} constructors: {what}", unit, ours, peer, theirs, None)


async def hive_with_hooks() -> tuple[float, float]:
    """Return ms to start and to stop a hive of hooks that form a chain."""

    async def nothing() -> None:
        await asyncio.sleep(0)

    def register(lifecycle: Lifecycle) -> list[int]:
        for number in range(HOOKS):
            lifecycle.append(Hook(f"hook {number}", nothing, nothing))
        return []

    return await started_and_stopped(Hive(provide(register), invoke(list[int])))


async def hive_with_siblings() -> tuple[float, float]:
    """Return ms to start and to stop a hive of hooks that do not depend on each other."""

    async def nothing() -> None:
        await asyncio.sleep(0)

    def register(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("hook", nothing, nothing))

    def copy() -> Callable[[Lifecycle], None]:
        def each(lifecycle: Lifecycle) -> None:
            register(lifecycle)

        return each

    return await started_and_stopped(Hive(invoke(*(copy() for _ in range(HOOKS)))))


async def started_and_stopped(hive: Hive) -> tuple[float, float]:
    """Return ms of start and stop; the graph is checked and built before."""
    hive._construct()
    began = time.process_time()
    await hive.start()
    running = time.process_time()
    await hive.stop()
    return (running - began) * 1000, (time.process_time() - running) * 1000


async def manual_tasks() -> tuple[float, float]:
    """Return ms to start tasks that wait for a stop signal, and to stop them: no order, no names."""

    async def live(started: asyncio.Event, stop: asyncio.Event) -> None:
        await asyncio.sleep(0)
        started.set()
        await stop.wait()
        await asyncio.sleep(0)

    began = time.process_time()
    stop = asyncio.Event()
    events = [asyncio.Event() for _ in range(HOOKS)]
    async with asyncio.TaskGroup() as group:
        for event in events:
            group.create_task(live(event, stop))
        for event in events:
            await event.wait()
        running = time.process_time()
        stop.set()
    return (running - began) * 1000, (time.process_time() - running) * 1000


HOOK_RUNS = {
    "siblings": hive_with_siblings,
    "in a row": hive_with_hooks,
    "asyncio tasks (manual)": manual_tasks,
}


def hooks(rounds: int) -> Iterable[Row]:
    """Measure starting and stopping."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name, run in HOOK_RUNS.items():
            with collected():
                found[name].append(asyncio.run(run()))
    for ours in ("siblings", "in a row"):
        for index, phase in enumerate(("start", "stop")):
            sides = (
                Sample(tuple(run[index] for run in found[name])) for name in (ours, "asyncio tasks (manual)")
            )
            mine, theirs = sides
            yield Row(f"{phase} {HOOKS:,} hooks, {ours}", "ms", mine, "asyncio tasks (manual)", theirs, None)


def table_writes(rows_in_one: int) -> float:
    """Return rows per second into a table, with this number in a transaction."""
    table: Table[int, Item] = Table("items", key=lambda item: item.key)
    items = [Item(number % (ROWS // 2), number) for number in range(ROWS)]

    def write() -> None:
        for start in range(0, ROWS, rows_in_one):
            with table.txn() as txn:
                for item in items[start : start + rows_in_one]:
                    txn.put(item)

    return ROWS / timed(write)[0] * 1000


def dict_writes() -> float:
    """Return rows per second into a dict: no notification, no rollback."""
    rows: dict[int, Item] = {}
    items = [Item(number % (ROWS // 2), number) for number in range(ROWS)]

    def write() -> None:
        for item in items:
            rows[item.key] = item

    return ROWS / timed(write)[0] * 1000


def table_changes() -> float:
    """Return changes per second from a writer to a watcher, a hundred in a transaction."""

    async def run() -> float:
        table: Table[int, Item] = Table("items", key=lambda item: item.key)
        changes = table.changes()
        began, seen = time.process_time(), 0
        for start in range(0, ROWS, 100):
            with table.txn() as txn:
                for number in range(start, start + 100):
                    txn.put(Item(number, number))
            seen += len(await anext(changes))
        assert seen == ROWS
        return ROWS / (time.process_time() - began)

    return asyncio.run(run())


def queue_items() -> float:
    """Return items per second through an asyncio.Queue, a hundred at a time; nothing is stored."""

    async def run() -> float:
        queue: asyncio.Queue[Item] = asyncio.Queue()
        began = time.process_time()
        for start in range(0, ROWS, 100):
            for number in range(start, start + 100):
                queue.put_nowait(Item(number, number))
            for _ in range(100):
                await queue.get()
        return ROWS / (time.process_time() - began)

    return asyncio.run(run())


TABLE_FIGURES: tuple[tuple[str, Callable[[], float], str, Callable[[], float]], ...] = (
    ("table: writes, 1 in a transaction", lambda: table_writes(1), "dict", dict_writes),
    ("table: writes, 100 in a transaction", lambda: table_writes(100), "dict", dict_writes),
    ("table: changes sent, 100 at a time", table_changes, "asyncio.Queue", queue_items),
)


def tables(rounds: int) -> Iterable[Row]:
    """Return writes and changes in thousands per second; more is better: the ratio is ours / the peer's."""
    for what, ours, peer, theirs in TABLE_FIGURES:
        pairs = []
        for _ in range(rounds):
            with collected():
                pairs.append((ours() / 1000, theirs() / 1000))
        mine, others = (Sample(values) for values in zip(*pairs, strict=True))
        yield Row(what, "1000/s", mine, peer, others, None, faster=False)


IMPORTS = {
    "lifecycle": "lifecycle",
    "dishka": "dishka",
    "dependency-injector": "dependency_injector.containers, dependency_injector.providers",
    "asyncio": "asyncio",
}
PROBE = """
import time
began = time.process_time()
import {modules}
took = time.process_time() - began
with open("/proc/self/smaps_rollup", encoding="ascii") as memory:
    held = sum(int(line.split()[1]) for line in memory if line.startswith(("Private_", "Shared_")))
print(took * 1000, held / 1024)
"""


def imports(rounds: int) -> Iterable[Row]:
    """Return what an import costs a new process: ms, and MB of memory including the interpreter's.

    Bytecode is compiled before, as in installed packages.
    """
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import lifecycle"], check=True, timeout=60, env=compiled)
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for _ in range(rounds):
        for name, modules in IMPORTS.items():
            program = [sys.executable, "-c", PROBE.format(modules=modules)]
            printed = subprocess.run(
                program, capture_output=True, text=True, check=True, timeout=60, env=compiled
            ).stdout
            found[name].append(tuple(map(float, printed.split())))
    for index, (what, unit) in enumerate((("cold import", "ms"), ("memory after the import", "MB"))):
        mine, *others = (Sample(tuple(run[index] for run in found[name])) for name in IMPORTS)
        for peer, theirs in zip(list(IMPORTS)[1:], others, strict=True):
            yield Row(f"lifecycle: {what}", unit, mine, peer, theirs, None)


def help_page(rounds: int) -> Iterable[Row]:
    """Measure ``hive --help`` beside the import of its command-line library."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    commands = {
        "ours": [sys.executable, "-m", "hive", "--help"],
        "click": [sys.executable, "-c", "import click"],
    }
    found: dict[str, list[float]] = defaultdict(list)
    for index in range(rounds + 1):
        for name, command in commands.items():
            began = _of_children()
            subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL, env=compiled)
            if index:  # the first round compiles
                found[name].append((_of_children() - began) * 1000)
    mine, peer = (Sample(tuple(found[name])) for name in commands)
    yield Row("hive --help", "ms", mine, 'python -c "import click"', peer, None)


def _of_children() -> float:
    """Return the processor seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


RUNNING = {
    "lifecycle": """
from lifecycle import Hive, Hook, Lifecycle, configure_logging, invoke
configure_logging("warning")
def part(number):
    def register(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook(f"hook {number}", nothing, nothing))
    return register
async def main():
    async with Hive(invoke(*map(part, range(HOOKS)))).started():
        print(held())
""",
    "asyncio (manual)": """
async def live(stop):
    await nothing()
    await stop.wait()
    await nothing()
async def main():
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(HOOKS):
            group.create_task(live(stop), name=f"hook {number}")
        await asyncio.sleep(0)
        print(held())
        stop.set()
""",
}
HELD = f"""
import asyncio
HOOKS = {HOOKS}
def held():
    with open("/proc/self/smaps_rollup", encoding="ascii") as memory:
        return sum(int(line.split()[1]) for line in memory if line.startswith(("Private_", "Shared_"))) / 1024
async def nothing():
    pass
"""


def running(rounds: int) -> Iterable[Row]:
    """Return the MB of a process that runs a hive of many hooks, and of one with as many tasks."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, body in RUNNING.items():
            program = [sys.executable, "-c", f"{HELD}{body}asyncio.run(main())"]
            done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
            found[name].append(float(done.stdout))
    mine, peer = (Sample(tuple(found[name])) for name in RUNNING)
    yield Row(f"lifecycle: memory while {HOOKS:,} hooks run", "MB", mine, "asyncio (manual)", peer, None)


ONE_HOOK = """
from lifecycle import Hive, Hook, Lifecycle, configure_logging, invoke
configure_logging("warning")
def part(number):
    def register(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook(f"hook {number}", nothing, nothing))
    return register
async def main():
    async with Hive(invoke(part(0))).started():
        pass
    hive = Hive(invoke(*map(part, range(HOOKS))))
    hive.build()
    built = held()
    async with hive.started():
        print((held() - built) * 1024 / HOOKS)
"""
"""KB of a running hook, without the constructor that registered it."""

RETAINED = 100_000
OVERWRITTEN = 2_000
TARGETS: tuple[tuple[str, str, float], ...] = (
    ("cold import above Python's", "ms", 60),
    ("memory of the import above Python's", "MiB", 12),
    ("get one again", "µs", 0.3),
    ("start of a hook", "µs", 15),
    ("memory of a hook", "KB", 4),
    ("snapshot and put at 100,000 rows", "µs", 5),
    ("memory of 100,000 rows with three derived tables", "MiB", 120),
)
"""Targets of the framework, independent of peers."""

DERIVED = f"""

from lifecycle import Table
from tests.bench.framework import Item
def held():
    with open("/proc/self/smaps_rollup", encoding="ascii") as memory:
        return sum(int(line.split()[1]) for line in memory if line.startswith(("Private_", "Shared_"))) / 1024
before = held()
table = Table("items", key=lambda item: item.key)
with table.txn() as txn:
    for number in range({RETAINED}):
        txn.put(Item(number, number % 1000))
derived = [table.filter(lambda item: item.value), table.map(lambda item: item.value),
           table.group(by=lambda item: item.value, into=lambda value, rows: len(rows))]
print(sum(map(len, derived)) and held() - before)
"""


def retained_writes() -> float:
    """Return the µs of a snapshot and a put, in a table of many rows, while the snapshot exists."""
    table: Table[int, Item] = Table("items", key=lambda item: item.key)
    with table.txn() as txn:
        for number in range(RETAINED):
            txn.put(Item(number, 0))
    rows = [Item(number * RETAINED // OVERWRITTEN, 1) for number in range(OVERWRITTEN)]
    held = table.snapshot()
    began = time.process_time()
    for row in rows:
        held = table.snapshot()
        table.put(row)
    took = time.process_time() - began
    assert held.get(rows[-1].key) == Item(rows[-1].key, 0)
    return took / OVERWRITTEN * 1e6


def got_again() -> float:
    """Return the µs of a repeated Hive.get()."""
    hive = Hive(provide(Item0), invoke(Item0))
    hive.build()
    get = hive.get
    get(Item0)
    began = time.process_time()
    for _ in range(100_000):
        get(Item0)
    return (time.process_time() - began) * 10


class Item0:
    """A class to look up."""


def wanted(rounds: int) -> Iterable[Row]:
    """Return each figure with its target; a ratio of 1 and more reaches it."""
    probes = {row.what: row for row in imports(rounds) if row.peer_name == "asyncio"}
    imported, remembered = probes["lifecycle: cold import"], probes["lifecycle: memory after the import"]
    started = []
    for _ in range(rounds):
        with collected():
            started.append(asyncio.run(hive_with_siblings())[0])
    found = (
        [mine - peer for mine, peer in zip(imported.ours.values, imported.peer.values, strict=True)],
        [mine - peer for mine, peer in zip(remembered.ours.values, remembered.peer.values, strict=True)],
        [got_again() for _ in range(rounds)],
        [each * 1000 / HOOKS for each in started],
        [_printed(f"{HELD}{ONE_HOOK}asyncio.run(main())") for _ in range(rounds)],
        [retained_writes() for _ in range(rounds)],
        [_printed(DERIVED) for _ in range(rounds)],
    )
    for (what, unit, most), values in zip(TARGETS, found, strict=True):
        yield Row(f"lifecycle: {what}", unit, Sample(tuple(values)), "wanted", Sample((most,) * rounds), None)


def _printed(program: str) -> float:
    """Return the number that a child process prints."""
    return float(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60).stdout
    )


def measure(folder: Path, rounds: int) -> list[Row]:
    """Return every figure of the framework."""
    del folder
    configure_logging("warning")
    return [
        row for part in (graphs, hooks, tables, imports, help_page, running, wanted) for row in part(rounds)
    ]
