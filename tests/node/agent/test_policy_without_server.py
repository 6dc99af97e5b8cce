"""Policies stay in force while the API server is down."""

from __future__ import annotations

from typing import Any

import click
import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.conversations import Conversation, conversation, enforce, flows, is_cut, numbers
from tests.node.agent.served import NEXT_TRY, NODE, POLICIES, Server, reaches, server, states
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

__all__ = ["server"]

NETWORK_POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"


def policy(client: str) -> dict[str, Any]:
    """Only this one reaches the server."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "server", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "server"}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": client}}}]}],
        },
    }


def changed(pid: int, path: str, body: object) -> str:
    """What a PATCH is refused with; empty when it is done."""
    try:
        ask(path, api_socket(pid), body=body, method="PATCH")
    except click.ClickException as error:
        return error.message
    return ""


def test_policies_hold_while_the_api_server_is_away(
    node: Lab, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    server.ask("POST", NETWORK_POLICIES, policy("client"))
    server.ask("DELETE", f"{POLICIES}/server")
    pid = serving(node, *server.settings)
    target, client, free = (pods.add(node, one) for one in ("server", "client", "stranger"))

    def holds(talk: Conversation) -> None:
        """An open flow, new ones that a policy allows, and that none forbids; and one that is denied."""
        flows(talk)
        assert reaches(node, "client", target.ipv4, 10)
        assert reaches(node, "client", free.ipv4, 10)
        assert not reaches(node, "stranger", target.ipv4)

    with conversation(node, client, target) as talk:
        holds(talk)
        server.kill()
        holds(talk)
        assert enforce(pid, "always") == 200, "the rules are known: it can follow"
        assert not reaches(node, "client", free.ipv4)
        assert enforce(pid, "default") == 200
        holds(talk)

        agent_process.crash(node)
        holds(talk)
        pid = serving(node, *server.settings)
        holds(talk)
        for mode in ("always", "never"):
            spoken = changed(pid, "/v1/config", {"policy-enforcement": mode})
            assert "policy enforcement not changed: 3 restored endpoints keep their policies" in spoken
            assert "networkpolicies" in spoken
        assert ask("/v1/config", api_socket(pid))["spec"]["policy-enforcement"] == "default"
        holds(talk)
        for number, _ in numbers(pid).values():  # has it built anew, as whatever is put right in the kernel
            options = {"options": {"SourceIPVerification": "Disabled"}}
            assert not changed(pid, f"/v1/endpoint/{number}/config", options)
        holds(talk)

        server.start()
        server.ask("POST", NETWORK_POLICIES, policy("stranger"))
        server.ask("DELETE", f"{POLICIES}/server")
        eventually(lambda: reaches(node, "stranger", target.ipv4), within=NEXT_TRY)
        eventually(lambda: states(pid) == {"ready"}, within=NEXT_TRY)
        eventually(lambda: not reaches(node, "client", target.ipv4), within=NEXT_TRY)
        assert reaches(node, "stranger", target.ipv4, 10)
        is_cut(node, talk)
        assert reaches(node, "client", free.ipv4, 10)
        assert enforce(pid, "always") == 200
        assert not reaches(node, "client", free.ipv4)
