"""An attacker's frames to a running node: from a pod, from outside, from another runtime's bridge.

Pods and the node receive exactly what a plain model of policy allows. ``make soak`` sends more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import pytest

from hive.lab import pods
from hive.lab.namespaces import Namespaces, inside, new_netns
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.hostile import (
    HOST_PORT,
    PORTS,
    UDP,
    WORLD,
    WORLD6,
    addresses_of,
    asks_open,
    in_turn,
    own_link_local,
    policies,
)
from tests.node.agent.manifests import this_node, write
from tests.node.agent.node_ports import NODE6, OUTSIDE6, command, give_addresses
from tests.support.agents import known_pods, serving
from tests.support.hostile_frames import Attacker
from tests.support.hostile_node import (
    UDP_PORT,
    Field,
    Receiver,
    Sender,
    addresses,
    datagram,
    host_receiver,
    link_socket,
    mac_of,
    quotes_answer,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(1200)]

COUNT: Final = int(os.environ.get("FRAMES", "250"))
"""Frames of each sender."""
BRIDGE, BRIDGE6, BEHIND, BEHIND6 = "172.17.0.1", "fd17::1", "172.17.0.2", "fd17::2"
PODS_AT: Final = ("10.0.0.0/16", "fd00:5::/112")
MODES: Final = {
    "by the stack": (),
    "past the stack": ("--kube-proxy-replacement=true", "--devices=upl+"),
}


@contextmanager
def other_bridge(lab: Lab) -> Iterator[Namespaces]:
    """A host behind a device of another runtime."""
    with new_netns() as behind, lab.open() as node:
        node.run(make_bridge, behind.net)
        for line in (
            f"address add {BEHIND}/16 dev eth0",
            f"-6 address add {BEHIND6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {BRIDGE}",
            f"-6 route add default via {BRIDGE6}",
        ):
            behind.run(command, line)
        yield behind


def make_bridge(behind: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="docker0", kind="veth", peer={"ifname": "eth0", "net_ns_fd": behind})
        (index,) = ip.link_lookup(ifname="docker0")
        ip.addr("add", index=index, address=BRIDGE, prefixlen=16)
        ip.addr("add", index=index, address=BRIDGE6, prefixlen=64, flags=0x02)
        ip.link("set", index=index, state="up")


def allow_forwarding() -> None:
    """As installers of clusters do."""
    Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")


@contextmanager
def battlefield(lab: Lab, folder: Path, settings: tuple[str, ...]) -> Iterator[Field]:
    give_addresses(lab)
    names = ("attacker", "closed", "open", "friend")
    known_pods(folder, *names)
    write(folder, "node", this_node("yes"))
    with ExitStack() as stack:
        behind = stack.enter_context(other_bridge(lab))
        more = (
            f"--ipv4-range={PODS_AT[0]}",
            "--enable-ipv6=true",
            f"--ipv6-range={PODS_AT[1]}",
            "--enable-host-firewall=true",
        )
        serving(lab, f"--manifests-dir={folder}", *more, *settings)
        node, outside = (stack.enter_context(each) for each in (lab.open(), lab.open_outside()))
        node.run(allow_forwarding)
        pod = {name: pods.add(lab, name) for name in names}
        at = {name: stack.enter_context(lab.open_pod(name)) for name in names}
        for target, gateway in ((ip, NODE6 if ":" in ip else NODE_ADDRESS) for ip in PODS_AT):
            outside.run(command, f"route add {target} via {gateway}")
        for way in (outside, behind):
            for target in (pod["closed"].ipv4, pod["closed"].ipv6):
                eventually(partial(way.run, ping, target, 1))
        write(folder, "policies", *policies())
        for way in (outside, behind, at["attacker"]):
            for target in (pod["closed"].ipv4, pod["closed"].ipv6):
                eventually(lambda: not way.run(ping, target, 1, 0.2))  # noqa: B023  # at once
        eventually(lambda: not outside.run(ping, NODE_ADDRESS, 1, 0.2))
        for target in (pod["closed"].ipv4, pod["closed"].ipv6):
            eventually(partial(at["friend"].run, ping, target, 1))
        yield field(stack, node, outside, behind, pod, at)


def field(
    stack: ExitStack,
    node: Namespaces,
    outside: Namespaces,
    behind: Namespaces,
    pod: dict[str, pods.Attached],
    at: dict[str, Namespaces],
) -> Field:
    """The senders and receivers of a node."""
    link_local = node.run(own_link_local, "uplink")
    of_pods = [ip for each in pod.values() for ip in (each.ipv4, each.ipv6)]
    routers = {ip_address(ip) for ip in node.run(addresses_of, "cilium_host")}
    own = [NODE_ADDRESS, NODE6, BRIDGE, BRIDGE6, *map(str, sorted(routers, key=str))]
    local = routers | {*addresses(*of_pods, *own, "127.0.0.1", "::1")}
    sources = [*of_pods, *own, "127.0.0.1", "::1", WORLD, WORLD6, OUTSIDE_ADDRESS, OUTSIDE6, BEHIND, BEHIND6]
    targets = [
        *(pod["closed"].ipv4, pod["closed"].ipv6, pod["closed"].ipv4, pod["closed"].ipv6),
        *(pod["open"].ipv4, pod["open"].ipv6, pod["friend"].ipv4, pod["friend"].ipv6),
        *(*own, link_local, "127.0.0.1", "::1", WORLD, WORLD6),
        *("224.0.0.1", "255.255.255.255", "192.168.50.255", "ff02::1", "ff02::2", "fd50::"),
    ]
    ends = {
        "attacker": (at["attacker"], "eth0", pod["attacker"].host_mac),
        "outside": (outside, "node", mac_of(node, "uplink")),
        "bridge": (behind, "eth0", mac_of(node, "docker0")),
    }
    opposite = {
        "attacker": (pod["attacker"].ipv4, pod["attacker"].ipv6),
        "outside": (OUTSIDE_ADDRESS, OUTSIDE6),
        "bridge": (BEHIND, BEHIND6),
    }
    senders: list[Sender] = []
    allowed: dict[str, Callable[[int], bytes]] = {}
    for index, (name, (where, link, mac)) in enumerate(ends.items()):
        macs = mac_of(where, link), mac
        own_addresses = addresses(*opposite[name]) if name == "attacker" else frozenset()
        weighted = sources + list(opposite[name]) * 8
        attacker = Attacker(index, macs, weighted, targets, PORTS, first=index * 10_000_000 + 1)
        sock = stack.enter_context(link_socket(where, link))
        as_world = frozenset(ip for ip in addresses(*own) if ip.version == 6 and name == "bridge")
        senders.append(Sender(name, sock, attacker, own_addresses, as_world))
        made = [
            datagram(macs, source, target)
            for source, target in zip(opposite[name], (pod["open"].ipv4, pod["open"].ipv6), strict=True)
        ]
        allowed[name] = partial(in_turn, made)
    may = {"closed": lambda _, __: False, "open": asks_open}
    receivers = [
        Receiver(
            name,
            stack.enter_context(link_socket(at[name], "eth0")),
            addresses(pod[name].ipv4, pod[name].ipv6),
            may.get(name, lambda _, __: True),
        )
        for name in pod
    ]
    for family in (socket.AF_INET, socket.AF_INET6):
        with inside(at["open"]):
            asked = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        if family == socket.AF_INET6:
            asked.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        asked.bind(("", UDP_PORT))
    host = stack.enter_context(host_receiver("the node", node, reaches_node))
    return Field(senders, receivers, [host], local, set(addresses(*own)) | routers, allowed)


def reaches_node(sender: Sender, protocol: int, payload: bytes) -> bool:
    """What the node may take. Devices without a program are not the node's policy's."""
    if sender.name == "bridge":
        return True
    asks = protocol == UDP and payload[2:4] == HOST_PORT.to_bytes(2, "big")
    return sender.name == "outside" and (asks or quotes_answer(protocol, payload, HOST_PORT))


@pytest.mark.parametrize("mode", MODES)
def test_pods_and_the_node_get_what_policy_allows_and_nothing_else(
    node: Lab, tmp_path: Path, mode: str
) -> None:
    with battlefield(node, tmp_path, MODES[mode]) as attacked:
        attacked.attack(COUNT)
        attacked.settle()
