"""Lookups through the DNS proxy against direct ones: latency, rate, and loss over kill -9."""

from __future__ import annotations

import os
import select
import socket
import time
from functools import partial
from pathlib import Path

from hive.lab import agent_process, pods
from hive.lab.children import Stop
from hive.lab.node import Lab
from tests.bench.stats import Figure, Sample
from tests.support.agents import known_pods, made, serving
from tests.support.dns import lookup, query
from tests.support.fqdn_scenario import WEB, FQDNScenario, fqdn_scenario

LOOKUPS, FLIGHT, SECONDS = 2000, 64, 2.0
TARGET = 80.0
"""Limit in µs that the proxy may add to a lookup."""
RATE, KILLS, PATIENCE = 200.0, 4, 1.0


def latencies(server: str) -> list[float]:
    """Return the seconds of sequential lookups."""
    asked, took = query(WEB), []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(2)
        client.connect((server, 53))
        for _ in range(LOOKUPS):
            began = time.perf_counter()
            client.send(asked)
            client.recv(512)
            took.append(time.perf_counter() - began)
    return sorted(took)


def throughput(server: str) -> float:
    """Return lookups per second with this number in flight."""
    asked, done = query(WEB), 0
    clients = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(FLIGHT)]
    poll = select.epoll()
    by_fd = {client.fileno(): client for client in clients}
    for client in clients:
        client.connect((server, 53))
        client.send(asked)
        poll.register(client, select.EPOLLIN)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for fd, _ in poll.poll(0.2):
            by_fd[fd].recv(512)
            by_fd[fd].send(asked)
            done += 1
    for client in clients:
        client.close()
    return done / SECONDS


def resolver(stop: Stop, server: str) -> tuple[int, int, int, float]:
    """Send lookups at a steady rate, each repeated after a second; return all, failed, late, the longest."""
    asked = late = failed = 0
    longest = 0.0
    while not stop.wait(1 / RATE):
        asked, began = asked + 1, time.monotonic()
        for _ in range(5):
            try:
                lookup(server, WEB, PATIENCE)
                break
            except OSError:
                continue
        else:
            failed += 1
        took = time.monotonic() - began
        longest = max(longest, took)
        late += took > PATIENCE + 0.1
    return asked, failed, late, longest


def kills(place: FQDNScenario) -> tuple[int, int, int, float]:
    """Kill and start an agent repeatedly; return the resolver's counters."""
    asking = place.here.start(resolver, place.server.ipv4)
    try:
        for _ in range(KILLS):
            time.sleep(1.0)
            agent_process.crash(place.node)
            time.sleep(0.3)
            place.pid = serving(place.node, f"--manifests-dir={place.folder}", "--enable-ipv6=true")
        time.sleep(1.0)
        return asking.finish()
    finally:
        asking.stop()


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return medians in µs, lookups per second, and the cost of kill -9."""
    over, through, direct, rates, rates_direct = [], [], [], [], []
    known_pods(folder, "other")
    with made(Lab(f"bench-names-{os.getpid()}")) as node, fqdn_scenario(node, folder) as place:
        pods.add(node, "other")
        with node.open_pod("other") as free:
            server = place.server.ipv4
            for _ in range(rounds):
                ways = [where.run(partial(latencies, server)) for where in (place.here, free)]
                mine, theirs = (one[len(one) // 2] * 1e6 for one in ways)
                through.append(mine)
                direct.append(theirs)
                over.append(mine - theirs)
                rates.append(place.here.run(throughput, server))
                rates_direct.append(free.run(throughput, server))
        asked, failed, late, longest = kills(place)
    return [
        Figure("DNS lookup through the proxy", "µs", Sample(tuple(through))),
        Figure("DNS lookup directly", "µs", Sample(tuple(direct))),
        Figure("DNS lookup, the proxy's part", "µs", Sample(tuple(over)), TARGET),
        Figure(f"DNS lookups, {FLIGHT} at a time, through the proxy", "/s", Sample(tuple(rates))),
        Figure(f"DNS lookups, {FLIGHT} at a time, directly", "/s", Sample(tuple(rates_direct))),
        Figure(f"of {asked} lookups over {KILLS} kill -9, failed", "", Sample((float(failed),)), 0.0),
        Figure("the same, later than 1 s", "", Sample((float(late),)), 0.0),
        Figure("the same, the longest", "s", Sample((longest,))),
    ]
