"""A pod that reuses an address at once has its own identity and none of the earlier flows."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from hive.lab import pods
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab, LabError
from tests.node.agent.manifests import POLICY, labels_of, pod, write
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

PORT, SPORT = 7001, 40000
RANGE = "10.0.0.0/29"
"""With room for few pods, so that an address that is free is given away next."""


def bound(stack: ExitStack, where: Namespaces, port: int) -> socket.socket:
    with inside(where):
        found = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    found.bind(("", port))
    found.settimeout(0.2)
    return found


def heard(listener: socket.socket) -> set[bytes]:
    """What has come so far."""
    found = set()
    while True:
        try:
            found.add(listener.recv(100))
        except TimeoutError:
            return found


def test_a_pod_with_the_address_of_another_has_its_own_identity_at_once(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "policy", POLICY)
    write(tmp_path, "pods", *(pod(name, {"app": name}) for name in ("server", "client", "heir")))
    pid = serving(node, f"--manifests-dir={tmp_path}", f"--ipv4-range={RANGE}")
    server, client = pods.add(node, "server"), pods.add(node, "client")
    for number in range(8):
        try:
            pods.add(node, f"other-{number}")
        except LabError:
            break
    with ExitStack() as stack:
        listener = bound(stack, stack.enter_context(node.open_pod("server")), PORT)
        with node.open_pod("client") as at, ExitStack() as while_it_lives:
            sender = bound(while_it_lives, at, SPORT)
            eventually(lambda: sender.sendto(b"client", (server.ipv4, PORT)) and b"client" in heard(listener))
            listener.sendto(b"answer", (client.ipv4, SPORT))
            assert heard(sender) == {b"answer"}
        pods.delete(node, "client")
        heir = pods.add(node, "heir")
        assert heir.ipv4 == client.ipv4, "it was the only one that was free"
        again = bound(stack, stack.enter_context(node.open_pod("heir")), SPORT)
        for _ in range(10):
            again.sendto(b"heir", (server.ipv4, PORT))
        assert not heard(listener), "neither as the client, nor in its flow"
        write(tmp_path, "pods", pod("server", {"app": "server"}), pod("heir", {"app": "client"}))
        eventually(lambda: "k8s:app=client" in labels_of(pid, "heir"))
        eventually(lambda: again.sendto(b"heir", (server.ipv4, PORT)) and b"heir" in heard(listener))
