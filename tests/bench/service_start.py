"""Services of a cluster at a start: from the first connection to the API server to the last map entry.

The client is the services of an agent, with the cells that an agent has for them, in a process of its own:
reflectors, tables, frontends, numbers, maps of the kernel. Its clock starts with the hive, once all is
imported, so it holds the hive's own start as well. Answers come from memory: a server repeats what the fake
API server answered. Another client reads the same bytes and does nothing with them: what the server, the
sockets and the machine take of the time in any case. Rounds are interleaved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.bench.objects import replaying, serving
from tests.bench.service_rules import BACKENDS
from tests.bench.service_sync import SERVICES, service_client
from tests.bench.stats import Figure, Row, Sample
from tests.support.apiserver import ADMIN_TOKEN

READER = "a client that reads the bytes"


def measure(folder: Path, rounds: int) -> Sequence[Row | Figure]:
    """Measure SERVICES services of BACKENDS backends, at one API server."""
    del folder
    found: dict[str, list[float]] = defaultdict(list)
    with serving(0, 1, 0, 0, 0, SERVICES) as server, replaying(server) as again:
        for number in range(rounds + 1):
            took = service_client("start", again.url, ADMIN_TOKEN, str(SERVICES))
            floor = service_client("read", again.url)
            if number:  # the first time the server is asked
                found["start"].append(took["wall"])
                found["processor"].append(took["cpu"])
                found["read"].append(floor["wall"])
                found["size"].append(floor["bytes"] / 1e6)
    samples = {what: Sample(tuple(values)) for what, values in found.items()}
    size = f"{SERVICES:,} services x {BACKENDS} at a start"
    what = f"{size}: from connect to the last map entry"
    return [
        Row(what, "s", samples["start"], READER, samples["read"], None, faster=False),
        Figure(what, "s", samples["start"], 1.0),
        Figure(f"{size}: processor", "s", samples["processor"]),
        Figure(f"{size}: read from the API server", "MB", samples["size"]),
    ]
