"""Regeneration of a running pod's endpoint: its identity changes in the kernel; failures are retried."""

from __future__ import annotations

import http.client
import json
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support.agents import serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

GLOBALS = Path("/sys/fs/bpf/tc/globals")


def patch(pid: int, path: str, body: object) -> int:
    """PATCH at the agent's API; the status."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.connect(str(api_socket(pid)))
        connection.request("PATCH", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def only(pid: int) -> Any:
    """The node's only endpoint."""
    (endpoint,) = ask("/v1/endpoint", api_socket(pid))
    return endpoint


def identity_of(address: str) -> int | None:
    """What the datapath takes packets from the address for."""
    with open_map(GLOBALS / "cilium_ipcache") as ipcache:
        row = ipcache.lookup(IpcacheKey.host(ip_address(address)).pack())
    return None if row is None else IpcacheValue.unpack(row).identity


def remove_link(name: str) -> None:
    """Take a link away."""
    with IPRoute() as route:
        route.link("del", ifname=name)


def test_a_users_label_changes_the_identity_and_outlives_the_agent(node: Lab) -> None:
    pid = serving(node)
    pod = pods.add(node, "pod")
    before = only(pid)
    path = f"/v1/endpoint/{before['id']}/labels"
    assert patch(pid, path, {"user": ["k8s:tier=front"]}) == 200
    after = only(pid)["status"]
    assert after["state"] == "ready"
    assert after["identity"]["id"] != before["status"]["identity"]["id"]
    with node.open() as run:
        assert run.run(identity_of, pod.ipv4) == after["identity"]["id"]
        assert run.run(ping, pod.ipv4, 1)
        terminated(node, pid)
        pid = serving(node)
        again = only(pid)["status"]
        assert (again["identity"], again["state"]) == (after["identity"], "ready")
        assert again["labels"]["realized"] == {"user": ["k8s:tier=front"]}
        assert run.run(identity_of, pod.ipv4) == after["identity"]["id"]
        assert run.run(ping, pod.ipv4, 1)
    log = [line["message"] for line in ask(f"/v1/endpoint/{before['id']}/log", api_socket(pid))]
    assert "Successfully regenerated endpoint program (Reason: syncing state to host)" in log
    assert log[-1] == "Restoring endpoint from previous cilium instance"


def test_a_failing_regeneration_degrades_health_until_the_endpoint_is_deleted(node: Lab) -> None:
    pid = serving(node)
    pod = pods.add(node, "pod")
    number = only(pid)["id"]
    with node.open() as run:
        run.run(remove_link, pod.host_link)
    changed = {"options": {"SourceIPVerification": "Disabled"}}
    assert patch(pid, f"/v1/endpoint/{number}/config", changed) == 500
    name = f"endpoint-{number}-regeneration-recovery"

    def failing() -> bool:
        found = {each["name"]: each["status"] for each in ask("/v1/healthz", api_socket(pid))["controllers"]}
        return "consecutive-failure-count" in found.get(name, {})

    eventually(failing)
    assert only(pid)["status"]["state"] == "not-ready"
    assert [each["name"] for each in only(pid)["status"]["controllers"]] == [name]
    pods.delete(node, "pod")
    status = ask("/v1/healthz", api_socket(pid))
    assert status["cilium"]["state"] == "Ok"
    assert not [each for each in status["controllers"] if each["name"] == name]
