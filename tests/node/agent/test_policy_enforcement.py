"""Policy is asked for every packet: a change cuts an open connection, an entry that allows it restores it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cells.maps.map import open_map
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import MetricsKey, MetricsValue
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.probe import ping
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

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
        """Whether everything sent has arrived, in order."""
        with suppress(BlockingIOError):
            self._received += self._server.recv(4096)
        assert self._sent.startswith(self._received)
        return self._received == self._sent


@contextmanager
def conversation(lab: Lab, client: pods.Attached, server: pods.Attached) -> Iterator[Conversation]:
    """A connection that has carried a byte."""
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
    """Sent, and received: what was lost before is sent again by the kernel, after a growing pause."""
    talk.override()
    eventually(lambda: talk.is_through)


def is_cut(lab: Lab, talk: Conversation) -> None:
    """The next message is dropped by policy."""
    before = denied(lab)
    talk.override()
    eventually(lambda: denied(lab) > before)
    assert not talk.is_through


def is_cut_soon(lab: Lab, talk: Conversation) -> None:
    """Likewise of what is sent from some moment on: the datapath sees manual edits once a second."""
    before = denied(lab)

    def dropped() -> bool:
        talk.override()
        return denied(lab) > before

    eventually(dropped)
    talk.override()
    assert not talk.is_through


def denied(lab: Lab, reason: int = POLICY_DENIED) -> int:
    """Packets the datapath has dropped since policy denied them."""
    with lab.open() as node:
        return node.run(_denied, reason)


def _denied(reason: int) -> int:
    with open_map(GLOBALS / "cilium_metrics") as metrics:
        rows = [(MetricsKey.unpack(key), MetricsValue.unpack(value)) for key, value in metrics.items()]
    return sum(value.packets for key, value in rows if key.reason == reason)


def _put(endpoint: int, key: PolicyKey) -> None:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        policy.update(key.pack(), PolicyEntry().pack(key))


def _take(endpoint: int, key: PolicyKey) -> None:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        assert policy.delete(key.pack())


def _entries(endpoint: int) -> set[PolicyKey]:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        return {PolicyKey.unpack(key) for key, _ in policy.items()}


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
    """Endpoint number and identity of every address."""
    return {
        one["status"]["networking"]["addressing"][0]["ipv4"]: (one["id"], one["status"]["identity"]["id"])
        for one in ask("/v1/endpoint", api_socket(pid))
    }


def test_a_policy_change_cuts_an_open_connection_and_a_manual_entry_restores_it(node: Lab) -> None:
    pid = serving(node)
    client, server = pods.add(node, "client"), pods.add(node, "server")
    known = numbers(pid)
    (client_id, client_identity), (server_id, server_identity) = known[client.ipv4], known[server.ipv4]
    out, back = PolicyKey(server_identity, egress=True), PolicyKey(client_identity, egress=False)
    with conversation(node, client, server) as talk:
        assert enforce(pid, "always") == 200
        is_cut(node, talk)
        assert ask("/v1/config", api_socket(pid))["spec"]["policy-enforcement"] == "always"
        with node.open() as run:
            run.run(_put, client_id, out)
            run.run(_put, server_id, back)
            flows(talk)
            run.run(_take, client_id, out)
            run.run(_take, server_id, back)
        is_cut_soon(node, talk)
        assert enforce(pid, "default") == 200
        flows(talk)


def test_a_new_pod_is_denied_as_the_others_and_the_node_may_come_in_if_it_may(node: Lab) -> None:
    pid = serving(node, "--enable-policy=always", "--allow-localhost=always")
    one, other = pods.add(node, "one"), pods.add(node, "other")
    host = PolicyKey(identity=1, egress=False)
    with node.open() as run:
        for number, _ in numbers(pid).values():
            assert run.run(_entries, number) == {host}
        assert run.run(ping, one.ipv4, 1)
    with node.open_pod("other") as inside_other:
        assert not inside_other.run(ping, one.ipv4, 1)
    assert enforce(pid, "never") == 200
    with node.open_pod("one") as inside_one:
        assert inside_one.run(ping, other.ipv4, 1)


def test_a_foreign_entry_goes_with_the_full_reconciliation(node: Lab) -> None:
    pid = serving(node, "--policy-map-full-reconciliation-interval=200ms")
    pod = pods.add(node, "pod")
    number, _ = numbers(pid)[pod.ipv4]
    foreign = PolicyKey(identity=4711, egress=True)
    with node.open() as run:
        ours = run.run(_entries, number)
        run.run(_put, number, foreign)
        eventually(lambda: run.run(_entries, number) == ours)
