"""Clients outside ask services at the node's addresses, and nothing but the agent serves them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NODE6, OUTSIDE6 = "fd50::10", "fd50::1"
NODE = {4: NODE_ADDRESS, 6: NODE6}
OUTSIDE = {4: OUTSIDE_ADDRESS, 6: OUTSIDE6}
ELSEWHERE = {4: "198.51.100.9", 6: "fd51::9"}
"""Where another node's pod would be."""
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
NODE_PORT, FAR_PORT, TARGET, HOST_PORT = 30080, 30081, 8080, 8888
BALANCER, EXTERNAL = "192.0.2.80", "192.0.2.81"
CLUSTER_IP = f"10.96.0.{NODE_PORT % 100}"
WITHIN = 10.0
SETTINGS = (
    *("--enable-ipv6=true", "--ipv6-range=fd00:5::/112", "--enable-node-port=true"),
    *("--enable-external-ips=true", "--enable-host-port=true", "--direct-routing-device=upl+"),
    *("--bpf-lb-algorithm=maglev", "--bpf-lb-maglev-table-size=1021"),
)
LONGER_THAN_A_PACKET = 5000
MEGABYTE = 1 << 20
GLOBALS = Path("/sys/fs/bpf/tc/globals")


def service(name: str, port: int, more: str = "", status: str = "") -> str:
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  type: NodePort
  clusterIP: 10.96.0.{port % 100}
  clusterIPs: [10.96.0.{port % 100}, "fd00:96::{port % 100}"]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {{name: tcp, port: {TARGET}, nodePort: {port}, protocol: TCP}}
  - {{name: udp, port: {TARGET}, nodePort: {port}, protocol: UDP}}
{more}{status}
---"""


def slices(name: str, backends: dict[int, str]) -> str:
    return "".join(
        f"""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-{version}, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv{version}
endpoints: [{{addresses: ["{ip}"]}}]
ports: [{{name: tcp, port: {TARGET}, protocol: TCP}}, {{name: udp, port: {TARGET}, protocol: UDP}}]
---"""
        for version, ip in backends.items()
    )


def command(text: str) -> None:
    subprocess.run(["ip", *text.split()], check=True)


def give_addresses(lab: Lab) -> None:
    """IPv6, and addresses behind the world outside, to which the node is the way."""
    with lab.open() as node, lab.open_outside() as outside:
        node.run(command, f"address add {NODE6}/64 dev uplink nodad")
        outside.run(command, f"address add {OUTSIDE6}/64 dev node nodad")
        for version, ip in ELSEWHERE.items():
            outside.run(command, f"address add {ip} dev lo{' nodad' * (version == 6)}")
            node.run(command, f"route add {ip} via {OUTSIDE[version]}")
        for ip in (BALANCER, EXTERNAL):
            outside.run(command, f"route add {ip} via {NODE_ADDRESS}")


def made(where: Namespaces, version: int, kind: int, protocol: int = 0) -> socket.socket:
    with inside(where):
        found = socket.socket(FAMILY[version], kind, protocol)
    found.settimeout(WITHIN)
    return found


@contextmanager
def ends(lab: Lab, server: pods.Attached | None) -> Iterator[tuple[Namespaces, Namespaces]]:
    """Of the client and of the server, which is outside too if it is not a pod."""
    with ExitStack() as stack:
        outside = stack.enter_context(lab.open_outside())
        yield outside, stack.enter_context(lab.open_pod(server.pod)) if server is not None else outside


def answered(
    lab: Lab, version: int, to: tuple[str, int], server: pods.Attached | None, size: int = 100
) -> tuple[str, str] | None:
    """By TCP: the client that the server saw, and the server that the client saw; None without an answer."""
    own = "" if server is not None else ELSEWHERE[version]
    seen: list[str] = []
    with (
        ends(lab, server) as (outside, serving_end),
        made(serving_end, version, socket.SOCK_STREAM) as listener,
        made(outside, version, socket.SOCK_STREAM) as client,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own, TARGET))
        listener.listen()
        listener.settimeout(3)  # one that is lost is sent again after a second
        client.settimeout(3)  # one that is lost is sent again after a second

        def serve() -> None:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(WITHIN)
                seen.append(str(peer[0]))
                left = size
                while left:
                    left -= len(connection.recv(left))
                connection.sendall(bytes(size))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client.connect(to)
            client.settimeout(WITHIN)
            client.sendall(bytes(size))
            left = size
            while left:
                left -= len(client.recv(left))
            return seen[0], str(client.getpeername()[0])
        except OSError:
            return None
        finally:
            thread.join()


def datagram(lab: Lab, version: int, to: tuple[str, int], server: pods.Attached | None, size: int) -> str:
    """By UDP: the client that the server saw; the answer comes from where the client asked."""
    with (
        ends(lab, server) as (outside, serving_end),
        made(serving_end, version, socket.SOCK_DGRAM) as listener,
        made(outside, version, socket.SOCK_DGRAM) as client,
    ):
        listener.bind(("" if server is not None else ELSEWHERE[version], TARGET))
        client.connect(to)
        question = os.urandom(size)
        client.send(question)
        heard, peer = listener.recvfrom(size + 1)
        assert heard == question
        listener.sendto(heard[::-1], peer)
        assert client.recv(size + 1) == question[::-1]
        return str(peer[0])


def refused(lab: Lab, version: int, to: tuple[str, int], kind: int) -> bool:
    """Whether the client gets an error that there is no backend."""
    with lab.open_outside() as outside, made(outside, version, kind) as client:
        try:
            client.connect(to)
            client.send(b"anybody?")
            client.recv(1)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            return False
    return False


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
