"""A node with clients outside, a service with node ports, and backends on other nodes."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hive.lab import pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.support.sockets import WITHIN, opened, seen_by_server

IPV6_MTU = 24  # linux/in6.h


NODE6, OUTSIDE6 = "fd50::10", "fd50::1"
NODE = {4: NODE_ADDRESS, 6: NODE6}
OUTSIDE = {4: OUTSIDE_ADDRESS, 6: OUTSIDE6}
ELSEWHERE = {4: "198.51.100.9", 6: "fd51::9"}
"""The address of another node's pod."""
NODE_PORT, FAR_PORT, TARGET, HOST_PORT = 30080, 30081, 8080, 8888
BALANCER, EXTERNAL = "192.0.2.80", "192.0.2.81"
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
    """Add IPv6, and addresses behind the outside host that are routed through the node."""
    with lab.open() as node, lab.open_outside() as outside:
        node.run(command, f"address add {NODE6}/64 dev uplink nodad")
        outside.run(command, f"address add {OUTSIDE6}/64 dev node nodad")
        for version, ip in ELSEWHERE.items():
            outside.run(command, f"address add {ip} dev lo{' nodad' * (version == 6)}")
            node.run(command, f"route add {ip} via {OUTSIDE[version]}")
        for ip in (BALANCER, EXTERNAL):
            outside.run(command, f"route add {ip} via {NODE_ADDRESS}")


@contextmanager
def ends(lab: Lab, server: pods.Attached | None) -> Iterator[tuple[Namespaces, Namespaces]]:
    """Open the namespaces of the client and of the server, which is outside unless it is a pod."""
    with ExitStack() as stack:
        outside = stack.enter_context(lab.open_outside())
        yield outside, stack.enter_context(lab.open_pod(server.pod)) if server is not None else outside


def answered(
    lab: Lab, version: int, to: tuple[str, int], server: pods.Attached | None, size: int = 100
) -> tuple[str, str] | None:
    """Connect by TCP; return the client that the server saw and the server's address, or None."""
    own = "" if server is not None else ELSEWHERE[version]
    seen: list[str] = []
    with (
        ends(lab, server) as (outside, serving_end),
        opened(serving_end, version, socket.SOCK_STREAM) as listener,
        opened(outside, version, socket.SOCK_STREAM) as client,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own, TARGET))
        listener.listen()
        listener.settimeout(3)  # one that is lost is sent again after a second
        client.settimeout(3)  # one that is lost is sent again after a second

        def serve() -> None:
            with suppress(OSError):  # also where the client gave up when it was just connected
                connection, peer = listener.accept()
                with connection:
                    connection.settimeout(WITHIN)
                    seen.append(str(peer[0]))
                    left = size
                    while left and (data := connection.recv(left)):
                        left -= len(data)
                    connection.sendall(bytes(size))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client.connect(to)
            client.settimeout(WITHIN)
            client.sendall(bytes(size))
            left = size
            while left and (data := client.recv(left)):
                left -= len(data)
            if left:
                return None
            return seen[0], str(client.getpeername()[0])
        except OSError:
            return None
        finally:
            thread.join()


def datagram(lab: Lab, version: int, to: tuple[str, int], server: pods.Attached | None, size: int) -> str:
    """Send by UDP; return the client that the server saw; the reply must come from the requested address."""
    own = ("" if server is not None else ELSEWHERE[version], TARGET)
    with ends(lab, server) as (outside, serving_end):
        return seen_by_server(outside, serving_end, version, own, to, size)


def refused(lab: Lab, version: int, to: tuple[str, int], kind: int) -> bool:
    """Return whether the client gets an error that there is no backend."""
    with lab.open_outside() as outside, opened(outside, version, kind) as client:
        try:
            client.connect(to)
            client.send(b"anybody?")
            client.recv(1)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            return False
    return False
