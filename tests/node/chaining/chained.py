"""An agent with its plugin chained after another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hive.client import ask
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support.agents import serving
from tests.support.chain import addresses_of

SUBNET, SUBNET6 = "10.97.0.0/16", "fd00:97::/64"


def network(lab: Lab, plugin: dict[str, Any]) -> None:
    """Write another plugin's network to the runtime's directory, as an operator does."""
    entry = {**plugin, "ipam": addresses_of(lab, SUBNET, SUBNET6)}
    conf = {"cniVersion": "1.0.0", "name": "others", "plugins": [entry]}
    (lab.cni_conf.parent / "10-others.conflist").write_text(json.dumps(conf))
    with lab.open() as node:
        node.run(_trust_addresses)


def _trust_addresses() -> None:
    """Disable duplicate address detection on the node's links, which takes a second."""
    for name in ("accept_dad", "dad_transmits"):
        Path(f"/proc/sys/net/ipv6/conf/default/{name}").write_text("0")


BRIDGE = {"type": "bridge", "bridge": "cni0", "isGateway": True}


def chained(lab: Lab, *settings: str) -> int:
    """Run an agent with its plugin chained onto that network."""
    return serving(lab, "--cni-chaining-target=others", "--enable-ipv6=true", *settings)


def endpoints(pid: int) -> list[dict[str, Any]]:
    """Return the agent's endpoints."""
    found: list[dict[str, Any]] = ask("/v1/endpoint", api_socket(pid))
    return found


def reaches(lab: Lab, pod: str, target: str, patience: float = 1.0) -> bool:
    """Return whether the pod gets an answer from there in time."""
    with lab.open_pod(pod) as source:
        return bool(source.run(ping, target, 1, patience))
