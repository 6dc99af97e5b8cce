"""Maps of services and of identities that are full: who is served stays served, and it is reported."""

from __future__ import annotations

import errno
import http.client
from functools import partial
from ipaddress import IPv4Address, ip_network
from pathlib import Path
from typing import Any

import pytest

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.test_pod_labels import write
from tests.node.agent.test_services import VIP, manifests, reached
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

ROOM, TOO_MANY = 64, 80


def service(number: int) -> str:
    """With a backend of its own."""
    text = manifests(f"10.0.9.{number}").replace(VIP, f"10.96.1.{number}")
    return text.replace("name: web", f"name: other-{number}").replace(
        "service-name: web", f"service-name: other-{number}"
    )


def pressure(pid: int, name: str) -> float:
    """How full a map is."""
    found = ask("/v1/metrics/", api_socket(pid))
    told = [one for one in found if one["name"] == "cilium_bpf_map_pressure"]
    return float(next((one["value"] for one in told if one["labels"]["map_name"] == name), 0))


def degraded(pid: int) -> str:
    """What the agent's status says of its modules."""
    modules = ask("/v1/healthz", api_socket(pid))["modules"]
    return " ".join(one["message"] for one in modules if one["level"] == "Degraded")


def verdict(pid: int) -> tuple[str, str]:
    """State and message of the agent as a whole, and whether its probe succeeds."""
    found = ask("/v1/healthz", api_socket(pid))["cilium"]
    return found["state"], found["msg"]


def probed() -> int:
    """What the kubelet's probe is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", 9879, timeout=30)
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status


def missing(pid: int) -> float:
    """Frontends that have no room, by the metric."""
    found = ask("/v1/metrics/", api_socket(pid))
    return float(next(one["value"] for one in found if one["name"] == "hive_services_without_room"))


def served(pid: int) -> int:
    return len(ask("/v1/service", api_socket(pid)))


def test_full_maps_are_told_of_and_harm_nobody_who_is_served(node: Lab, tmp_path: Path) -> None:
    known_pods(tmp_path, "client", "server")
    pid = serving(node, f"--manifests-dir={tmp_path}", f"--bpf-lb-map-max={ROOM}")
    client, server = pods.add(node, "client"), pods.add(node, "server")
    (tmp_path / "web.yaml").write_text(manifests(server.ipv4))
    eventually(lambda: reached(node, client, server))
    (tmp_path / "others.yaml").write_text("---".join(service(number) for number in range(1, TOO_MANY)))
    eventually(lambda: "is full: raise bpf-lb-map-max" in degraded(pid))
    eventually(lambda: served(pid) == ROOM // 2)  # two entries each: as many as there is room for
    eventually(lambda: pressure(pid, "lb4_services_v2") == 1)
    eventually(lambda: missing(pid) == TOO_MANY - ROOM // 2)
    eventually(lambda: verdict(pid)[0] == "Warning")
    eventually(lambda: "Load balancing is not ready: 48 frontends are not served" in verdict(pid)[1])
    with node.open() as inside:
        assert inside.run(probed) == 200
    assert reached(node, client, server)
    (tmp_path / "others.yaml").write_text("---".join(service(number) for number in range(1, 4)))
    eventually(lambda: "is full" not in degraded(pid))
    eventually(lambda: verdict(pid)[0] == "Ok" and missing(pid) == 0)
    eventually(lambda: served(pid) == 4)
    assert reached(node, client, server)


IPCACHE = Path("/sys/fs/bpf/tc/globals/cilium_ipcache")
FOREIGN = IPv4Address("100.64.0.0")
"""The first address of rows that fill the ipcache."""
CIDR = "198.51.100.7/32"


def fill() -> int:
    """Write rows of addresses until there is no room; how many."""
    key = bytearray(IpcacheKey.of(ip_network(f"{FOREIGN}/32")).pack())
    at = bytes(key).index(FOREIGN.packed)
    value, number = IpcacheValue(4242).pack(), 0
    with open_map(IPCACHE) as table:
        while True:
            key[at : at + 4] = (FOREIGN + number).packed
            try:
                table.update(bytes(key), value)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return number
            number += 1


def empty(count: int) -> None:
    """Remove them again; the agent may have done so with some."""
    with open_map(IPCACHE) as table:
        for number in range(count):
            table.delete(IpcacheKey.of(ip_network(f"{FOREIGN + number}/32")).pack())


def is_known(cidr: str) -> bool:
    """Whether it has an identity of its own; else it is the world's."""
    with open_map(IPCACHE) as table:
        found = table.lookup(IpcacheKey.of(ip_network(cidr)).pack())
    return found is not None and IpcacheValue.unpack(found).identity >> 24 == 1


def to_cidr() -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "outside", "namespace": "default"},
        "spec": {"endpointSelector": {"matchLabels": {"app": "client"}}, "egress": [{"toCIDR": [CIDR]}]},
    }


def test_a_full_ipcache_is_reported_and_an_address_without_room_is_not_allowed(
    node: Lab, tmp_path: Path
) -> None:
    known_pods(tmp_path, "client")
    pid = serving(node, f"--manifests-dir={tmp_path}")
    pods.add(node, "client")
    with node.open() as here:
        count = here.run(fill)
        write(tmp_path, "policy", to_cidr())
        eventually(lambda: "No space left on device" in degraded(pid))
        assert not here.run(is_known, CIDR)
        here.run(empty, count)
        eventually(partial(here.run, is_known, CIDR))
        eventually(lambda: "No space left on device" not in degraded(pid))
