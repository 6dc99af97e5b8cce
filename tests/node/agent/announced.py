"""Addresses announced by ARP: manifests, leases and neighbours' ARP tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, Lab
from tests.node.agent.node_ports import TARGET
from tests.support.agents import environment

VIP = NODE_ADDRESS.rpartition(".")[0] + ".80"
"""In the network of node and client: without routes there."""
ALPHA = "/apis/cilium.io/v2alpha1"
LEASE = "cilium-l2announce-default-web"
OBJECTS: list[tuple[str, dict[str, Any]]] = [
    (
        f"{ALPHA}/ciliumloadbalancerippools",
        {
            "apiVersion": "cilium.io/v2alpha1",
            "kind": "CiliumLoadBalancerIPPool",
            "metadata": {"name": "edge"},
            "spec": {"blocks": [{"start": VIP}]},
        },
    ),
    (
        f"{ALPHA}/ciliuml2announcementpolicies",
        {
            "apiVersion": "cilium.io/v2alpha1",
            "kind": "CiliumL2AnnouncementPolicy",
            "metadata": {"name": "edge"},
            "spec": {"loadBalancerIPs": True, "interfaces": ["^uplink$"]},
        },
    ),
    (
        "/api/v1/namespaces/default/services",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": "default"},
            "spec": {
                "type": "LoadBalancer",
                "ports": [{"name": "tcp", "port": TARGET, "targetPort": TARGET, "protocol": "TCP"}],
            },
        },
    ),
]


@contextmanager
def running(where: Namespaces, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program in these namespaces until the block ends."""
    process = where.popen(
        [sys.executable, "-m", *words], env=environment(), cwd=Path.cwd(), stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def mac_of(lab: Lab, link: str) -> str:
    with lab.open() as node:
        return str(node.run(_read, f"/sys/class/net/{link}/address"))


def _read(path: str) -> str:
    return Path(path).read_text().strip()


def heard_neighbour() -> str:
    """Return the address's MAC as a client has learned it; to be run at the client."""
    shown = subprocess.run(["ip", "-j", "neighbour", "show", "to", VIP], check=True, capture_output=True)
    return next((one["lladdr"] for one in json.loads(shown.stdout) if "lladdr" in one), "")
