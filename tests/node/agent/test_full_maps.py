"""Full maps of services, identities and policies: existing entries still work, and it is reported."""

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
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.cluster_services import VIP, manifests, reached
from tests.node.agent.manifests import write
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
    samples = [one for one in found if one["name"] == "cilium_bpf_map_pressure"]
    return float(next((one["value"] for one in samples if one["labels"]["map_name"] == name), 0))


def degraded(pid: int) -> str:
    """The modules in the agent's status."""
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


def test_full_maps_are_reported_and_existing_traffic_continues(node: Lab, tmp_path: Path) -> None:
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


def test_a_service_without_room_for_its_source_ranges_is_reported(node: Lab, tmp_path: Path) -> None:
    known_pods(tmp_path, "client")
    pid = serving(
        node,
        f"--manifests-dir={tmp_path}",
        *("--kube-proxy-replacement=true", "--bpf-lb-source-range-map-max=2"),
    )
    ranges = "loadBalancerSourceRanges: [192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24]"
    text = manifests("10.0.9.1").replace("spec: {", f"spec: {{type: LoadBalancer, {ranges}, ", 1)
    status = "status: {loadBalancer: {ingress: [{ip: 203.0.113.80}]}}\n---"
    (tmp_path / "web.yaml").write_text(text.replace("---", status, 1))
    eventually(lambda: "cilium_lb4_source_range is full: raise bpf-lb-map-max" in verdict(pid)[1])
    assert missing(pid) == 1


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
        eventually(lambda: "it is full (ENOSPC)" in degraded(pid))
        assert not here.run(is_known, CIDR)
        here.run(empty, count)
        eventually(partial(here.run, is_known, CIDR))
        eventually(lambda: "it is full" not in degraded(pid))


PORTS = 40
"""Of one entry of a rule, as many as Cilium allows."""


def of_server(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"endpointSelector": {"matchLabels": {"app": "server"}}, **spec},
    }


def many_ports(entries: int) -> dict[str, Any]:
    """Anyone may come by many ports, none beside another, so that each takes an entry."""
    numbers = iter(range(1001, 60000, 2))
    ports = [
        {"ports": [{"port": str(next(numbers)), "protocol": "TCP"} for _ in range(PORTS)]}
        for _ in range(entries)
    ]
    return of_server("ports", ingress=[{"fromEntities": ["all"], "toPorts": [one]} for one in ports])


def policy_of(pid: int, name: str) -> tuple[int, int]:
    """Number and identity of a pod's endpoint."""
    rows = ask("/v1/endpoint", api_socket(pid))
    found = next(
        one for one in rows if one["status"]["external-identifiers"]["pod-name"] == f"default/{name}"
    )
    return found["id"], found["status"]["identity"]["id"]


def entries_of(number: int) -> dict[PolicyKey, PolicyEntry]:
    with open_map(IPCACHE.parent / f"cilium_policy_{number:05d}") as table:
        return {PolicyKey.unpack(key): PolicyEntry.unpack(value) for key, value in table.items()}


def test_in_a_full_policy_map_a_new_deny_takes_the_place_of_what_is_allowed(
    node: Lab, tmp_path: Path
) -> None:
    known_pods(tmp_path, "client", "server")
    pid = serving(node, f"--manifests-dir={tmp_path}", "--bpf-policy-map-max=256")
    _, server = pods.add(node, "client"), pods.add(node, "server")
    number, (_, client) = policy_of(pid, "server")[0], policy_of(pid, "client")
    denied = PolicyKey(client, egress=False)
    not_from_client = of_server("deny", ingressDeny=[{"fromEndpoints": [{"matchLabels": {"app": "client"}}]}])
    write(tmp_path, "ports", many_ports(8))
    with node.open() as here, node.open_pod("client") as inside:
        eventually(lambda: len(here.run(entries_of, number)) == 256)
        eventually(lambda: f"cilium_policy_{number:05d}" in degraded(pid))
        write(tmp_path, "deny", not_from_client)
        eventually(lambda: denied in (found := here.run(entries_of, number)) and found[denied].deny)
        assert len(here.run(entries_of, number)) == 256
        write(tmp_path, "ports", of_server("ports", ingress=[{"fromEntities": ["all"]}]))
        eventually(lambda: f"cilium_policy_{number:05d}" not in degraded(pid))
        assert not inside.run(ping, server.ipv4, 1)
        (tmp_path / "deny.yaml").unlink()
        eventually(lambda: inside.run(ping, server.ipv4, 1))
