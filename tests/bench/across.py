"""Pod to pod across two nodes, by routes and through the tunnel, against plain routing and a plain VXLAN.

Two nodes are joined by a bridge, with a pod on each; one processor for the client, one for the server.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey
from hive.lab import agent_process
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.namespaces import Namespaces
from hive.lab.node import exclusive
from hive.lab.traffic.probe import ping
from tests.bench.peers import Pair, inside, ip, namespaces
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool
from tests.bench.traffic import CONNECTIONS, ROUND_TRIPS, run, server
from tests.support.waiting import eventually

FLOOD_PORT, FLOOD = 7003, 500
"""Port, and milliseconds for which datagrams are counted."""
GATEWAY = "169.254.1.1"
HOST_ROUTING = "--kube-proxy-replacement=true"
"""The setting by which pods and devices pass packets to each other past the host's stack."""
KEYS = 200
IPCACHE = Path("/sys/fs/bpf/tc/globals/cilium_ipcache")


@contextlib.contextmanager
def cluster(name: str, *settings: str, etcd: bool = False) -> Iterator[Cluster]:
    """Create two nodes of ours with a pod each."""
    made = Cluster(name)
    try:
        with exclusive():
            labs = made.make(2, 1, etcd=etcd)
            pids = {lab: agent_process.start(lab, *made.settings(settings)) for lab in labs}
            for lab, pid in pids.items():
                agent_process.wait_ready(lab, pid)
                made.add_pod(lab, f"pod-{made.number(lab)}")
        yield made
    finally:
        with exclusive():
            made.remove(made.nodes())


@contextlib.contextmanager
def ours(name: str, *settings: str, etcd: bool = False) -> Iterator[Pair]:
    """Return their pods, once they reach each other."""
    with cluster(name, *settings, etcd=etcd) as made:
        first, second = made.nodes()
        (found,) = (one for one, _ in made.manifests.objects() if one["metadata"]["name"] == "pod-2")
        address = found["status"]["podIP"]
        with first.open_pod("pod-1") as client, second.open_pod("pod-2") as serving:
            eventually(partial(client.run, ping, address, 1))
            yield Pair(client, serving, address)


@contextlib.contextmanager
def plain(prefix: str, *, vxlan: bool) -> Iterator[Pair]:
    """Create two nodes with a route to the other's pod: over its address, or a VXLAN device."""
    nodes = {f"{prefix}-1": (1, 2, "a"), f"{prefix}-2": (2, 1, "b")}
    network = f"{prefix}-net"
    with namespaces(network, *nodes, f"{prefix}-a", f"{prefix}-b"):
        ip("link", "add", "br0", "type", "bridge", netns=network)
        ip("link", "set", "br0", "up", netns=network)
        for node, (own, other, pod) in nodes.items():
            port, mine, theirs = f"port-{own}", f"192.168.60.{own}", f"192.168.60.{other}"
            ip("link", "add", "uplink", "type", "veth", "peer", "name", port, "netns", network, netns=node)
            ip("link", "set", port, "master", "br0", "up", netns=network)
            ip("addr", "add", f"{mine}/24", "dev", "uplink", netns=node)
            ip("link", "set", "uplink", "up", netns=node)
            inside(node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            via = ["via", theirs]
            if vxlan:
                ends = ("local", mine, "remote", theirs, "dstport", "8472", "dev", "uplink")
                ip("link", "add", "vx", "type", "vxlan", "id", "42", *ends, netns=node)
                ip("addr", "add", f"10.250.0.{own}/24", "dev", "vx", netns=node)
                ip("link", "set", "vx", "up", netns=node)
                via = ["via", f"10.250.0.{other}", "mtu", "1450"]
            _pod(node, f"{prefix}-{pod}", own)
            ip("route", "add", f"10.201.{other}.0/24", *via, netns=node)
        with (
            Namespaces.open(f"/run/netns/{prefix}-a") as client,
            Namespaces.open(f"/run/netns/{prefix}-b") as serving,
        ):
            yield Pair(client, serving, "10.201.2.11")


def _pod(node: str, pod: str, number: int) -> None:
    address = f"10.201.{number}.11"
    ip("link", "add", "veth-pod", "type", "veth", "peer", "name", "eth0", "netns", pod, netns=node)
    ip("link", "set", "veth-pod", "up", netns=node)
    ip("link", "set", "eth0", "up", netns=pod)
    ip("addr", "add", f"{GATEWAY}/32", "dev", "veth-pod", netns=node)
    ip("route", "add", f"{address}/32", "dev", "veth-pod", netns=node)
    ip("addr", "add", f"{address}/32", "dev", "eth0", netns=pod)
    ip("route", "add", GATEWAY, "dev", "eth0", "scope", "link", netns=pod)
    ip("route", "add", "default", "via", GATEWAY, netns=pod)


def traffic(folder: Path, rounds: int) -> list[Row]:
    """Measure round trips and connections, each against its plain peer, in ``rounds`` interleaved rounds."""
    program, flood = tool("traffic", folder), tool("pps", folder)
    peers = {"native": "kernel routing", "native, by the stack": "kernel routing", "VXLAN": "VXLAN device"}
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        networks = {
            "native": stack.enter_context(ours("bench-native", HOST_ROUTING)),
            "native, by the stack": stack.enter_context(ours("bench-stack")),
            "VXLAN": stack.enter_context(ours("bench-vxlan", TUNNEL)),
            "kernel routing": stack.enter_context(plain("bench-route", vxlan=False)),
            "VXLAN device": stack.enter_context(plain("bench-vx", vxlan=True)),
        }
        for pods in networks.values():
            stack.enter_context(server(program, pods))
        for _ in range(rounds):
            for kind, count in (("rr", ROUND_TRIPS), ("crr", CONNECTIONS)):
                for name, pods in networks.items():
                    figures[kind, name].append(run(program, kind, pods, count))
            for name, pods in networks.items():
                figures["pps", name].append(_packets(flood, pods))
    rows = []
    for kind, what in (("rr", "round trip"), ("crr", "connect + round trip + close")):
        for name, peer in peers.items():
            mine, theirs = (Sample(tuple(figures[kind, who])) for who in (name, peer))
            rows.append(Row(f"across nodes, {name}: {what}", "µs", mine, peer, theirs, 1.0, faster=False))
    for name, peer in peers.items():
        mine, theirs = (Sample(tuple(figures["pps", who])) for who in (name, peer))
        rows.append(Row(f"across nodes, {name}: datagrams", "1000/s", mine, peer, theirs, None, faster=False))
    return rows


WIREGUARD = ("--enable-wireguard=true", "--enable-wireguard-userspace-fallback=true")
"""By wireguard-go, also where the kernel has WireGuard: the figures are those of wireguard-go."""


def encrypted(folder: Path, rounds: int) -> list[Row]:
    """Measure round trips and connections between pods of two nodes over WireGuard, against the same in clear
    text.
    """
    program = tool("traffic", folder)
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    modes = {"native": (), "VXLAN": (TUNNEL,)}
    with contextlib.ExitStack() as stack:
        networks = {
            (mode, how): stack.enter_context(ours(f"bench-{how}-{mode}".lower(), *settings, *more, etcd=True))
            for mode, settings in modes.items()
            for how, more in (("clear", ()), ("wireguard", WIREGUARD))
        }
        for pods in networks.values():
            stack.enter_context(server(program, pods))
        for _ in range(rounds):
            for kind, count in (("rr", ROUND_TRIPS // 4), ("crr", CONNECTIONS // 4)):
                for (mode, how), pods in networks.items():
                    figures[f"{mode} {kind}", how].append(run(program, kind, pods, count))
    return [
        Row(
            f"across nodes, {mode}, WireGuard: {what}",
            *("µs", Sample(tuple(figures[f"{mode} {kind}", "wireguard"])), "clear text"),
            *(Sample(tuple(figures[f"{mode} {kind}", "clear"])), None),
            faster=False,
        )
        for kind, what in (("rr", "round trip"), ("crr", "connect + round trip + close"))
        for mode in modes
    ]


def _packets(program: Path, pods: Pair) -> float:
    """Return thousands of datagrams per second that the server's pod receives at the client's full rate."""
    receiver = subprocess.Popen(
        [program, "receive", "0", str(FLOOD_PORT), str(FLOOD)],
        stdout=subprocess.PIPE,
        preexec_fn=pods.server.enter,  # noqa: PLW1509 - the benchmark has one thread
    )
    try:
        if receiver.stdout is None or receiver.stdout.readline() != b"ready\n":
            raise RuntimeError("the receiver did not start")
        send = [str(program), "send", "1", pods.address, str(FLOOD_PORT), str(2 * FLOOD)]
        subprocess.run(send, preexec_fn=pods.client.enter, check=True, timeout=60)
        out, _ = receiver.communicate(timeout=10)
    finally:
        receiver.kill()
        receiver.wait()
    return int(out) / 1000


def shared(folder: Path, rounds: int) -> list[Figure]:
    """Measure the time from a put of an address in etcd to the row in another node's ipcache map."""
    del folder
    with cluster("bench-etcd", TUNNEL, etcd=True) as made:
        first, _ = made.nodes()
        with first.open() as node:
            medians = [
                node.run(seconds_until_noticed, made.store.address.partition("//")[2], each)
                for each in range(rounds)
            ]
    return [Figure("an address in etcd to the ipcache map", "ms", Sample(tuple(medians)), 10.0)]


def seconds_until_noticed(etcd: str, number: int) -> float:
    """Return the median of KEYS in ms; runs inside the node."""
    import grpc
    from aetcd import rpc

    times = []
    with grpc.insecure_channel(etcd) as channel, open_map(IPCACHE) as ipcache:
        store = rpc.KVStub(channel)
        for each in range(KEYS):
            address = IPv4Address("10.99.0.1") + number * KEYS + each
            value = b'{"IP":"%s","Mask":null,"HostIP":"192.168.50.12","ID":4711}' % str(address).encode()
            key = f"cilium/state/ip/v1/default/{address}".encode()
            row = IpcacheKey.of(IPv4Network(address)).pack()
            began = time.perf_counter()
            store.Put(rpc.PutRequest(key=key, value=value))
            while (found := ipcache.lookup(row)) is None or found[:4] != (4711).to_bytes(4, "little"):
                if time.perf_counter() - began > 10:
                    raise AssertionError(f"{address} did not come within 10 s")
            times.append((time.perf_counter() - began) * 1000)
    return sorted(times)[KEYS // 2]


NODES, PODS = 1000, 50_000
BATCH = 100


def crowded(folder: Path, rounds: int) -> list[Figure]:
    """Measure NODES nodes with PODS pods in etcd: until an agent has all in its map, and its memory."""
    del folder
    waits, sizes = [], []
    for _ in range(min(rounds, 3)):
        with cluster("bench-crowd", TUNNEL, etcd=True) as made:
            first, _ = made.nodes()
            pid = agent_process.running(first)
            before = _resident(pid)
            with first.open() as node:
                waits.append(node.run(_report_all, made.store.address.partition("//")[2], within=300))
            sizes.append(_resident(pid) - before)
    return [
        Figure(
            f"{NODES} nodes, {PODS} pods through etcd, until all are in the map", "s", Sample(tuple(waits))
        ),
        Figure(
            f"{NODES} nodes, {PODS} pods through etcd: the agent's memory grows by",
            "MB",
            Sample(tuple(sizes)),
        ),
    ]


def _resident(pid: int | None) -> float:
    text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * 4096 / 1e6


def _report_all(etcd: str) -> float:
    """Print the seconds from the first key to the last row; runs inside the node."""
    import grpc
    from aetcd import rpc

    keys: list[tuple[str, str]] = []
    for number in range(NODES):
        host = str(IPv4Address("172.16.0.1") + number)
        name, cidr = f"n{number}", str(IPv4Address("11.0.0.0") + 256 * number)
        about = (
            f'{{"Name":"{name}","Cluster":"default","IPAddresses":[{{"Type":"InternalIP","IP":"{host}"}}],'
        )
        keys.append(
            (f"nodes/v1/default/{name}", about + f'"IPv4AllocCIDR":{{"IP":"{cidr}","Mask":"////AA=="}}}}')
        )
        for pod in range(PODS // NODES):
            ip = str(IPv4Address(cidr) + pod + 2)
            keys.append((f"ip/v1/default/{ip}", f'{{"IP":"{ip}","Mask":null,"HostIP":"{host}","ID":4711}}'))
    last = IpcacheKey.of(IPv4Network(keys[-1][0].rpartition("/")[2])).pack()
    with grpc.insecure_channel(etcd) as channel, open_map(IPCACHE) as ipcache:
        store = rpc.KVStub(channel)
        began = time.perf_counter()
        for begin in range(0, len(keys), BATCH):
            puts = [
                rpc.RequestOp(
                    request_put=rpc.PutRequest(key=f"cilium/state/{key}".encode(), value=value.encode())
                )
                for key, value in keys[begin : begin + BATCH]
            ]
            store.Txn(rpc.TxnRequest(success=puts))
        while ipcache.lookup(last) is None or sum(1 for _ in ipcache.items()) < PODS + NODES:
            if time.perf_counter() - began > 280:
                raise AssertionError("the pods did not come within 280 s")
            time.sleep(0.05)
        return time.perf_counter() - began
