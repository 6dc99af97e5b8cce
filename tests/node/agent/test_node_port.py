"""Clients outside connect to services at the node's addresses, served by the agent alone."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.node.agent.node_ports import (
    BALANCER,
    ELSEWHERE,
    EXTERNAL,
    FAR_PORT,
    GLOBALS,
    LONGER_THAN_A_PACKET,
    MEGABYTE,
    NODE,
    NODE_PORT,
    OUTSIDE,
    SETTINGS,
    TARGET,
    answered,
    command,
    datagram,
    give_addresses,
    refused,
    service,
    slices,
)
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

CLUSTER_IP = f"10.96.0.{NODE_PORT % 100}"


@pytest.fixture
def server(node: Lab, tmp_path: Path) -> pods.Attached:
    """A pod that services lead to, on a node that serves clients outside."""
    give_addresses(node)
    (tmp_path / "far.yaml").write_text(service("far", FAR_PORT) + slices("far", ELSEWHERE))
    known_pods(tmp_path, "server")
    pid = serving(node, f"--manifests-dir={tmp_path}", *SETTINGS)
    replacement = ask("/v1/healthz", api_socket(pid))["kube-proxy-replacement"]
    assert replacement["directRoutingDevice"] == "uplink"
    port = replacement["features"]["nodePort"]
    assert (port["mode"], port["algorithm"], port["lutSize"]) == ("SNAT", "Maglev", 1021)
    assert (port["portMin"], port["portMax"]) == (30000, 32767)
    pod = pods.add(node, "server")
    assert pod.ipv4
    assert pod.ipv6
    near = service(
        *("near", NODE_PORT),
        f"  externalIPs: [{EXTERNAL}]\n  loadBalancerSourceRanges: [{OUTSIDE_ADDRESS}/32]\n",
        f"status: {{loadBalancer: {{ingress: [{{ip: {BALANCER}}}]}}}}",
    )
    (tmp_path / "near.yaml").write_text(near + slices("near", {4: pod.ipv4, 6: pod.ipv6}))
    (tmp_path / "none.yaml").write_text(service("none", 30082) + slices("none", {}))
    eventually(lambda: answered(node, 4, (NODE_ADDRESS, NODE_PORT), pod) is not None)
    return pod


def tables() -> dict[int, int]:
    """How many services of each family have a lookup table."""
    found = {}
    for version in (4, 6):
        with open_map(GLOBALS / f"cilium_lb{version}_maglev") as outer:
            found[version] = sum(1 for _ in outer.items())
    return found


def test_a_client_outside_is_served(node: Lab, server: pods.Attached) -> None:
    for version in (4, 6):
        client, near, far = OUTSIDE[version], (NODE[version], NODE_PORT), (NODE[version], FAR_PORT)
        assert answered(node, version, near, server, MEGABYTE) == (client, NODE[version])
        assert answered(node, version, far, None, MEGABYTE) == (NODE[version], NODE[version])
        for size in (100, LONGER_THAN_A_PACKET):
            assert datagram(node, version, near, server, size) == client
            assert datagram(node, version, far, None, size) == NODE[version]
        # There is no listener in the pod: its error comes from the address that the client used.
        assert refused(node, version, near, socket.SOCK_DGRAM)
        assert refused(node, version, near, socket.SOCK_STREAM)
    with node.open() as run:
        assert run.run(tables) == {4: 8, 6: 4}  # by TCP and UDP: node ports, two addresses; not the wildcards
    for ip in (BALANCER, EXTERNAL):
        assert answered(node, 4, (ip, TARGET), server) == (OUTSIDE_ADDRESS, ip)


def test_every_address_is_closed_to_clients_outside_its_source_ranges(node: Lab, tmp_path: Path) -> None:
    """The default is that only the load balancer's is."""
    give_addresses(node)
    with node.open_outside() as outside:
        outside.run(command, f"route add {CLUSTER_IP} via {NODE_ADDRESS}")
    known_pods(tmp_path, "server")
    serving(
        *(node, f"--manifests-dir={tmp_path}", "--kube-proxy-replacement=true"),
        *("--bpf-lb-source-range-all-types=true", "--bpf-lb-external-clusterip=true"),
    )
    pod = pods.add(node, "server")
    assert pod.ipv4
    slice_ = slices("near", {4: pod.ipv4})
    every = [(NODE_ADDRESS, NODE_PORT), (CLUSTER_IP, TARGET), (BALANCER, TARGET), (EXTERNAL, TARGET)]

    def is_served(wanted: list[tuple[str, int]]) -> bool:
        return [to for to in every if answered(node, 4, to, pod) is not None] == wanted

    for ranges, wanted in ((f"{OUTSIDE_ADDRESS}/32", every), ("203.0.113.0/24", []), ("", every)):
        spec = f"  externalIPs: [{EXTERNAL}]\n" + (
            f"  loadBalancerSourceRanges: [{ranges}]\n" if ranges else ""
        )
        status = f"status: {{loadBalancer: {{ingress: [{{ip: {BALANCER}}}]}}}}"
        near = service("near", NODE_PORT, spec, status).replace("type: NodePort", "type: LoadBalancer")
        (tmp_path / "near.yaml").write_text(near + slice_)
        eventually(partial(is_served, wanted))
