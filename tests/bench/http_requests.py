"""HTTP requests through Envoy against direct ones: latency, and requests per second.

Connections stay open. Client and server are an epoll loop each, so that the proxy's part shows.
"""

from __future__ import annotations

import os
import select
import socket
import time
from functools import partial
from pathlib import Path

from hive.lab import pods
from hive.lab.node import Lab
from tests.bench.stats import Figure, Row, Sample
from tests.node.agent.manifests import pod, write
from tests.support.agents import made
from tests.support.requests import PORT, PUBLIC, policy, shop
from tests.support.waiting import eventually

REQUESTS, FLIGHT, SECONDS = 2000, 32, 2.0
ASKED = b"GET /public/1 HTTP/1.1\r\nhost: shop\r\n\r\n"
END = b"\r\n\r\nfine"
SERVER = f"""
import select, socket
answer = b"HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\nfine"
listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
poll, open_ones, rests = select.epoll(), {{}}, {{}}
poll.register(listener, select.EPOLLIN)
while True:
    for number, _ in poll.poll():
        if number == listener.fileno():
            one, _ = listener.accept()
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            open_ones[one.fileno()] = one
            rests[one.fileno()] = b""
            poll.register(one, select.EPOLLIN)
            continue
        one = open_ones[number]
        try:
            data = one.recv(65536)
        except OSError:
            data = b""
        if not data:
            poll.unregister(one)
            open_ones.pop(number).close()
            continue
        *asked, rests[number] = (rests[number] + data).split(b"\\r\\n\\r\\n")
        one.sendall(answer * len(asked))
"""


def _connected(server: str) -> socket.socket:
    client = socket.create_connection((server, PORT), timeout=5)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def answered(server: str) -> bool:
    """Return whether a request gets the server's response."""
    with _connected(server) as client:
        client.sendall(ASKED)
        return _answer(client).startswith(b"HTTP/1.1 200")


def _answer(client: socket.socket) -> bytes:
    data = b""
    while not data.endswith(END):
        more = client.recv(4096)
        if not more:
            raise ConnectionError(f"ended after {data!r}")
        data += more
    return data


def latencies(server: str) -> float:
    """Return the median duration of sequential requests in µs."""
    took = []
    with _connected(server) as client:
        for _ in range(REQUESTS):
            began = time.perf_counter()
            client.sendall(ASKED)
            _answer(client)
            took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2] * 1e6


def throughput(server: str) -> float:
    """Return requests per second with this number in flight."""
    clients = {client.fileno(): client for client in (_connected(server) for _ in range(FLIGHT))}
    poll, done = select.epoll(), 0
    for number, client in clients.items():
        client.sendall(ASKED)
        poll.register(number, select.EPOLLIN)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for number, _ in poll.poll(0.2):
            _answer(clients[number])
            clients[number].sendall(ASKED)
            done += 1
    for client in clients.values():
        client.close()
    return done / SECONDS


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Compare requests through Envoy at ingress with those to a pod without HTTP rules."""
    over: list[float] = []
    took: tuple[list[float], list[float]] = ([], [])
    rates: tuple[list[float], list[float]] = ([], [])
    allowed = policy(PUBLIC)
    free = {**policy()["spec"]["ingress"][0], "fromEndpoints": [{"matchLabels": {"app": "free"}}]}
    allowed["spec"]["ingress"].append(free)
    with made(Lab(f"bench-http-{os.getpid()}")) as node, shop(node, folder, server=SERVER) as place:
        write(folder, "free", pod("free", {"app": "free"}))
        pods.add(node, "free")
        place.rule(allowed)
        with node.open_pod("free") as direct:
            server, ways = place.server.ipv4, (place.here, direct)
            for where in ways:
                eventually(partial(where.run, answered, server))
            eventually(lambda: place.ports)
            for _ in range(rounds):
                for at, where in enumerate(ways):
                    took[at].append(where.run(latencies, server))
                    rates[at].append(where.run(throughput, server))
                over.append(took[0][-1] - took[1][-1])
    return [
        Figure("HTTP request through Envoy", "µs", Sample(tuple(took[0]))),
        Figure("HTTP request directly", "µs", Sample(tuple(took[1]))),
        Figure("HTTP request, Envoy's part", "µs", Sample(tuple(over))),
        Figure(f"HTTP requests, {FLIGHT} at a time, through Envoy", "/s", Sample(tuple(rates[0]))),
        Figure(f"HTTP requests, {FLIGHT} at a time, directly", "/s", Sample(tuple(rates[1]))),
    ]
