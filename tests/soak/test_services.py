"""After ten thousand services (or SOAK_SERVICES), created and deleted, the agent is unchanged."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.lab import agent_process
from hive.lab.kernel import bpf_objects
from hive.lab.node import Lab
from tests.soak.memory import GROWTH, size
from tests.support.agents import serving
from tests.support.waiting import eventually

SERVICES = int(os.environ.get("SOAK_SERVICES", "10000"))
AT_ONCE = 500
WARM_UP = 4
"""Turns before the first look."""
GLOBALS = Path("/sys/fs/bpf/tc/globals")

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 + SERVICES // 20)]


def manifests(first: int) -> str:
    found = []
    for number in range(first, first + AT_ONCE):
        vip, backend = IPv4Address("10.96.0.1") + number, IPv4Address("11.0.0.0") + 4 * number
        addresses = ", ".join(str(backend + each) for each in range(4))
        found.append(
            f"{{apiVersion: v1, kind: Service, metadata: {{name: s{number}, namespace: shop}},"
            f" spec: {{clusterIP: {vip}, clusterIPs: [{vip}], sessionAffinity: ClientIP,"
            " ports: [{name: http, port: 80}]}}\n---\n"
            "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4,"
            f" metadata: {{name: s{number}-1, namespace: shop,"
            f" labels: {{kubernetes.io/service-name: s{number}}}}},"
            f" endpoints: [{{addresses: [{addresses}]}}], ports: [{{name: http, port: 8080}}]}}"
        )
    return "\n---\n".join(found)


def entries() -> dict[str, int]:
    """Of the maps of services that hold any."""
    names = ("services_v2", "backends_v3", "reverse_nat")
    found = {}
    for name in (*(f"cilium_lb4_{each}" for each in names), "cilium_lb_affinity_match"):
        with open_map(GLOBALS / name) as table:
            if count := sum(1 for _ in table.items()):
                found[name] = count
    return found


WANTED = {
    "cilium_lb4_services_v2": 5 * AT_ONCE,
    "cilium_lb4_backends_v3": 4 * AT_ONCE,
    "cilium_lb4_reverse_nat": AT_ONCE,
    "cilium_lb_affinity_match": 4 * AT_ONCE,
}


def test_services_that_come_and_go_leave_nothing(node: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    pid = serving(node, f"--manifests-dir={folder}", "--enable-session-affinity=true")
    fresh, file = tmp_path / "fresh.yaml", folder / "services.yaml"
    with node.open() as inside:
        kernel, before = inside.run(bpf_objects), size(pid)
        turns = SERVICES // AT_ONCE
        for turn in range(turns + WARM_UP):
            if turn == WARM_UP:
                before = size(pid)
            fresh.write_text(manifests(turn * AT_ONCE))
            fresh.rename(file)
            # All of this turn, and nothing of the last: numbers are as they were, addresses are others.
            last = str(IPv4Address("10.96.0.1") + (turn + 1) * AT_ONCE - 1)
            eventually(lambda: inside.run(known, last), within=60)  # noqa: B023
            eventually(lambda: inside.run(entries) == WANTED, within=60)
            print(f"after {turn + 1} turns: {size(pid)}")  # noqa: T201 (the course of it, shown on failure)
        after = size(pid)
        file.write_text("")
        assert inside.run(bpf_objects).map_ids == kernel.map_ids
    assert agent_process.running(node) == pid
    assert after.descriptors <= before.descriptors + 1
    assert after.threads <= before.threads
    assert after.resident - before.resident <= GROWTH


def known(vip: str) -> bool:
    """Whether the maps have the frontend."""
    with open_map(GLOBALS / "cilium_lb4_services_v2") as table:
        key = IPv4Address(vip).packed + (80).to_bytes(2, "big") + bytes((0, 0, 6, 0, 0, 0))
        return table.lookup(key) is not None
