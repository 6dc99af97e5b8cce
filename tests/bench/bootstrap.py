"""The start of an agent without endpoints and with many: to the API, to ready, and where its time went.

The agent is killed with -9 and started again on the same node. The API is there once it answers GET /config;
the daemon runs once it answers GET /healthz, which waits for it; the agent is ready once a kubelet's probe on
port 9879 gets 200. The parts are the agent's own bootstrap statistics, from the line of its log that ends the
start. Counts take turns within a round.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hive.lab import agent_process
from hive.lab.namespaces import inside
from tests.bench.nodes import PluginNode, our_node
from tests.bench.podadd import run
from tests.bench.startup import LOOK_EVERY, SERVES_WITHIN, answers, answers_ok, compiled
from tests.bench.stats import Figure, Sample
from tests.bench.tools import tool

COUNTS = (0, 250)
PROBED = ("127.0.0.1", 9879)
COMPLETED = re.compile(r'msg="Daemon initialization completed" module=\S+ (.*)')


@dataclass(frozen=True, slots=True)
class Start:
    """ms from the start of the process, and of each part."""

    api: float
    daemon: float
    ready: float
    parts: dict[str, float]


def probe(node: PluginNode) -> bool:
    """Return whether a kubelet's probe of the agent succeeds."""
    with inside(node.namespaces):
        wire = socket.socket()
    with wire:
        wire.settimeout(SERVES_WITHIN)
        connection = http.client.HTTPConnection(*PROBED)
        connection.sock = wire
        try:
            wire.connect(PROBED)
            connection.request("GET", "/healthz", headers={"brief": "true"})
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def start(node: PluginNode) -> Start:
    """Kill the agent, start another, and measure it."""
    made = node.lab
    agent_process.crash(made)
    made.agent_log.write_bytes(b"")
    began = time.monotonic()
    pid = agent_process.start(made, "--ipv4-range=10.200.0.0/16")
    path, api, daemon, ready = agent_process.api_socket(pid), 0.0, 0.0, 0.0
    while not (api and daemon and ready):
        now = time.monotonic() - began
        if now > SERVES_WITHIN:
            raise RuntimeError(f"the agent is not ready:\n{agent_process.log_end(made)}")
        if not api and answers(path, "/v1/config"):
            api = time.monotonic() - began
        if api and not daemon and answers_ok(path):
            daemon = time.monotonic() - began
        if not ready and probe(node):
            ready = time.monotonic() - began
        time.sleep(LOOK_EVERY)
    while (completed := COMPLETED.search(made.agent_log.read_text())) is None:
        if time.monotonic() - began > SERVES_WITHIN:
            raise RuntimeError(f"the agent told no statistics:\n{agent_process.log_end(made)}")
        time.sleep(LOOK_EVERY)
    parts = (part.split("=") for part in completed[1].split())
    return Start(
        api * 1000, daemon * 1000, ready * 1000, {scope: float(seconds) * 1000 for scope, seconds in parts}
    )


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return all three times and every part for both counts, a value a round."""
    compiled()
    spawn = tool("spawn", folder)
    found: dict[int, list[Start]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        nodes = {}
        for count in COUNTS:
            node = nodes[count] = stack.enter_context(our_node(folder, count, f"bench-bootstrap-{count}"))
            if count:
                run(node, spawn, "ADD", count, 10)
                node.verify_added(count)
        for index in range(rounds + 1):
            for count, node in nodes.items():
                one = start(node)
                if index:  # the first round warms up
                    found[count].append(one)
    rows = []
    for count, starts in found.items():
        what = f"{count} endpoints"
        rows.append(Figure(f"{what}: process start to API", "ms", Sample(tuple(one.api for one in starts))))
        rows.append(
            Figure(f"{what}: process start to daemon", "ms", Sample(tuple(one.daemon for one in starts)))
        )
        rows.append(
            Figure(f"{what}: process start to ready", "ms", Sample(tuple(one.ready for one in starts)))
        )
        rows += [
            Figure(f"{what}: {part}", "ms", Sample(tuple(one.parts[part] for one in starts)))
            for part in starts[0].parts
        ]
    return rows
