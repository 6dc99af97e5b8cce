"""TCP connections of pods that a policy cuts or does not affect."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cells.maps.map import open_map
from cells.maps.records.flows import MetricsKey, MetricsValue
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import tcp_listener
from tests.support.waiting import eventually

GLOBALS = Path("/sys/fs/bpf/tc/globals")
POLICY_DENIED, DENIED_BY_RULE = 133, 181


class Conversation:
    """An open TCP connection between two pods; both ends are in this process."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client = client
        self._server = server
        self._sent = b""
        self._received = b""
        client.setblocking(False)
        server.setblocking(False)

    def override(self) -> None:
        """Send one more byte."""
        byte = bytes([len(self._sent) % 256])
        self._client.send(byte)
        self._sent += byte

    @property
    def is_through(self) -> bool:
        """Return whether everything sent has arrived, in order."""
        with suppress(BlockingIOError):
            self._received += self._server.recv(4096)
        assert self._sent.startswith(self._received)
        return self._received == self._sent


@contextmanager
def conversation(lab: Lab, client: pods.Attached, server: pods.Attached) -> Iterator[Conversation]:
    """Open a connection and send a byte over it."""
    with lab.open_pod(client.pod) as calling, lab.open_pod(server.pod) as called:
        with inside(called):
            listener = tcp_listener()
        with inside(calling):
            outgoing = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with listener, outgoing:
            outgoing.settimeout(30)
            outgoing.connect((server.ipv4, listener.getsockname()[1]))
            outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.settimeout(30)
            incoming, _ = listener.accept()
            with incoming:
                open_one = Conversation(outgoing, incoming)
                flows(open_one)
                yield open_one


def flows(talk: Conversation) -> None:
    """Send and wait for arrival: the kernel retransmits earlier losses after a growing pause."""
    talk.override()
    eventually(lambda: talk.is_through)


def is_cut(lab: Lab, talk: Conversation) -> None:
    """Check that policy drops the next message."""
    before = denied(lab)
    talk.override()
    eventually(lambda: denied(lab) > before)
    assert not talk.is_through


def denied(lab: Lab, reason: int = POLICY_DENIED) -> int:
    """Return the number of packets that the datapath dropped because policy denied them."""
    with lab.open() as node:
        return node.run(_denied, reason)


def _denied(reason: int) -> int:
    with open_map(GLOBALS / "cilium_metrics") as metrics:
        rows = [(MetricsKey.unpack(key), MetricsValue.unpack(value)) for key, value in metrics.items()]
    return sum(value.packets for key, value in rows if key.reason == reason)


def enforce(pid: int, mode: str) -> int:
    """PATCH the agent's configuration as the command line client does: all of it, with one change."""
    path = api_socket(pid)
    spec = ask("/v1/config", path)["spec"]
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.connect(str(path))
        body = json.dumps(spec | {"policy-enforcement": mode})
        connection.request("PATCH", "/v1/config", body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def numbers(pid: int) -> dict[str, tuple[int, int]]:
    """Return endpoint id and identity of every address."""
    return {
        one["status"]["networking"]["addressing"][0]["ipv4"]: (one["id"], one["status"]["identity"]["id"])
        for one in ask("/v1/endpoint", api_socket(pid))
    }
