"""BGP after an install: gobgpd in the chart's pod, and a router that receives the node's routes."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive.lab.node import Lab
from tests.support import chart
from tests.support.bare_node import VALUES, bare_node, create
from tests.support.bgp import FRR, PASSWORD, routers
from tests.support.namespaces import inside
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

ALPHA = "/apis/cilium.io/v2alpha1"
PEER = {"name": "tor", "peerAddress": FRR, "peerASN": 65101, "peerConfigRef": {"name": "tor"}}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("CiliumBGPPeerConfig", "tor"): {
        "authSecretRef": "tor",
        "timers": {"connectRetryTimeSeconds": 1, "holdTimeSeconds": 9, "keepAliveTimeSeconds": 3},
        "families": [{"afi": "ipv4", "safi": "unicast", "advertisements": {}}],
    },
    ("CiliumBGPAdvertisement", "pods"): {"advertisements": [{"advertisementType": "PodCIDR"}]},
    ("CiliumBGPClusterConfig", "all"): {
        "bgpInstances": [{"name": "edge", "localASN": 65001, "peers": [PEER]}]
    },
}
IMAGE = {"image": {"tag": "0.1.0-bgp"}}
"""The image with gobgpd serves for all; for the speaker it is the chart's default."""
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "tor", "namespace": "kube-system"},
    "stringData": {"password": PASSWORD},
}


def test_a_router_gets_the_nodes_routes(node: Lab, bgp_image: Path, tmp_path: Path) -> None:
    """And the agent, which is not in the pod of gobgpd, shows why a session is down."""
    values: dict[str, Any] = VALUES | IMAGE | {"operator": {"replicas": 1, **IMAGE}}
    objects: dict[str, Any] = chart.objects(values | {"bgpControlPlane": {"enabled": True}})
    with bare_node(node, tmp_path, bgp_image) as kubelet, node.open() as host, ExitStack() as running:
        kubelet.config_maps["cilium-config"] = dict(objects["ConfigMap/cilium-config"]["data"])
        kubelet.host_paths["/var/run/cilium/bgp"] = Path("/run/cilium/bgp")
        agent, speaker, operator = (
            kubelet.pod(f"{name}-x", objects[f"{kind}/{name}"]["spec"]["template"])
            for kind, name in (
                ("DaemonSet", "cilium"),
                ("DaemonSet", "cilium-bgp-speaker"),
                ("Deployment", "cilium-operator"),
            )
        )
        for name in agent.init:
            agent.run(name)
        running.callback(shutil.rmtree, "/run/frr", ignore_errors=True)  # bgpd makes it
        with inside(host):
            far = running.enter_context(routers(tmp_path, "fabric"))
        running.enter_context(operator.running("cilium-operator"))
        running.enter_context(speaker.running("cilium-bgp-speaker"))
        running.enter_context(agent.running("cilium-agent"))
        ca = tmp_path / "account" / "ca.crt"

        def make(path: str, made: dict[str, Any]) -> bool:
            return host.run(create, kubelet.env, ca, path, made) == 201

        assert make("/api/v1/namespaces/kube-system/secrets", SECRET)
        for (kind, name), spec in SPECS.items():
            made = {
                "apiVersion": "cilium.io/v2alpha1",
                "kind": kind,
                "metadata": {"name": name},
                "spec": spec,
            }
            eventually(partial(make, f"{ALPHA}/{kind.lower()}s", made))
        eventually(lambda: set(far.frr_routes()) == {"10.77.0.0/24"})

        def sessions() -> list[Any]:
            found: list[Any] = json.loads(agent.exec("cilium-agent", "hive", "bgp", "peers", "-o", "json"))
            return found

        eventually(lambda: sessions()[0]["session-state"] == "established")
        far.frr_clear()
        why = "received NOTIFICATION 6/4 (cease: administrative reset)"
        eventually(lambda: sessions()[0].get("session-error") == why)
        eventually(lambda: "Peer Down" in speaker.log("cilium-bgp-speaker"))
        assert speaker.runs("cilium-bgp-speaker")
        with speaker.running("isolated-peers"):
            place = "/var/run/cilium/bgp"
            asks = f"while ! [ -p {place}/launch ]; do sleep 0.1; done; echo start own >{place}/launch"
            agent.exec("cilium-agent", "sh", "-c", asks)
            eventually(lambda: agent.exec("cilium-agent", "ls", f"{place}/own.sock"))
