"""Services from objects to the kernel's maps, against the same as rules of nftables and iptables.

Of the peers only the time of their tools is measured, for existing rules: kube-proxy has to create them
first. Ours begins with decoded objects and ends when the last entry is in its map.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec

from cells.kubernetes.objects.core import ENDPOINT_SLICES, EndpointSlice, Node, Service
from cells.kubernetes.resources import INDEXES
from cells.maps.map import Epochs, create_map, possible_cpus
from cells.maps.specs import MapSettings, map_specs, sizes
from cells.services import LoadBalancerOptions
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import KernelServices, ServicesTarget
from cells.services.control.watch import ServiceWatch, WatchedObjects
from cells.services.maglev import MaglevBackend, fill
from cells.services.model.claims import frontends
from lifecycle import Reconciler, Table
from lifecycle.process.health import HealthTree
from tests.bench.peers import namespaces
from tests.bench.service_rules import (
    BACKENDS,
    PORT,
    ServiceLoad,
    iptables_change,
    iptables_rules,
    nft_change,
    nft_rules,
    vip,
)
from tests.bench.startup import memory
from tests.bench.stats import Figure, Row, Sample

SERVICES = 5000
MORE = 10_000
CHANGES = 20
LB = (
    "services4", "services6", "backends4", "backends6", "reverse_nat4", "reverse_nat6", "affinity_match",
    "source_range4", "source_range6", "maglev4", "maglev6", "epoch",
)  # fmt: skip
TOOLS = {
    "nft": (("nft", "-f", "-"), nft_rules, nft_change),
    "iptables-nft": (("iptables-nft-restore", "--noflush"), iptables_rules, iptables_change),
    "iptables-legacy": (("iptables-legacy-restore", "--noflush"), iptables_rules, iptables_change),
}
COUNTS = {"nft": SERVICES, "iptables-nft": 1000, "iptables-legacy": SERVICES}
"""Fewer for iptables-nft: 5,000 take many minutes."""
AIMS = {"nft": (75.0, 100.0), "iptables-nft": (25.0, None), "iptables-legacy": (25.0, None)}


def objects(count: int) -> tuple[list[Service], list[EndpointSlice]]:
    """Return services and their slices, decoded as from an API server's answer."""
    load = ServiceLoad(count)
    services, slices = [], []
    for number in range(count):
        metadata = {"namespace": "shop", "name": f"s{number}", "uid": f"u{number}"}
        ports = [{"name": "http", "port": PORT, "protocol": "TCP"}]
        spec = {"clusterIP": vip(number), "clusterIPs": [vip(number)], "ports": ports}
        services.append(msgspec.convert({"metadata": metadata, "spec": spec}, Service))
        slices.append(_slice(number, load.backends(number)))
    return services, slices


def _slice(number: int, backends: list[tuple[str, int]]) -> EndpointSlice:
    labels = {"kubernetes.io/service-name": f"s{number}"}
    endpoints = [
        {"addresses": [ip], "conditions": {"ready": True}, "nodeName": f"node-{at}"}
        for at, (ip, _) in enumerate(backends)
    ]
    return msgspec.convert(
        {
            "metadata": {"namespace": "shop", "name": f"s{number}-1", "labels": labels},
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "http", "port": backends[0][1], "protocol": "TCP"}],
        },
        EndpointSlice,
    )


@contextmanager
def kernel(entries: int) -> Iterator[KernelServices]:
    """Create maps with the node's layouts, for this number of entries."""
    settings = MapSettings(bpf_lb_map_max=entries)
    specs = map_specs(sizes(settings, 0), preallocate=False, cpus=possible_cpus())
    with ExitStack() as stack:
        made: Any = SimpleNamespace(**{name: stack.enter_context(create_map(specs[name])) for name in LB})
        epochs = Epochs(made.epoch)
        for name in LB:
            table = getattr(made, name)
            table.spec, table.epochs = specs[name], epochs
        yield KernelServices(made)


class Ours:
    """Our control plane of services over tables of objects."""

    def __init__(self, maps: KernelServices, *, weighs: bool = False) -> None:
        self._weighs = weighs
        self.grown = 0.0
        """KB by which the process's memory grew for the services, after a collection; 0 unless it weighs."""
        self.services: Table[tuple[str, str], Service] = Table("k8s-services", key=lambda one: one.key)
        self.slices: Table[tuple[str, str], EndpointSlice] = Table(
            "k8s-endpoint-slices", key=lambda one: one.key, indexes=INDEXES[ENDPOINT_SLICES.qualified]
        )
        nodes: Table[tuple[str, str], Node] = Table("k8s-nodes", key=lambda one: one.key)
        self._listed = [each.initializer("the list") for each in (self.services, self.slices, nodes)]
        self.served = served_frontends()
        table = frontends()
        options = LoadBalancerOptions(enable_ipv6=False)
        watched = WatchedObjects(self.services, self.slices, nodes)
        self._watch = ServiceWatch(lambda: "node-1", watched, table, options)
        target = ServicesTarget(table, LoadBalancer(options, self.served), maps, self.served)
        self._reconciler = Reconciler(table, target, full_every=3600)

    async def measured(self, count: int, changes: int) -> tuple[float, list[float]]:
        """Return the ms until all are in the maps; and for each change of one slice."""
        before = own_memory() if self._weighs else 0.0
        services, slices = objects(count)
        gc.collect()
        gc.freeze()
        health = HealthTree().reporter("bench")
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch.run)
            group.start_soon(self._reconciler.run, health)
            await anyio.wait_all_tasks_blocked()
            changed = self.served.changes()
            began = time.perf_counter()
            with self.services.txn() as rows:
                rows.replace_all(services)
            with self.slices.txn() as some:
                some.replace_all(slices)
            for each in self._listed:
                each.done()
            async for _ in changed:
                if len(self.served) == count:
                    break
            first = time.perf_counter() - began
            await anyio.wait_all_tasks_blocked()
            if self._weighs:
                gc.collect()
                self.grown = own_memory() - before
            later = [await self._changed(count // 2, turn) for turn in range(changes)]
            group.cancel_scope.cancel()
        gc.unfreeze()
        return 1000 * first, later

    async def _changed(self, number: int, turn: int) -> float:
        backends = [(f"12.0.{turn}.1", 8080), *ServiceLoad(number).backends(number)[1:]]
        slice_ = _slice(number, backends)
        changed = self.served.changes()
        changed.take()
        began = time.perf_counter()
        with self.slices.txn() as rows:
            rows.put(slice_)
        await anext(aiter(changed))
        return 1000 * (time.perf_counter() - began)


def ours(count: int, changes: int = 0) -> tuple[float, list[float]]:
    """Return the ms until all are in the maps; and for each change."""
    with kernel(1 << 18) as maps:
        return asyncio.run(Ours(maps).measured(count, changes))


def own_memory() -> float:
    """Return the KB of this process's private memory, and its share of shared memory (PSS)."""
    return 1.024 * memory(os.getpid())["Pss"]


def service_client(who: str, *arguments: str) -> dict[str, float]:
    """Return the figures of a client in a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "tests.bench.tools.service_client", who, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def theirs(name: str, count: int, changes: int) -> tuple[float, float]:
    """Return the ms until the rules are in force, and for one change."""
    command, rules, change = TOOLS[name]
    load = ServiceLoad(count)
    with namespaces("bench-sync"):
        first = _timed("bench-sync", command, rules(load))
        later = [_timed("bench-sync", command, change(load, count // 2, turn)) for turn in range(changes)]
    return first, sorted(later)[len(later) // 2]


def _timed(netns: str, command: tuple[str, ...], text: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        ["ip", "netns", "exec", netns, *command],
        input=text,
        text=True,
        check=True,
        capture_output=True,
        timeout=600,
    )
    return 1000 * (time.perf_counter() - began)


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure programming SERVICES and MORE services, one change among SERVICES, lookup tables, memory."""
    del folder
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(min(rounds, 3)):
        for count in (1000, SERVICES, MORE):
            first, later = ours(count, CHANGES)
            found[f"first {count}"].append(first)
            found[f"change {count}"].append(sorted(later)[CHANGES // 2])
        found["memory"].append(service_client("memory", str(SERVICES))["memory"])
        found["maglev"].append(_maglev())
        for name in TOOLS:
            for what, value in zip(("first", "change"), theirs(name, COUNTS[name], 3), strict=True):
                found[f"{what} {name}"].append(value)
    samples = {what: Sample(tuple(values)) for what, values in found.items()}
    all_of = f"{SERVICES:,} services x {BACKENDS}"
    rows: list[Row | Figure] = []
    for name, (first_aim, change_aim) in AIMS.items():
        for what, aim in (("first", first_aim), ("change", change_aim)):
            count = COUNTS[name]
            title = (
                f"{count:,} services x {BACKENDS}: {'objects to maps' if what == 'first' else 'one changed'}"
            )
            mine = samples[f"{what} {count}"]
            rows.append(Row(title, "ms", mine, name, samples[f"{what} {name}"], aim))
    rows += [
        Figure(f"{all_of}: objects to maps", "ms", samples[f"first {SERVICES}"], 150),
        Figure(f"{MORE:,} services x {BACKENDS}: objects to maps", "ms", samples[f"first {MORE}"], 300),
        Figure(f"1,000 services x {BACKENDS}: objects to maps", "ms", samples["first 1000"]),
        Figure(f"{all_of}: one changed", "ms", samples[f"change {SERVICES}"], 2),
        Figure(f"1,000 services x {BACKENDS}: one changed", "ms", samples["change 1000"]),
        Figure(f"{MORE:,} services x {BACKENDS}: one changed", "ms", samples[f"change {MORE}"]),
        Figure(f"{all_of}: memory a service", "KB", samples["memory"]),
        Figure("lookup table of maglev, 16381 x 100", "ms", samples["maglev"], 1),
    ]
    return rows


def _maglev() -> float:
    candidates = [
        MaglevBackend(f"[10.0.{at // 250}.{at % 250}:8080,State:active]", at + 1, 100) for at in range(100)
    ]
    times = []
    for _ in range(20):
        began = time.perf_counter()
        fill(candidates, 16381, 0x24B7EF82)
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[10]
