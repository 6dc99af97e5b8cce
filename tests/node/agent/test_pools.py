"""Pods with addresses of selected pools, from a folder with the node's CiliumNode."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from cells.cluster.identity.numbers import HEALTH
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.manifests import write
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def node_object(**pools: str) -> dict[str, Any]:
    allocated = [{"pool": pool, "cidrs": cidrs.split()} for pool, cidrs in pools.items()]
    kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumNode"}
    return {
        **kind,
        "metadata": {"name": socket.gethostname()},
        "spec": {"ipam": {"pools": {"allocated": allocated}}},
    }


def pod(name: str, pool: str) -> dict[str, Any]:
    annotations = {"ipam.cilium.io/ip-pool": pool}
    metadata = {"name": name, "namespace": "default", "annotations": annotations}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": socket.gethostname()},
    }


def test_pods_of_two_pools_reach_each_other_and_keep_their_addresses(node: Lab, tmp_path: Path) -> None:
    settings = ["--ipam=multi-pool", "--routing-mode=native", "--enable-health-checking=true"]
    settings.append(f"--manifests-dir={tmp_path}")
    write(tmp_path, "node", node_object(default="10.40.0.0/28"))
    write(tmp_path, "red", pod("red", "red"))
    known_pods(tmp_path, "client")
    pid = serving(node, *settings)
    with ThreadPoolExecutor() as pool:
        red = pool.submit(pods.add, node, "red")  # waits: its pool has no range yet
        eventually(lambda: "red" in str(ask("/statedb/dump/pod-pool-requests", api_socket(pid))))
        write(tmp_path, "node", node_object(default="10.40.0.0/28", red="10.49.0.0/28"))
        server = red.result(60)
    client = pods.add(node, "client")
    eventually(lambda: health_address(pid))
    health = health_address(pid)
    assert ip_address(health) in ip_network("10.40.0.0/28")
    assert ip_address(server.ipv4) in ip_network("10.49.0.0/28")
    assert ip_address(client.ipv4) in ip_network("10.40.0.0/28")
    with node.open_pod("client") as inside:
        assert inside.run(ping, server.ipv4, 1)
        agent_process.crash(node)
        write(tmp_path, "node", node_object(default="10.40.0.0/28 10.41.0.0/28"))  # red is taken back
        pid = serving(node, *settings)
        eventually(lambda: health_address(pid) == health)
        assert inside.run(ping, server.ipv4, 1)
        assert inside.run(ping, health, 1)
        states = {one["obj"]["network"]: one["obj"]["state"] for one in _rows(pid)}
        assert states["10.49.0.0/28"] == "retired"
        pods.delete(node, "red")
        eventually(lambda: "10.49.0.0/28" not in {one["obj"]["network"] for one in _rows(pid)})


def health_address(pid: int) -> str:
    """That of the node's health endpoint; empty while there is none."""
    for one in ask("/v1/endpoint", api_socket(pid)) or ():
        if one["status"]["identity"]["id"] == HEALTH:
            found: str = one["status"]["networking"]["addressing"][0]["ipv4"]
            return found
    return ""


def _rows(pid: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask("/statedb/dump/pod-ranges", api_socket(pid))["pod-ranges"]
    return found
