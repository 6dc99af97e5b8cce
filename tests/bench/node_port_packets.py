"""Small datagrams a second through a node port: ours by tc and in the driver (XDP), against nft DNAT.

One flow, from a client outside on one processor to a receiver on another: a pod of the node, or a backend
beyond the device that the client is at, as one on another node is. There the node answers for the backend:
it puts its own address, as kube-proxy's masquerade does.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hive.lab import pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS
from tests.bench.nodes import our_lab
from tests.bench.peers import inside, ip, namespaces
from tests.bench.stats import Row, Sample
from tests.bench.tools import tool
from tests.node.agent.node_ports import command
from tests.node.agent.offloads import like_a_wire
from tests.support.agents import known_pods
from tests.support.waiting import eventually

NEAR, FAR, TARGET = 30080, 30081, 7002
"""Node ports of a service with a backend on the node, and of one with a backend elsewhere; backends' port."""
ELSEWHERE = "198.51.100.9"
FLOOD = 1000
"""Duration in ms that is counted."""


class Way:
    """A path from a client outside to a receiver."""

    def __init__(self, outside: Namespaces, near: Namespaces, node: str) -> None:
        self._outside = outside
        self._receiving = {NEAR: near, FAR: outside}
        self._node = node

    def thousands(self, program: Path, port: int, ms: int = FLOOD) -> float:
        """Return thousands of received datagrams per second. Raises RuntimeError if none arrives."""
        receiver = subprocess.Popen(
            [program, "receive", "0", str(TARGET), str(ms)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=self._receiving[port].enter,  # noqa: PLW1509 - the benchmark has one thread
        )
        try:
            if receiver.stdout is None or receiver.stdout.readline() != b"ready\n":
                raise RuntimeError("the receiver did not start")
            send = [str(program), "send", "1", self._node, str(port), str(2 * ms)]
            subprocess.run(send, preexec_fn=self._outside.enter, check=True, timeout=60)
            out, _ = receiver.communicate(timeout=10)
        finally:
            receiver.kill()
            receiver.wait()
        if not out:
            raise RuntimeError(f"nothing came through node port {port}")
        return int(out) / 1000

    def leads(self, program: Path) -> bool:
        """Return whether both node ports reach their receivers."""
        try:
            return all(self.thousands(program, port, 10) for port in (NEAR, FAR))
        except (RuntimeError, subprocess.SubprocessError):
            return False


def manifests(pod: str) -> str:
    """Return both services."""
    return "".join(
        f"""
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec: {{type: NodePort, clusterIP: 10.96.0.{number}, clusterIPs: [10.96.0.{number}],
  ports: [{{name: flood, port: 80, nodePort: {port}, protocol: UDP}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-1, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
endpoints: [{{addresses: [{backend}]}}]
ports: [{{name: flood, port: {TARGET}, protocol: UDP}}]
---"""
        for number, (name, port, backend) in enumerate((("near", NEAR, pod), ("far", FAR, ELSEWHERE)), 1)
    )


@contextlib.contextmanager
def ours(folder: Path, program: Path, *, in_driver: bool) -> Iterator[Way]:
    """Create our node, which serves by tc or in the driver."""
    name = "bench-np-" + ("xdp" if in_driver else "tc")
    objects = folder / name
    objects.mkdir(exist_ok=True)
    settings = [f"--manifests-dir={objects}", "--enable-node-port=true"]
    if in_driver:
        settings.append("--bpf-lb-acceleration=native")
    known_pods(objects, "receiver")
    with our_lab(name, *settings) as (made, _), contextlib.ExitStack() as stack:
        if in_driver:
            like_a_wire(made, folder)
        address = pods.add(made, "receiver").ipv4
        (objects / "services.yaml").write_text(manifests(address), encoding="utf-8")
        node, outside = (stack.enter_context(each) for each in (made.open(), made.open_outside()))
        outside.run(command, f"address add {ELSEWHERE} dev lo")
        node.run(command, f"route add {ELSEWHERE} via {OUTSIDE_ADDRESS}")
        way = Way(outside, stack.enter_context(made.open_pod("receiver")), NODE_ADDRESS)
        eventually(partial(way.leads, program), within=60)
        yield way


def rules(node: str, pod: str) -> str:
    """Return kube-proxy's nftables rules for these two services."""
    return f"""
table ip kube-proxy {{
    map service-nodeports {{
        type inet_proto . inet_service : verdict;
        elements = {{ udp . {NEAR} : goto near, udp . {FAR} : goto far }}
    }}
    chain near {{ meta mark set meta mark or 0x4000; meta l4proto udp dnat to {pod}:{TARGET}; }}
    chain far {{ meta mark set meta mark or 0x4000; meta l4proto udp dnat to {ELSEWHERE}:{TARGET}; }}
    chain services {{ ip daddr {node} meta l4proto . th dport vmap @service-nodeports; }}
    chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
    chain nat-postrouting {{ type nat hook postrouting priority srcnat;
        meta mark and 0x4000 == 0 return; meta mark set meta mark xor 0x4000; masquerade fully-random; }}
}}
"""


@contextlib.contextmanager
def nft(program: Path) -> Iterator[Way]:
    """Create the same network, routed, with those rules."""
    prefix = "bench-np-nft"
    node, pod, outside = f"{prefix}-node", f"{prefix}-pod", f"{prefix}-out"
    own, theirs, gateway, address = "192.168.62.10", "192.168.62.1", "169.254.1.1", "10.202.0.11"
    with namespaces(node, pod, outside), contextlib.ExitStack() as stack:
        for link, end, where, mine, other in (
            ("uplink", "eth0", outside, f"{own}/24", f"{theirs}/24"),
            ("veth-pod", "eth0", pod, f"{gateway}/32", f"{address}/32"),
        ):
            ip("link", "add", link, "type", "veth", "peer", "name", end, "netns", where, netns=node)
            ip("addr", "add", mine, "dev", link, netns=node)
            ip("addr", "add", other, "dev", end, netns=where)
            ip("link", "set", link, "up", netns=node)
            ip("link", "set", end, "up", netns=where)
        ip("route", "add", f"{address}/32", "dev", "veth-pod", netns=node)
        ip("route", "add", gateway, "dev", "eth0", "scope", "link", netns=pod)
        ip("route", "add", "default", "via", gateway, netns=pod)
        ip("addr", "add", f"{ELSEWHERE}/32", "dev", "lo", netns=outside)
        ip("route", "add", ELSEWHERE, "via", theirs, netns=node)
        inside(node, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0",
               "net.ipv4.conf.uplink.send_redirects=0")  # fmt: skip
        inside(node, "nft", "-f", "-", text=rules(own, address))
        out, receiving = (
            stack.enter_context(Namespaces.open(f"/run/netns/{each}")) for each in (outside, pod)
        )
        way = Way(out, receiving, own)
        eventually(partial(way.leads, program), within=60)
        yield way


def measure(folder: Path, rounds: int) -> list[Row]:
    """Measure to a backend on the node and to one elsewhere, in interleaved rounds."""
    program = tool("pps", folder)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        ways = {
            "tc": stack.enter_context(ours(folder, program, in_driver=False)),
            "XDP": stack.enter_context(ours(folder, program, in_driver=True)),
            "nft DNAT": stack.enter_context(nft(program)),
        }
        for _ in range(rounds):
            for name, way in ways.items():
                for port in (NEAR, FAR):
                    found[name, port].append(way.thousands(program, port))
    samples = {key: Sample(tuple(values)) for key, values in found.items()}
    return [
        Row(
            f"node port to a backend {where}, {name}: datagrams",
            "1000/s",
            samples[name, port],
            "nft DNAT",
            samples["nft DNAT", port],
            None,
            faster=False,
        )
        for where, port in (("on the node", NEAR), ("elsewhere", FAR))
        for name in ("tc", "XDP")
    ]
