"""The traffic policy table of docs/operate/without-kube-proxy.md, checked by real connections."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hive.lab import pods
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.requests import send_requests
from tests.node.agent.named_servers import joined, served
from tests.node.agent.node_ports import BALANCER, ELSEWHERE, TARGET, give_addresses
from tests.support.agents import known_pods, serving
from tests.support.cgroups import unified
from tests.support.waiting import eventually
from tests.unit.services.documented import table

pytestmark = pytest.mark.node

ROWS = [tuple(row) for row in table()]
FIRST_PORT, FIRST_NODE_PORT = 8100, 30100
SERVERS = {"any": ["here", "there"], "local": ["here"]}
ASKED = 32


def vip(number: int) -> str:
    return f"10.96.1.{number + 1}"


def manifests(here: str) -> str:
    """A service for each row, with a backend here and one on another node."""
    found = ""
    for number, (external, internal, *_) in enumerate(ROWS):
        found += f"""
apiVersion: v1
kind: Service
metadata: {{name: web-{number}, namespace: shop}}
spec:
  type: LoadBalancer
  clusterIP: {vip(number)}
  clusterIPs: [{vip(number)}]
  externalTrafficPolicy: {external}
  internalTrafficPolicy: {internal}
  ports: [{{name: http, port: {FIRST_PORT + number}, nodePort: {FIRST_NODE_PORT + number}, protocol: TCP}}]
status: {{loadBalancer: {{ingress: [{{ip: {BALANCER}}}]}}}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-{number}, namespace: shop, labels: {{kubernetes.io/service-name: web-{number}}}}}
addressType: IPv4
endpoints: [{{addresses: [{here}], nodeName: here}}, {{addresses: [{ELSEWHERE[4]}], nodeName: there}}]
ports: [{{name: http, port: {TARGET}, protocol: TCP}}]
---"""
    return found


def test_each_traffic_policy_combination_selects_the_documented_backends(
    node: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "here")
    give_addresses(node)
    known_pods(tmp_path, "client", "server")
    serving(node, f"--manifests-dir={tmp_path}", "--kube-proxy-replacement=true")
    server = pods.add(node, "server")
    pods.add(node, "client")
    (tmp_path / "web.yaml").write_text(manifests(server.ipv4))
    group = unified() / f"hive-lab-{node.name}"
    with ExitStack() as stack:
        host, outside, client = (
            stack.enter_context(each) for each in (node.open(), node.open_outside(), node.open_pod("client"))
        )
        for name, place in (("here", stack.enter_context(node.open_pod("server"))), ("there", outside)):
            stack.callback(served(place, name).kill)

        def servers(who: str, to: tuple[str, int]) -> list[str]:
            """The backends that answered a client; an error does not count."""
            if who in ("pod, at the socket", "node"):
                found = (host if who == "node" else client).run(joined, group, *to)
            else:
                found = (outside if who == "outside" else client).run(send_requests, to, ASKED)
            assert found.failed == [], (who, to)
            return found.servers

        def lead(row: str, who: str, to: tuple[str, int], expected: list[str]) -> None:
            """Addresses of a service are served one after the other, and its backends are drawn."""

            def answers() -> bool:
                assert (row, who, to, servers(who, to)) == (row, who, to, expected)
                return True

            eventually(answers)

        for number, (external, internal, from_outside, from_inside, cluster) in enumerate(ROWS):
            north = (NODE_ADDRESS, FIRST_NODE_PORT + number), (BALANCER, FIRST_PORT + number)
            row = f"{external}, {internal}"
            for to in north:
                lead(row, "outside", to, SERVERS[from_outside])
            for who in ("pod", "pod, at the socket", "node"):
                for to in north:
                    lead(row, who, to, SERVERS[from_inside])
                lead(row, who, (vip(number), FIRST_PORT + number), SERVERS[cluster])
