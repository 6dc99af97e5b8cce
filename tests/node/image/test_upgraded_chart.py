"""An upgrade from the first chart with running pods, from the image, as the charts render it."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.integration.deploy.rendered import CONFIG, OLDER
from tests.support import chart
from tests.support.bare_node import bare_node
from tests.support.kubelet import Kubelet, KubePod
from tests.support.traffic import lossless_traffic
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]


RANGE = ip_network("10.20.0.0/26")
"""That the operator gives the first node."""


def deployed(kubelet: Kubelet, name: str, settings: dict[str, str]) -> tuple[KubePod, KubePod]:
    """The pods of agent and operator of a release, with these settings."""
    objects: dict[str, Any] = chart.objects(OLDER["values"])
    kubelet.config_maps["cilium-config"] = settings
    agent = kubelet.pod(f"cilium-{name}", objects["DaemonSet/cilium"]["spec"]["template"])
    template = objects["Deployment/cilium-operator"]["spec"]["template"]
    return agent, kubelet.pod(f"cilium-operator-{name}", template)


def test_pods_keep_addresses_and_flows_over_an_upgrade_of_the_chart(
    node: Lab, image: Path, tmp_path: Path
) -> None:
    with bare_node(node, tmp_path, image) as kubelet:
        agent, operator = deployed(kubelet, "older", dict(OLDER["objects"][CONFIG]["data"]))
        for name in agent.init:
            agent.run(name)
        with operator.running("cilium-operator"), agent.running("cilium-agent"):
            eventually(node.cni_conf.exists, within=60)
            first, second = pods.add(node, "first"), pods.add(node, "second")
            assert ip_address(first.ipv4) in RANGE
        listed = ("hive", "endpoint", "list", "-o", "json")
        agent, operator = deployed(kubelet, "newer", chart.objects(OLDER["values"])[CONFIG]["data"])
        with (
            node.open_pod("first") as source,
            node.open_pod("second") as target,
            lossless_traffic(source, target, second.ipv4),
        ):
            for name in agent.init:
                agent.run(name)
            with operator.running("cilium-operator"), agent.running("cilium-agent"):
                eventually(lambda: first.ipv4 in agent.exec("cilium-agent", *listed), within=60)
                eventually(lambda: second.ipv4 in agent.exec("cilium-agent", *listed))
                assert "dns-proxy job=serve failures" not in agent.log("cilium-agent")
        with operator.running("cilium-operator"), agent.running("cilium-agent"):
            eventually(lambda: second.ipv4 in agent.exec("cilium-agent", *listed), within=60)
            pods.delete(node, "second")
            again = pods.add(node, "second")
            assert ip_address(again.ipv4) in RANGE
            with node.open_pod("first") as source:
                assert source.run(ping, again.ipv4, 3) != []
