"""Pod to pod: round trips and connections, ours against a bridge, a routed veth, and one with equal checks.

One processor for the client, one for the server, the same for all; rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.bench import peers
from tests.bench.nodes import our_pair
from tests.bench.peers import Pair
from tests.bench.stats import Row, Sample
from tests.bench.tools import tool

PORT = 7001
PEERS = {
    "plain bridge": (peers.bridge, 1.0),
    "routed veth": (peers.routed, None),
    "routed veth + nft": (peers.filtered, 0.95),
}
ROUND_TRIPS = 20_000
CONNECTIONS = 5_000


@contextlib.contextmanager
def server(program: Path, pods: Pair, ports: int = 1) -> Iterator[None]:
    """Run the server in its pod for the block, on several ports from PORT on."""
    process = subprocess.Popen(
        [program, "serve", "0", str(PORT), str(ports)],
        stdout=subprocess.PIPE,
        preexec_fn=pods.server.enter,  # noqa: PLW1509 - the benchmark has one thread
    )
    try:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise RuntimeError("the traffic server did not start")
        yield
    finally:
        process.kill()
        process.communicate()


def run(program: Path, kind: str, pods: Pair, count: int) -> float:
    """Return the median of one round trip (rr) or connection (crr), in µs."""
    command = [str(program), kind, "1", pods.address, str(PORT), str(count)]
    result = subprocess.run(
        command, preexec_fn=pods.client.enter, check=True, capture_output=True, text=True, timeout=120
    )
    return int(result.stdout.split()[1]) / 1000


def measure(folder: Path, rounds: int) -> list[Row]:
    """Measure both figures against every peer, in ``rounds`` interleaved rounds each."""
    program = tool("traffic", folder)
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        networks = {"ours": stack.enter_context(our_pair())}
        for name, (network, _) in PEERS.items():
            networks[name] = stack.enter_context(network())
        for pods in networks.values():
            stack.enter_context(server(program, pods))
        for _ in range(rounds):
            for kind, count in (("rr", ROUND_TRIPS), ("crr", CONNECTIONS)):
                for name, pods in networks.items():
                    figures[kind, name].append(run(program, kind, pods, count))
    rows = []
    for kind, what in (("rr", "pod↔pod round trip"), ("crr", "pod→pod connect + round trip + close")):
        for name, (_, target) in PEERS.items():
            ours, peer = (Sample(tuple(figures[kind, who])) for who in ("ours", name))
            rows.append(Row(what, "µs", ours, name, peer, target, faster=False))
    return rows
