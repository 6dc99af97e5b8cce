"""Clients of a service, outside and in pods, while agents of two builds alternate: no request fails."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from hive.lab import agent_process, pods
from hive.lab.children import Child
from hive.lab.demo.upgrade import second_build
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import answer, send_requests, send_until_stopped
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

TURNS = int(os.environ.get("SOAK_UPGRADES", "6"))
"""Every other one is killed on its way, too."""
SEED = int(os.environ.get("SOAK_SEED", "1"))

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 + 20 * TURNS)]

VIP, PORT, NODE_PORT = "10.96.0.10", 80, 30080


def manifests(*backends: str) -> str:
    endpoints = ", ".join(f"{{addresses: [{ip}]}}" for ip in backends)
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{type: NodePort, clusterIP: {VIP}, clusterIPs: [{VIP}],
  ports: [{{name: http, port: {PORT}, nodePort: {NODE_PORT}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
endpoints: [{endpoints}]
ports: [{{name: http, port: 8080}}]
"""


def test_services_go_on_while_agents_of_two_builds_take_turns(node: Lab, tmp_path: Path) -> None:
    settings = (f"--manifests-dir={tmp_path}", "--enable-node-port=true", "--enable-l7-proxy=false")
    began = time.monotonic()
    known_pods(tmp_path, "client", "one", "two")
    serving(node, *settings)
    start, moments = time.monotonic() - began, random.Random(SEED)  # noqa: S311  (a fixed sequence)
    client, one, two = (pods.add(node, name) for name in ("client", "one", "two"))
    (tmp_path / "web.yaml").write_text(manifests(one.ipv4, two.ipv4))
    builds = ((f"--datapath-object={second_build(node)}",), ())
    children: list[Child[Any]] = []
    with (
        node.open_pod(client.pod) as calling,
        node.open_outside() as outside,
        node.open_pod("one") as first,
        node.open_pod("two") as second,
    ):
        try:
            for name, place in (("one", first), ("two", second)):
                with inside(place):
                    listener = tcp_listener(port=8080)
                with listener:
                    children.append(place.start(answer, listener, name))
            for place, target in ((calling, (VIP, PORT)), (outside, (NODE_ADDRESS, NODE_PORT))):
                eventually(lambda: place.run(send_requests, target, 40).servers == ["one", "two"])  # noqa: B023
            asking = [
                calling.start(send_until_stopped, (VIP, PORT), 0.002),
                outside.start(send_until_stopped, (NODE_ADDRESS, NODE_PORT), 0.002),
            ]
            children += asking
            for turn in range(TURNS):
                agent_process.crash(node)
                build = builds[turn % 2]
                if turn % 4 > 1:
                    agent_process.start(node, *settings, *build)
                    time.sleep(moments.uniform(0, start))
                    agent_process.crash(node)
                serving(node, *settings, *build)
            asked = [child.finish(within=30) for child in asking]
        finally:
            for child in children:
                child.kill()
    for found in asked:
        assert found.failed == []
        assert found.servers == ["one", "two"]
