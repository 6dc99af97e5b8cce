"""The agent killed before writes of services: no frontend in the kernel's maps lacks its backends."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.lab import agent_process
from hive.lab.node import Lab
from tests.support.agents import serving
from tests.support.crash.drill import POINTS, Drill, chosen
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 if POINTS else 3600)]

GLOBALS = Path("/sys/fs/bpf/tc/globals")
SETTINGS = (
    *("--enable-session-affinity=true", "--enable-node-port=true"),
    *("--bpf-lb-algorithm=maglev", "--bpf-lb-maglev-table-size=251"),
    "--enable-l7-proxy=false",  # another process, and its calls are not the agent's
)
BEFORE = {1: ("10.0.0.1", "10.0.0.2"), 2: ("10.0.0.2", "10.0.0.3"), 3: ("10.0.0.3",)}
AFTER = {1: ("10.0.0.1", "10.0.0.4", "10.0.0.3"), 3: (), 4: ("10.0.0.4", "10.0.0.5")}
"""Backends of services, by number: some stay, some are shared, some go."""

Served = dict[str, frozenset[str]]


@pytest.fixture
def drill(node: Lab, tmp_path: Path) -> Iterator[Drill]:
    drill = Drill(node, tmp_path)
    yield drill
    drill.close()


def manifests(services: dict[int, tuple[str, ...]]) -> str:
    return "---".join(
        f"""
apiVersion: v1
kind: Service
metadata: {{name: s{number}, namespace: shop}}
spec: {{type: LoadBalancer, clusterIP: 10.96.0.{number}, clusterIPs: [10.96.0.{number}],
  sessionAffinity: ClientIP, ports: [{{name: http, port: 80}}]}}
status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.{number}}}]}}}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: s{number}-1, namespace: shop, labels: {{kubernetes.io/service-name: s{number}}}}}
addressType: IPv4
endpoints: [{", ".join(f"{{addresses: [{ip}]}}" for ip in backends)}]
ports: [{{name: http, port: 8080}}]
"""
        for number, backends in services.items()
    )


def write(folder: Path, services: dict[int, tuple[str, ...]]) -> None:
    """At once: a file that is replaced."""
    fresh = folder.parent / "fresh.yaml"
    fresh.write_text(manifests(services))
    fresh.rename(folder / "services.yaml")


def served() -> Served:
    """Who serves each frontend, as the kernel's maps have it; who leads nowhere raises."""
    with open_map(GLOBALS / "cilium_lb4_backends_v3") as table:
        backends = {key: str(IPv4Address(value[:4])) for key, value in table.items()}
    with open_map(GLOBALS / "cilium_lb4_services_v2") as table:
        entries = dict(table.items())
    found = {}
    for key, value in entries.items():
        if key[6:8] == b"\0\0":
            slots = range(1, int.from_bytes(value[4:6], "little") + 1)
            held = [entries[key[:6] + slot.to_bytes(2, "little") + key[8:]] for slot in slots]
            found[str(IPv4Address(key[:4]))] = frozenset(backends[slot[:4]] for slot in held)
    return found


def wanted(services: dict[int, tuple[str, ...]]) -> Served:
    return {
        f"{network}.{number}": frozenset(backends)
        for number, backends in services.items()
        for network in ("10.96.0", "192.0.2")
    }


def test_every_frontend_has_its_backends_whenever_the_agent_is_killed(drill: Drill, tmp_path: Path) -> None:
    lab, folder = drill.lab, tmp_path / "objects"
    folder.mkdir()
    settings = (f"--manifests-dir={folder}", *SETTINGS)

    def holds(services: dict[int, tuple[str, ...]]) -> bool:
        with lab.open() as node:
            return node.run(served) == wanted(services)

    write(folder, BEFORE)
    before = drill.start(*settings)
    eventually(lambda: holds(BEFORE))
    before = drill.made
    write(folder, AFTER)
    eventually(lambda: holds(AFTER))
    calls = drill.counted_lines[before : drill.made]
    may_be = {
        frontend: wanted(BEFORE).get(frontend, frozenset()) | wanted(AFTER).get(frontend, frozenset())
        for frontend in {*wanted(BEFORE), *wanted(AFTER)}
    }
    agent_process.crash(lab)
    for number in chosen("services", 1, len(calls)):
        write(folder, BEFORE)
        drill.start(*settings)
        eventually(lambda: holds(BEFORE))
        if number <= len(calls):
            drill.cut_after(number)
        write(folder, AFTER)
        if number <= len(calls):
            drill.expect_cut()
        else:
            eventually(lambda: holds(AFTER))
            agent_process.crash(lab)
        with lab.open() as node:
            left = node.run(served)
        assert left.keys() <= may_be.keys()
        assert {one for one, backends in left.items() if not backends <= may_be[one]} == set()
        serving(lab, *settings)
        eventually(lambda: holds(AFTER))
        agent_process.crash(lab)
