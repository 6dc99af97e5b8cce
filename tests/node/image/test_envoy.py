"""HTTP rules after an install: by the chart's Envoy pod, or by the agent's image alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.support import chart
from tests.support.bare_node import VALUES, bare_node, create
from tests.support.requests import PORT, answering, ask_http
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

POLICY = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "requests", "namespace": "default"},
    "spec": {
        "endpointSelector": {},
        "ingress": [
            {
                "fromEntities": ["all"],
                "toPorts": [
                    {
                        "ports": [{"port": str(PORT), "protocol": "TCP"}],
                        "rules": {"http": [{"path": "/public/.*"}]},
                    }
                ],
            }
        ],
    },
}


IMAGE = {"image": {"tag": "0.1.0-envoy"}}
"""The image with Envoy serves for all; for Envoy it is the chart's default."""


@pytest.mark.parametrize("beside", [True, False], ids=["a-pod-of-its-own", "the-agent-starts-it"])
def test_http_rules_are_enforced(node: Lab, envoy_image: Path, tmp_path: Path, beside: bool) -> None:
    """By what the chart renders by default, or without its DaemonSet by the Envoy of the agent's image."""
    values: dict[str, Any] = VALUES | IMAGE | {"operator": {"replicas": 1, **IMAGE}}
    if not beside:
        values |= {"envoy": {"enabled": False}}
    objects: dict[str, Any] = chart.objects(values)
    with bare_node(node, tmp_path, envoy_image) as kubelet, node.open() as host:
        for name in ("cilium-config", *(["cilium-envoy-config"] if beside else [])):
            kubelet.config_maps[name] = dict(objects[f"ConfigMap/{name}"]["data"])
        agent = kubelet.pod("cilium-x", objects["DaemonSet/cilium"]["spec"]["template"])
        operator = kubelet.pod("cilium-operator-x", objects["Deployment/cilium-operator"]["spec"]["template"])
        for name in agent.init:
            agent.run(name)
        with ExitStack() as running:
            running.enter_context(operator.running("cilium-operator"))
            running.enter_context(agent.running("cilium-agent"))
            eventually(node.cni_conf.exists)
            first = pods.add(node, "first")
            pods.add(node, "second")
            if beside:
                eventually(lambda: host.run(os.path.exists, "/run/cilium/envoy/listeners.json"))
                envoy = kubelet.pod("cilium-envoy-x", objects["DaemonSet/cilium-envoy"]["spec"]["template"])
                running.enter_context(envoy.running("cilium-envoy"))
                eventually(
                    lambda: host.run(ask_http, "127.0.0.1", "/healthz", "GET", None, 9878).status == 200
                )
            with node.open_pod("first") as there, node.open_pod("second") as here, answering(there):
                eventually(lambda: here.run(ask_http, first.ipv4, "/secret").status == 200)
                path = "/apis/cilium.io/v2/namespaces/default/ciliumnetworkpolicies"
                ca = tmp_path / "account" / "ca.crt"
                assert host.run(create, kubelet.env, ca, path, POLICY) == 201
                eventually(lambda: here.run(ask_http, first.ipv4, "/secret").status == 403)
                assert here.run(ask_http, first.ipv4, "/public/1").status == 200
                if beside:
                    metrics = host.run(ask_http, "127.0.0.1", "/metrics", "GET", None, 9964)
                    assert "envoy_http_downstream_rq" in metrics.body
        pods.delete(node, "first")
        pods.delete(node, "second")
