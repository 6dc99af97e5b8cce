"""Adding pods beside clients of Hubble, against adding them while there are none.

Needs: root, the lab, the compiled plugin.   Gives: measure.
A hundred clients follow all flows; apart from that, ten ask for the last hundred flows without a pause. They
share this machine's processors with the agent and the plugin, so they read answers and do not decode them:
what clients do with flows is not measured. Rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cells.hubble.codec import encode
from cells.hubble.rpc.observer import GetFlowsRequest
from hive.lab.children import Child, Stop
from tests.bench.hubble import WITHIN
from tests.bench.hubble_clients import connected, read_until
from tests.bench.nodes import PluginNode, our_node
from tests.bench.podadd import Batch, run
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool
from tests.support.waiting import eventually

PODS, FOLLOWING, ASKING, LAST = 100, 100, 10, 100
TARGET = 1.1
"""Limit, as a multiple of the median of an ADD without clients."""
WAYS = {
    f"{FOLLOWING} clients follow": (FOLLOWING, encode(GetFlowsRequest(follow=True))),
    f"{ASKING} ask without a pause": (ASKING, encode(GetFlowsRequest(number=LAST))),
}


def _clients(stop: Stop, ready: str, count: int, request: bytes) -> float:
    """Run clients until the parent stops them; return answers per second.

    A file appears once all are served.
    """
    with connected(count, request) as clients:
        waiting = set(clients)
        began = time.monotonic()
        for client in read_until(stop, clients):
            if client in waiting:
                waiting.remove(client)
                if not waiting:
                    Path(ready).touch()
        return sum(client.answers for client in clients) / (time.monotonic() - began)


@contextlib.contextmanager
def served(node: PluginNode, folder: Path, way: str, rates: list[float]) -> Iterator[None]:
    """Run clients during the block; append the answers per second."""
    ready = folder / "hubble-clients"
    ready.unlink(missing_ok=True)
    crowd: Child[float] = node.namespaces.start(_clients, str(ready), *WAYS[way])
    try:
        eventually(ready.exists, WITHIN)
        yield
    finally:
        rates.append(crowd.finish(within=WITHIN))


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure p50 and p99 of an ADD, one at a time, for each kind of client."""
    spawn = tool("spawn", folder)
    idle: list[Batch] = []
    busy: dict[str, list[Batch]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    with our_node(folder, PODS, "bench-flows", "--enable-hubble=true") as node:

        def deleted() -> None:
            run(node, spawn, "DEL", PODS, 1)
            node.verify_deleted()

        for _ in range(rounds + 1):
            idle.append(run(node, spawn, "ADD", PODS, 1))
            deleted()
            for way in WAYS:
                with served(node, folder, way, rates[way]):
                    busy[way].append(run(node, spawn, "ADD", PODS, 1))
                deleted()
    # The first round warms up.
    rows: list[Row | Figure] = [
        Row(
            f"ADD while {way}, {name}",
            "ms",
            Sample(tuple(getattr(batch, name) for batch in busy[way][1:])),
            "no client",
            Sample(tuple(getattr(batch, name) for batch in idle[1:])),
            TARGET if name == "p50" else None,
            faster=False,
        )
        for way in WAYS
        for name in ("p50", "p99")
    ]
    asking = list(WAYS)[1]
    rows.append(Figure(f"answers while {asking}", "1/s", Sample(tuple(rates[asking][1:]))))
    return rows
