"""An attacker's frames to two nodes with a tunnel: from a pod, from outside, and as forged tunnel packets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from random import Random
from typing import Any, Final

import pytest
from click.testing import CliRunner
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw

from hive.lab import pods
from hive.lab.cluster import Cluster
from hive.lab.cluster.manifests import node_objects
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import ROOT, Lab, exclusive
from hive.lab.traffic.probe import ping
from hive.main import cli
from tests.kernel.datapath.model_packet import Flow
from tests.node.agent.hostile import (
    HOST_PORT,
    PORTS,
    WORLD,
    WORLD6,
    addresses_of,
    asks_open,
    in_turn,
    own_link_local,
    policies,
)
from tests.support.hostile_frames import Attacker
from tests.support.hostile_node import (
    UDP_PORT,
    Field,
    HostReceiver,
    Receiver,
    Sender,
    addresses,
    datagram,
    host_receiver,
    link_socket,
    mac_of,
    quotes_answer,
)
from tests.support.namespaces import need_root
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(3600)]

NAME: Final = f"hostile-{os.getpid()}"
COUNT: Final = int(os.environ.get("FRAMES", "500"))
"""Frames of each sender; there are seven."""
SETTINGS: Final = ("--enable-ipv6=true", "--enable-host-firewall=true")
TUNNEL_PORT: Final = 8472
STRANGER: Final = "192.168.50.66"
ON: Final = {"attacker": 0, "open": 0, "closed": 0, "friend": 1, "open-2": 1, "closed-2": 1}
"""Which node each pod is on."""
UDP_NUMBER: Final = 17


def rules() -> list[dict[str, Any]]:
    """Those of one node, for the pods of two; nodes reach each other by the tunnel alone."""
    found = policies()
    for name in ("closed", "open"):
        (like,) = [each for each in found if each["metadata"]["name"] == name]
        twin = {"endpointSelector": {"matchLabels": {"app": f"{name}-2"}}, "ingress": like["spec"]["ingress"]}
        found.append({**like, "metadata": {"name": f"{name}-2"}, "spec": twin})
    (node,) = [each for each in found if each["metadata"]["name"] == "node"]
    tunnel = [{"ports": [{"port": str(TUNNEL_PORT), "protocol": "UDP"}]}]
    node["spec"]["ingress"].append({"fromEntities": ["remote-node"], "toPorts": tunnel})
    return found


def guarded_nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Those of the cluster, with the label that the policy of nodes selects."""
    found = [one for lab in cluster.nodes() for one in node_objects(lab, cluster.place(lab))]
    return [{**one, "metadata": {**one["metadata"], "labels": {"guarded": "yes"}}} for one in found]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    need_root()
    found = Cluster(NAME)
    try:
        up = ("lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--pods", "0", "--tunnel", *SETTINGS)
        done = CliRunner().invoke(cli, up, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))


def in_tunnel(macs: tuple[str, str], source: str, node: str, random: Random) -> Callable[[bytes], bytes]:
    """The frame as a packet of the tunnel to a node, with the identity that it claims."""

    def made(frame: bytes) -> bytes:
        vni = random.choice((1, 2, 3, 4, 6, 7, 9, 10, 256, 257, 300, 0xFFFFFF))
        outside = Ether(src=macs[0], dst=macs[1]) / IP(src=source, dst=node)
        packet = outside / UDP(sport=50000, dport=TUNNEL_PORT, chksum=0)
        return bytes(packet / VXLAN(vni=vni, flags="Instance") / Raw(frame))

    return made


@contextmanager
def battlefield(cluster: Cluster) -> Iterator[Field]:
    nodes = cluster.nodes()
    pod = {name: cluster.add_pod(nodes[number], name) for name, number in ON.items()}
    with ExitStack() as stack:
        at = {name: stack.enter_context(nodes[number].open_pod(name)) for name, number in ON.items()}
        outside = stack.enter_context(cluster.network.open())
        every = [ip for each in pod.values() for ip in (each.ipv4, each.ipv6)]
        for target in every:
            eventually(partial(at["friend"].run, ping, target, 1))
            eventually(partial(at["attacker"].run, ping, target, 1))
        cluster.manifests.write("nodes", guarded_nodes(cluster))
        cluster.manifests.write("policies", rules())
        closed = [ip for name in ("closed", "closed-2") for ip in (pod[name].ipv4, pod[name].ipv6)]
        for target in closed:
            eventually(lambda: not at["attacker"].run(ping, target, 1, 0.2))  # noqa: B023  # at once
            eventually(lambda: not outside.run(ping, target, 1, 0.2))  # noqa: B023
            eventually(partial(at["friend"].run, ping, target, 1))
        for lab in nodes:
            eventually(lambda: not outside.run(ping, cluster.place(lab).ipv4, 1, 0.2))  # noqa: B023
        yield _field(stack, cluster, nodes, outside, pod, at)


def _field(
    stack: ExitStack,
    cluster: Cluster,
    nodes: list[Lab],
    outside: Namespaces,
    pod: dict[str, pods.Attached],
    at: dict[str, Namespaces],
) -> Field:
    there = [stack.enter_context(lab.open()) for lab in nodes]
    places = [cluster.place(lab) for lab in nodes]
    own = [
        [places[n].ipv4, places[n].ipv6, *there[n].run(addresses_of, "cilium_host")]
        for n in range(len(nodes))
    ]
    pods_of = [
        [ip for name, n in ON.items() if n == number for ip in (pod[name].ipv4, pod[name].ipv6)]
        for number in range(len(nodes))
    ]
    groups = ["224.0.0.1", "255.255.255.255", "192.168.50.255", "ff02::1", "ff02::2", "fd50:1::"]
    loopback = ["127.0.0.1", "::1"]
    router4, router6 = places[0].routers
    segment = mac_of(outside, "segment-0")
    uplinks = [mac_of(each, "uplink") for each in there]
    first = iter(range(1, 10**9, 10_000_000))
    senders: list[Sender] = []
    allowed: dict[str, Callable[[int], bytes]] = {}

    def sender(
        name: str,
        where: Namespaces,
        link: str,
        macs: tuple[str, str],
        sources: list[str],
        targets: list[str],
        **more: Any,
    ) -> None:
        number = next(first)
        attacker = Attacker(number, macs, sources, targets, PORTS, first=number)
        senders.append(Sender(name, stack.enter_context(link_socket(where, link)), attacker, **more))

    def must_arrive(name: str, macs: tuple[str, str], ends: list[tuple[str, str]]) -> None:
        allowed[name] = partial(in_turn, [datagram(macs, source, target) for source, target in ends])

    everything = [*pods_of[0], *pods_of[1], *own[0], *own[1], *loopback, WORLD, WORLD6, router4, router6]
    mine = [pod["attacker"].ipv4, pod["attacker"].ipv6]
    macs = mac_of(at["attacker"], "eth0"), pod["attacker"].host_mac
    sender(
        "attacker",
        at["attacker"],
        "eth0",
        macs,
        [*everything, *mine * 20],
        [*everything, *groups],
        own=addresses(*mine),
    )
    to_open = [(mine[0], pod["open"].ipv4), (mine[1], pod["open-2"].ipv6), (mine[0], pod["open-2"].ipv4)]
    must_arrive("attacker", macs, to_open)
    # Each from the addresses of that node: those of the other are known to come by the tunnel.
    for number, place in enumerate(places):
        name, macs = f"outside {number + 1}", (segment, uplinks[number])
        forged = [*pods_of[number], *own[number], *loopback, WORLD, WORLD6, *[router4, router6] * 8]
        near = own_link_local_of(there[number])
        targets = [*pods_of[number] * 2, *own[number], *loopback, *groups, near, WORLD, WORLD6]
        sender(name, outside, "segment-0", macs, forged, targets)
        target = pod["open" if number == 0 else "open-2"]
        must_arrive(name, macs, [(router4, target.ipv4), (router6, target.ipv6)])
        for claimed in (STRANGER, place.ipv4):
            wrapped = in_tunnel(macs, claimed, place.ipv4, Random(number))  # noqa: S311  # the same each time
            inner = [*everything, *everything]
            sender(
                f"tunnel {claimed} to {number + 1}",
                outside,
                "segment-0",
                macs,
                inner,
                [*pods_of[number], *own[number]],
                wrapped=wrapped,
                believed=False,
            )
    receivers = [
        Receiver(
            name,
            stack.enter_context(link_socket(at[name], "eth0")),
            addresses(pod[name].ipv4, pod[name].ipv6),
            may_get(name),
        )
        for name in pod
    ]
    for name in ("open", "open-2"):
        for family in (socket.AF_INET, socket.AF_INET6):
            with inside(at[name]):
                asked = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            if family == socket.AF_INET6:
                asked.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            asked.bind(("", UDP_PORT))
    hosts: list[HostReceiver] = [
        stack.enter_context(host_receiver(f"node {number + 1}", each, reaches_node))
        for number, each in enumerate(there)
    ]
    of_nodes = set(addresses(*own[0], *own[1]))
    local = {*of_nodes, *addresses(*pods_of[0], *pods_of[1], *loopback)}
    return Field(senders, receivers, hosts, local, of_nodes, allowed)


def may_get(name: str) -> Callable[[Sender, Flow], bool]:
    """What policy lets a pod have."""
    if name.startswith("closed"):
        return lambda _, __: False
    return asks_open if name.startswith("open") else lambda _, __: True


def reaches_node(sender: Sender, protocol: int, payload: bytes) -> bool:
    """What a node may take. The tunnel is the kernel's: what comes in it is seen where it arrives."""
    if protocol != UDP_NUMBER:
        return sender.name.startswith("outside") and quotes_answer(protocol, payload, HOST_PORT)
    if payload[2:4] == TUNNEL_PORT.to_bytes(2, "big"):
        return not sender.name.startswith("outside")
    return sender.name.startswith("outside") and payload[2:4] == HOST_PORT.to_bytes(2, "big")


def own_link_local_of(node: Namespaces) -> str:
    return str(ip_address(node.run(own_link_local, "uplink")))


def test_pods_and_nodes_get_what_policy_allows_and_nothing_else(cluster: Cluster) -> None:
    with battlefield(cluster) as attacked:
        attacked.attack(COUNT)
        attacked.settle()
