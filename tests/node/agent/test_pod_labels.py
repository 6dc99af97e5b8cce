"""Pods of a folder of manifests: their labels make identities, which policies select."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.conversations import DENIED_BY_RULE, conversation, denied, flows, is_cut
from tests.node.agent.manifests import POLICY, _enforcement, labels_of, pod, write
from tests.support.agents import known_pods, serving, terminated
from tests.support.traffic import lossless_traffic
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def test_a_policy_by_labels_cuts_a_flow_and_a_label_lets_it_go_on(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "server", pod("server", {"app": "server"}))
    write(tmp_path, "client", pod("client", {"app": "other", "pod-template-hash": "1"}))
    pid = serving(node, f"--manifests-dir={tmp_path}")
    client, server = pods.add(node, "client"), pods.add(node, "server")
    assert {"k8s:app=other", "k8s:io.cilium.k8s.policy.serviceaccount=default"} <= labels_of(pid, "client")
    assert not any("pod-template-hash" in label for label in labels_of(pid, "client"))
    with conversation(node, client, server) as talk:
        write(tmp_path, "policy", POLICY)
        eventually(lambda: ask("/v1/endpoint", api_socket(pid)) and _enforced(pid, "server"))
        is_cut(node, talk)
        write(tmp_path, "client", pod("client", {"app": "client"}))
        flows(talk)
        assert "k8s:app=client" in labels_of(pid, "client")
        write(tmp_path, "client", pod("client", {"app": "client", "tier": "front"}))
        eventually(lambda: "k8s:tier=front" in labels_of(pid, "client"))
        flows(talk)
        namespace = {"name": "default", "labels": {"team": "blue"}}
        write(tmp_path, "namespace", {"apiVersion": "v1", "kind": "Namespace", "metadata": namespace})
        blue = "k8s:io.cilium.k8s.namespace.labels.team=blue"
        eventually(lambda: blue in labels_of(pid, "client") & labels_of(pid, "server"))
        flows(talk)
        assert terminated(node, pid) == 0
        pid = serving(node, f"--manifests-dir={tmp_path}")
        flows(talk)
        write(tmp_path, "client", pod("client", {"app": "other"}))
        is_cut_by(node, pid, talk)
    pods.add(node, "late")
    with node.open_pod("late") as inside:
        assert not inside.run(ping, server.ipv4, 1)
        write(tmp_path, "late", pod("late", {"app": "client"}))
        eventually(lambda: "k8s:app=client" in labels_of(pid, "late"))
        eventually(lambda: inside.run(ping, server.ipv4, 1))
    write(tmp_path, "new", pod("new", {"app": "client", "version": "2"}))
    eventually(lambda: "new.yaml" in str(ask("/statedb/dump/manifests", api_socket(pid))))
    pods.add(node, "new")
    with node.open_pod("new") as inside:
        assert inside.run(ping, server.ipv4, 1), "a policy knows the new identity before the pod sends"


BLUE = {
    **POLICY,
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "server"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"io.cilium.k8s.namespace.labels.team": "blue"}}]}],
    },
}


def test_labels_of_a_namespace_cut_a_flow_and_let_it_go_on(node: Lab, tmp_path: Path) -> None:
    def namespace(team: str) -> None:
        metadata = {"name": "default", "labels": {"team": team}}
        write(tmp_path, "namespace", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    namespace("blue")
    for name in ("server", "client"):
        write(tmp_path, name, pod(name, {"app": name}))
    write(tmp_path, "policy", BLUE)
    pid = serving(node, f"--manifests-dir={tmp_path}")
    client, server = pods.add(node, "client"), pods.add(node, "server")
    eventually(lambda: _enforced(pid, "server"))
    with conversation(node, client, server) as talk:
        flows(talk)
        for _ in range(2):
            namespace("red")
            eventually(lambda: "k8s:io.cilium.k8s.namespace.labels.team=red" in labels_of(pid, "client"))
            is_cut(node, talk)
            namespace("blue")
            flows(talk)


INIT_POLICY = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumClusterwideNetworkPolicy",
    "metadata": {"name": "init"},
    "spec": {
        "endpointSelector": {"matchLabels": {"reserved:init": ""}},
        "ingress": [{"fromEntities": ["all"]}],
        "egress": [{"toEntities": ["all"]}],
    },
}


def test_a_pod_without_an_object_is_closed_until_that_comes(node: Lab, tmp_path: Path) -> None:
    known_pods(tmp_path, "server")
    pid = serving(node, f"--manifests-dir={tmp_path}")
    server, late = pods.add(node, "server"), pods.add(node, "late")
    assert labels_of(pid, "late") == {"reserved:init"}
    with node.open_pod("late") as inside, node.open_pod("server") as other:
        assert not inside.run(ping, server.ipv4, 1)
        assert not inside.run(ping, OUTSIDE_ADDRESS, 1)
        assert not other.run(ping, late.ipv4, 1)
        write(tmp_path, "init", INIT_POLICY)
        eventually(lambda: inside.run(ping, server.ipv4, 1) and other.run(ping, late.ipv4, 1))
        (tmp_path / "init.yaml").unlink()
        eventually(lambda: not inside.run(ping, server.ipv4, 1))
        assert terminated(node, pid) == 0
        pid = serving(node, f"--manifests-dir={tmp_path}")
        assert labels_of(pid, "late") == {"reserved:init"}
        assert not inside.run(ping, server.ipv4, 1)
        write(tmp_path, "late", pod("late", {"app": "late"}))
        eventually(lambda: "k8s:app=late" in labels_of(pid, "late"))
        eventually(lambda: inside.run(ping, server.ipv4, 1) and other.run(ping, late.ipv4, 1))


def test_networks_select_this_node_where_that_is_asked_for(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "client", pod("client", {"app": "client"}))
    spec = {
        "endpointSelector": {"matchLabels": {"app": "client"}},
        "egress": [{"toCIDR": ["192.168.50.0/24"]}],
    }
    write(tmp_path, "policy", {**POLICY, "spec": spec})
    pid = serving(node, f"--manifests-dir={tmp_path}")
    pods.add(node, "client")
    eventually(lambda: _enforcement(pid, "client") == "egress")
    with node.open_pod("client") as inside:
        eventually(lambda: inside.run(ping, OUTSIDE_ADDRESS, 1, 0.3))
        assert not inside.run(ping, NODE_ADDRESS, 1, 0.3)
        assert terminated(node, pid) == 0
        serving(node, f"--manifests-dir={tmp_path}", "--policy-cidr-match-mode=nodes")
        eventually(lambda: inside.run(ping, NODE_ADDRESS, 1, 0.3))
        eventually(lambda: inside.run(ping, OUTSIDE_ADDRESS, 1, 0.3))


def test_networks_select_pods_where_that_is_asked_for(node: Lab, tmp_path: Path) -> None:
    """As upstream's specs of ipBlock have it: a network with an exception, and another rule that opens it."""
    pid = serving(node, f"--manifests-dir={tmp_path}", "--policy-cidr-match-mode=pods")
    for name in ("client", "server", "other"):
        write(tmp_path, name, pod(name, {"app": name}))
    server, other, _ = (pods.add(node, name) for name in ("server", "other", "client"))
    network = str(ip_network(f"{server.ipv4}/16", strict=False))

    def blocks(*rules: dict[str, Any]) -> dict[str, Any]:
        spec = {
            "podSelector": {"matchLabels": {"app": "client"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": one}]} for one in rules],
        }
        metadata = {"name": "blocks", "namespace": "default"}
        return {
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec
        }  # fmt: skip

    def agreed(inside: Any, reached: bool) -> bool:
        """Whether packets and the explanation say so of the server, and the other pod is reached."""
        query = "source=default/client&destination=default/server&port=80&protocol=TCP"
        found = ask(f"/hive/policy/explain?{query}", api_socket(pid))
        return (
            bool(inside.run(ping, server.ipv4, 1, 0.3)) is reached
            and found["allowed"] is reached
            and bool(inside.run(ping, other.ipv4, 1, 0.3))
        )

    without = {"cidr": network, "except": [f"{server.ipv4}/32"]}
    with node.open_pod("client") as inside:
        write(tmp_path, "policy", blocks({"cidr": network}))
        eventually(lambda: _enforcement(pid, "client") == "egress" and agreed(inside, True))
        write(tmp_path, "policy", blocks(without))
        eventually(lambda: agreed(inside, False))
        write(tmp_path, "policy", blocks(without, {"cidr": f"{server.ipv4}/32"}))
        eventually(lambda: agreed(inside, True))
        assert terminated(node, pid) == 0
        pid = serving(node, f"--manifests-dir={tmp_path}")
        eventually(lambda: not inside.run(ping, server.ipv4, 1, 0.3))


STRICT = {
    **POLICY,
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "server"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"app": one}}]} for one in ("client", "front")],
        "egress": [{"toEndpoints": [{"matchLabels": {"app": "client"}}, {"matchLabels": {"app": "front"}}]}],
    },
}
"""Allows what two labels select by a rule for each: no entry for one identity holds for the other."""


def test_no_packet_is_lost_while_identities_change_that_stay_allowed(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "server", pod("server", {"app": "server"}))
    write(tmp_path, "client", pod("client", {"app": "client"}))
    write(tmp_path, "policy", STRICT)
    pid = serving(node, f"--manifests-dir={tmp_path}")
    client, server = pods.add(node, "client"), pods.add(node, "server")
    eventually(lambda: _enforcement(pid, "server") == "both")
    before = denied(node)
    with (
        node.open_pod("client") as calling,
        node.open_pod("server") as called,
        lossless_traffic(calling, called, server.ipv4),
        lossless_traffic(called, calling, client.ipv4),
    ):
        for turn in range(3):
            app = "front" if turn % 2 == 0 else "client"
            write(tmp_path, "client", pod("client", {"app": app, "turn": str(turn)}))
            eventually(lambda turn=turn: f"k8s:turn={turn}" in labels_of(pid, "client"))  # type: ignore[misc]
            write(tmp_path, "server", pod("server", {"app": "server", "turn": str(turn)}))
            eventually(lambda turn=turn: f"k8s:turn={turn}" in labels_of(pid, "server"))  # type: ignore[misc]
        namespace = {"name": "default", "labels": {"team": "blue"}}
        write(tmp_path, "namespace", {"apiVersion": "v1", "kind": "Namespace", "metadata": namespace})
        blue = "k8s:io.cilium.k8s.namespace.labels.team=blue"
        eventually(lambda: blue in labels_of(pid, "client") & labels_of(pid, "server"))
    assert denied(node) == before


def _enforced(pid: int, pod_name: str) -> bool:
    return _enforcement(pid, pod_name) == "ingress"


def is_cut_by(node: Lab, pid: int, talk: Any) -> None:
    eventually(lambda: "k8s:app=other" in labels_of(pid, "client"))
    is_cut(node, talk)


def quarantine(role: str) -> dict[str, Any]:
    """A policy that denies the pod what its flow began with."""
    denied = (
        {"egressDeny": [{"toEntities": ["all"]}]}
        if role == "client"
        else {"ingressDeny": [{"fromEntities": ["all"]}]}
    )
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "quarantine", "namespace": "default"},
        "spec": {"endpointSelector": {"matchLabels": {"app": role}}, **denied},
    }


@contextmanager
def opened(
    lab: Lab, kind: socket.SocketKind, server: pods.Attached
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of a flow of "client" to "server": the client's, and the server's."""
    with lab.open_pod("client") as calling, lab.open_pod("server") as called, ExitStack() as stack:
        with inside(called):
            listener = stack.enter_context(socket.socket(socket.AF_INET, kind))
        with inside(calling):
            client = stack.enter_context(socket.socket(socket.AF_INET, kind))
        listener.bind(("", 0))
        for each in (client, listener):
            each.settimeout(30)
        if kind is socket.SOCK_STREAM:
            listener.listen()
        client.connect((server.ipv4, listener.getsockname()[1]))
        client.send(b"?")
        if kind is socket.SOCK_STREAM:
            answering = stack.enter_context(listener.accept()[0])
            answering.settimeout(30)
            answering.recv(1)
        else:
            answering = listener
            listener.connect(listener.recvfrom(1)[1])
        yield client, answering


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_deny_rule_ends_a_flow_with_continuing_replies(
    node: Lab, tmp_path: Path, kind: socket.SocketKind, role: str
) -> None:
    write(tmp_path, "pods", *(pod(name, {"app": name}) for name in ("client", "server")))
    serving(node, f"--manifests-dir={tmp_path}")
    pods.add(node, "client")
    server = pods.add(node, "server")
    with opened(node, kind, server) as (client, answering):
        answering.send(b"1")
        assert client.recv(100) == b"1"
        before = denied(node, DENIED_BY_RULE)
        write(tmp_path, "policy", quarantine(role))

        def in_force() -> bool:
            client.send(b"?")
            return denied(node, DENIED_BY_RULE) > before

        eventually(in_force)
        client.settimeout(0.2)
        for _ in range(10):
            answering.send(b"2")
            with pytest.raises(TimeoutError):
                client.recv(100)
        (tmp_path / "policy.yaml").unlink()

        def answered() -> bool:
            answering.send(b"3")
            return bool(select.select([client], [], [], 0.2)[0])

        eventually(answered)
