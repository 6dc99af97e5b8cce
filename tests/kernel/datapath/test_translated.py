"""Flows that the host's stack translates between pods: kube-proxy's Services, portmap's host ports.

Replies go back through the stack, which restores the requested address; flows without translation are
redirected directly.
"""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kernel.datapath.node import PODS, LiveNode, LivePod, running
from tests.support.namespaces import in_node, inside

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

SERVICES = {4: "10.96.0.10", 6: "fd00:96::10"}
NODE = {4: "192.168.7.7", 6: "fd00:7::7"}
EVERY_POD = {4: str(PODS), 6: "fd00:10:1::/64"}
PORT, TARGET = 80, 8080
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
PORTMAP = Path("/usr/lib/cni/portmap")


def kube_proxy(version: int, backends: list[str], protocol: str) -> str:
    """A Service as kube-proxy's nftables mode writes it: verdict maps, a chain for each endpoint."""
    family, address = ("ip", "ipv4_addr") if version == 4 else ("ip6", "ipv6_addr")
    service, pods = SERVICES[version], EVERY_POD[version]
    ends = "".join(
        f"""
  chain endpoint-{number} {{
    {family} saddr {backend} jump mark-for-masquerade
    meta l4proto {protocol} dnat to {f"[{backend}]" if version == 6 else backend}:{TARGET}
  }}"""
        for number, backend in enumerate(backends)
    )
    choice = ", ".join(f"{number} : goto endpoint-{number}" for number in range(len(backends)))
    return f"""
table {family} kube-proxy {{
  chain mark-for-masquerade {{ mark set mark or 0x4000; }}{ends}
  chain service-X {{
    {family} daddr {service} {protocol} dport {PORT} {family} saddr != {pods} jump mark-for-masquerade
    numgen random mod {len(backends)} vmap {{ {choice} }}
  }}
  map service-ips {{
    type {address} . inet_proto . inet_service : verdict
    elements = {{ {service} . {protocol} . {PORT} : goto service-X }}
  }}
  chain services {{ {family} daddr . meta l4proto . th dport vmap @service-ips; }}
  chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
  chain nat-output {{ type nat hook output priority -100; jump services; }}
  chain masquerading {{
    mark and 0x4000 == 0 return
    mark set mark xor 0x4000
    masquerade fully-random
  }}
  chain nat-postrouting {{ type nat hook postrouting priority srcnat; jump masquerading; }}
}}"""


def nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


@contextmanager
def serving(pod: LivePod, version: int, kind: socket.SocketKind) -> Iterator[None]:
    """A server in the pod that answers each request with the address it came from."""
    with inside(pod.net):
        server = socket.socket(FAMILIES[version], kind)
    server.bind(("", TARGET))
    stop = threading.Event()
    if kind is socket.SOCK_STREAM:
        server.listen()
    server.settimeout(0.1)

    def serve() -> None:
        while not stop.is_set():
            try:
                if kind is socket.SOCK_STREAM:
                    connection, peer = server.accept()
                    with connection:
                        connection.settimeout(30)
                        while connection.recv(100):
                            connection.send(peer[0].encode())
                else:
                    _, peer = server.recvfrom(100)
                    server.sendto(peer[0].encode(), peer)
            except TimeoutError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.close()


def ask(pod: LivePod, address: str, port: int, kind: socket.SocketKind, times: int = 5) -> str:
    """Ask as often on one connection; the client address at the server. TimeoutError without an answer."""
    with inside(pod.net):
        client = socket.socket(FAMILIES[6 if ":" in address else 4], kind)
    answer = ""
    with client:
        client.settimeout(30)
        client.connect((address, port))
        for _ in range(times):
            client.send(b"who am I?")
            answer = client.recv(100).decode()
    return answer


def run_portmap(network: object, environment: dict[str, str]) -> None:
    subprocess.run(
        [PORTMAP], input=json.dumps(network), text=True, env=environment, check=True, capture_output=True
    )


def three_pods(node: LiveNode) -> tuple[LivePod, LivePod, LivePod]:
    node.add_host()
    node.add_address(*NODE.values())
    return node.add_pod(10, ipv6=True), node.add_pod(11, ipv6=True), node.add_pod(12, ipv6=True)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
@pytest.mark.parametrize("version", [4, 6])
async def test_a_pod_reaches_its_neighbour_by_a_service_of_kube_proxy(
    in_node: None, version: int, kind: socket.SocketKind
) -> None:
    async with running() as node:
        client, server, _ = three_pods(node)
        nft(kube_proxy(version, [server.address(version)], "tcp" if kind is socket.SOCK_STREAM else "udp"))
        with serving(server, version, kind):
            for _ in range(3):
                assert ask(client, SERVICES[version], PORT, kind) == client.address(version)
            before = server.sent_by_link(), client.sent_by_link()
            assert ask(client, server.address(version), TARGET, kind, times=20) == client.address(version)
            by_link = server.sent_by_link() - before[0], client.sent_by_link() - before[1]
            assert max(by_link) < 10  # neighbours may be asked for; data takes the short cut
        assert node.drops(ipv6=True) == {}


@pytest.mark.parametrize("version", [4, 6])
async def test_a_pod_reaches_itself_by_its_own_service(in_node: None, version: int) -> None:
    async with running() as node:
        pod, *_ = three_pods(node)
        nft(kube_proxy(version, [pod.address(version)], "tcp"))
        with serving(pod, version, socket.SOCK_STREAM):
            seen = ask(pod, SERVICES[version], PORT, socket.SOCK_STREAM)
        assert seen != pod.address(version)  # masqueraded, or it would answer itself


@pytest.mark.parametrize("version", [4, 6])
async def test_each_client_of_many_gets_its_own_answers(in_node: None, version: int) -> None:
    async with running() as node:
        one, two, server = three_pods(node)
        nft(kube_proxy(version, [server.address(version)], "tcp"))
        with serving(server, version, socket.SOCK_STREAM):
            for _ in range(5):
                for client in (one, two):
                    for address, port in (SERVICES[version], PORT), (server.address(version), TARGET):
                        assert ask(client, address, port, socket.SOCK_STREAM) == client.address(version)


@pytest.mark.parametrize("version", [4, 6])
async def test_a_pod_reaches_its_neighbour_by_a_host_port_of_portmap(in_node: None, version: int) -> None:
    async with running() as node:
        client, server, _ = three_pods(node)
        ends = server.address(version)
        network = {
            "cniVersion": "1.0.0",
            "name": "cilium",
            "type": "portmap",
            "snat": True,
            "capabilities": {"portMappings": True},
            "runtimeConfig": {
                "portMappings": [{"hostPort": 9090, "containerPort": TARGET, "protocol": "tcp"}]
            },
            "prevResult": {
                "cniVersion": "1.0.0",
                "interfaces": [{"name": "eth0", "sandbox": "/proc/self/ns/net"}],
                "ips": [{"address": f"{ends}/{32 if version == 4 else 128}", "interface": 0}],
            },
        }
        environment = os.environ | {
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": "server",
            "CNI_NETNS": "/proc/self/ns/net",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(PORTMAP.parent),
        }
        run_portmap(network, environment)
        with serving(server, version, socket.SOCK_STREAM):
            for _ in range(3):
                assert ask(client, NODE[version], 9090, socket.SOCK_STREAM) == client.address(version)
            assert ask(client, ends, TARGET, socket.SOCK_STREAM) == client.address(version)
