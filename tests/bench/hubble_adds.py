"""Adding pods beside clients of Hubble, against adding them while there are none.

Needs: root, the lab, the compiled plugin.   Gives: measure.
A hundred clients follow all flows; apart from that, ten ask for the last hundred flows without a pause. They
share this machine's processors with the agent. Rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from cells.hubble.codec import encode
from cells.hubble.observer import GetFlowsRequest
from hive.lab.children import Child, Stop
from hive.observe.hubble_client import HubbleClient
from tests.bench.hubble import SOCKET, WITHIN
from tests.bench.nodes import PluginNode, our_node
from tests.bench.podadd import Batch, run
from tests.bench.stats import Row, Sample
from tests.bench.tools import tool
from tests.support.waiting import eventually

PODS, FOLLOWING, ASKING, LAST = 100, 100, 10, 100
TARGET = 1.1
"""Times the median of an ADD without clients."""


def _clients(
    stop: Stop, ready: str, count: int, work: Callable[[HubbleClient, Callable[[], None]], None]
) -> int:
    """Have threads work until the parent stops them; how many answers came. A file appears once all do."""
    answers: list[int] = [0] * count
    began = [threading.Event() for _ in answers]

    def one(number: int) -> None:
        def answered() -> None:
            answers[number] += 1
            began[number].set()

        with HubbleClient(f"unix://{SOCKET}", WITHIN) as client:
            began[number].set()
            work(client, answered)

    for number in range(count):
        threading.Thread(target=one, args=(number,), daemon=True).start()
    for event in began:
        if not event.wait(WITHIN):
            raise RuntimeError(f"a client of Hubble is not served within {WITHIN:g} s")
    Path(ready).touch()
    stop.wait(WITHIN * 4)
    return sum(answers)


def follow(client: HubbleClient, answered: Callable[[], None]) -> None:
    """Read all flows, for ever."""
    for _ in client.stream("observer.Observer/GetFlows", encode(GetFlowsRequest(follow=True))):
        answered()


def ask(client: HubbleClient, answered: Callable[[], None]) -> None:
    """Read the last flows, again and again."""
    request = encode(GetFlowsRequest(number=LAST))
    while True:
        for _ in client.stream("observer.Observer/GetFlows", request):
            pass
        answered()


WAYS = {f"{FOLLOWING} clients follow": (FOLLOWING, follow), f"{ASKING} ask without a pause": (ASKING, ask)}


@contextlib.contextmanager
def served(node: PluginNode, folder: Path, way: str) -> Iterator[None]:
    """Clients are served during the block."""
    ready = folder / "hubble-clients"
    ready.unlink(missing_ok=True)
    crowd: Child[int] = node.namespaces.start(_clients, str(ready), *WAYS[way])
    try:
        eventually(ready.exists, WITHIN)
        yield
    finally:
        crowd.finish(within=WITHIN)


def measure(folder: Path, rounds: int) -> list[Row]:
    """p50 and p99 of an ADD, one at a time, for each way of being asked."""
    spawn = tool("spawn", folder)
    idle: list[Batch] = []
    busy: dict[str, list[Batch]] = defaultdict(list)
    with our_node(folder, PODS, "bench-flows", "--enable-hubble=true") as node:

        def deleted() -> None:
            run(node, spawn, "DEL", PODS, 1)
            node.verify_deleted()

        for _ in range(rounds + 1):
            idle.append(run(node, spawn, "ADD", PODS, 1))
            deleted()
            for way in WAYS:
                with served(node, folder, way):
                    busy[way].append(run(node, spawn, "ADD", PODS, 1))
                deleted()
    return [
        Row(
            f"ADD while {way}, {name}",
            "ms",
            # The first round warms up.
            Sample(tuple(getattr(batch, name) for batch in busy[way][1:])),
            "no client",
            Sample(tuple(getattr(batch, name) for batch in idle[1:])),
            TARGET if name == "p50" else None,
            faster=False,
        )
        for way in WAYS
        for name in ("p50", "p99")
    ]
