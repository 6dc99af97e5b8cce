"""Policy applies to every packet: a change cuts an open connection, and allowing it restores it."""

from __future__ import annotations

import pytest

from cells.maps.map import open_map
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.conversations import (
    GLOBALS,
    Conversation,
    conversation,
    denied,
    enforce,
    flows,
    is_cut,
    numbers,
)
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def is_cut_soon(lab: Lab, talk: Conversation) -> None:
    """Likewise of what is sent from some moment on: the datapath sees manual edits once a second."""
    before = denied(lab)

    def dropped() -> bool:
        talk.override()
        return denied(lab) > before

    eventually(dropped)
    talk.override()
    assert not talk.is_through


def _put(endpoint: int, key: PolicyKey) -> None:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        policy.update(key.pack(), PolicyEntry().pack(key))


def _take(endpoint: int, key: PolicyKey) -> None:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        assert policy.delete(key.pack())


def _entries(endpoint: int) -> set[PolicyKey]:
    with open_map(GLOBALS / f"cilium_policy_{endpoint:05d}") as policy:
        return {PolicyKey.unpack(key) for key, _ in policy.items()}


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
