"""The node itself does what policies with a nodeSelector allow: over a restart, and as its labels change."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.flows import tcp_listener
from tests.node.agent.test_pod_labels import write
from tests.support.agents import known_pods, serving
from tests.support.town import connects
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def allowing(port: int) -> dict[str, Any]:
    ports = [{"ports": [{"port": str(port), "protocol": "TCP"}]}]
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": {"name": "guarded"},
        "spec": {
            "nodeSelector": {"matchLabels": {"guarded": "yes"}},
            "ingress": [{"fromEntities": ["all"], "toPorts": ports}],
        },
    }


def this_node(guarded: str) -> dict[str, Any]:
    metadata = {"name": socket.gethostname(), "labels": {"guarded": guarded}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def audit(pid: int, endpoint: int, mode: str) -> None:
    """As ``hive endpoint config`` does."""
    path, options = f"/v1/endpoint/{endpoint}/config", {"options": {"PolicyAuditMode": mode}}
    ask(path, api_socket(pid), method="PATCH", body=options)
    assert ask(path, api_socket(pid))["realized"]["options"]["PolicyAuditMode"] == mode


def host_endpoint(pid: int) -> dict[str, Any]:
    (found,) = (one for one in ask("/v1/endpoint", api_socket(pid)) if one["status"]["identity"]["id"] == 1)
    assert isinstance(found, dict)
    return found


def test_a_node_is_reached_as_the_policies_that_select_it_say(node: Lab, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "node", this_node("yes"))
    settings = ("--enable-host-firewall=true", f"--manifests-dir={manifests}")
    known_pods(manifests, "pod")
    pid = serving(node, *settings)
    pod = pods.add(node, "pod")
    with node.open() as here, node.open_outside() as outside, node.open_pod(pod.pod) as inside_pod:
        with inside(here):
            listeners = [tcp_listener(), tcp_listener()]
        open_port, closed_port = (each.getsockname()[1] for each in listeners)
        try:

            def reached(port: int) -> tuple[bool, bool]:
                """From outside, and from a pod."""
                return tuple(  # type: ignore[return-value]  # of two
                    each.run(partial(connects, NODE_ADDRESS, port)) for each in (outside, inside_pod)
                )

            assert reached(closed_port) == (True, True)
            write(manifests, "policy", allowing(open_port))
            eventually(lambda: reached(closed_port) == (False, False))
            assert reached(open_port) == (True, True)
            shown = host_endpoint(pid)
            assert shown["status"]["state"] == "ready"
            assert set(shown["status"]["identity"]["labels"]) == {"k8s:guarded=yes", "reserved:host"}
            assert shown["status"]["policy"]["realized"]["policy-enabled"] == "ingress"
            assert ask("/v1/healthz", api_socket(pid))["host-firewall"]["mode"] == "Enabled"

            audit(pid, shown["id"], "Enabled")
            assert reached(closed_port) == (True, True), "only told"
            audit(pid, shown["id"], "Disabled")
            assert reached(closed_port) == (False, False)
            with pytest.raises(click.ClickException, match="is the node itself"):
                ask(f"/v1/endpoint/{shown['id']}", api_socket(pid), method="DELETE")

            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert reached(closed_port) == (False, False), "while no agent runs"
            pid = serving(node, *settings)
            assert reached(closed_port) == (False, False)
            eventually(lambda: "k8s:guarded=yes" in host_endpoint(pid)["status"]["identity"]["labels"])
            assert host_endpoint(pid)["id"] == shown["id"]

            write(manifests, "node", this_node("no"))
            eventually(lambda: reached(closed_port) == (True, True))
        finally:
            for each in listeners:
                each.close()
