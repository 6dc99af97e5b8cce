"""Datapath time of a packet to and from another node, by BPF_PROG_TEST_RUN.

Not measured: decapsulation, since the test run has no tunnel metadata, and a pod's way out past the stack,
since no route leads there.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable
from ipaddress import IPv4Address, ip_network
from pathlib import Path

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from cells.datapath.settings import DatapathSettings
from cells.maps.records.cluster import IpcacheKey, IpcacheValue, TunnelConfig
from cells.maps.records.flows import DeviceConfig
from tests.bench.packets import HOPS, HOST, POD, ns_a_packet
from tests.bench.stats import Figure, Sample
from tests.kernel.datapath.packets import from_host, from_pod, tcp
from tests.kernel.datapath.world import IFINDEX, NODE, A, Pod, World

OTHER_NODE, REMOTE, REMOTE_IDENTITY = "192.168.7.8", "10.2.0.5", 4711
TUNNEL_IFINDEX, MTU, PORT = 77, 1450, 8472
DEVICE = "hive_from_device"

Packet = tuple[Pod, str, bytes]


def native(world: World) -> dict[str, Packet]:
    """Run by routes: from the pod to the stack, and from the stack to the pod."""
    world.maps["hive_tunnel"].update(bytes(4), TunnelConfig().pack())
    world.bump(0)
    world.pod_sends(A, from_pod(A) / tcp(A.ip, REMOTE, "S"))
    out = from_pod(A) / tcp(A.ip, REMOTE, "A")
    world.host_sends(from_host() / tcp(REMOTE, A.ip, "S", sport=40001))
    back = from_host() / tcp(REMOTE, A.ip, "A", sport=40001)
    out[IP].ttl = back[IP].ttl = HOPS
    return {
        "across nodes, native: out of a pod": (A, POD, bytes(out)),
        "across nodes, native: into a pod": (A, HOST, bytes(back)),
    }


def tunnelled(world: World) -> dict[str, Packet]:
    """Run with VXLAN: from the pod to the tunnel, and an outer packet at the node's device."""
    config = TunnelConfig(TUNNEL_IFINDEX, MTU, PORT, IPv4Address(NODE))
    world.maps["hive_tunnel"].update(bytes(4), config.pack())
    world.bump(0)
    world.pod_sends(A, from_pod(A) / tcp(A.ip, REMOTE, "S", sport=40002))
    out = from_pod(A) / tcp(A.ip, REMOTE, "A", sport=40002)
    outside = Ether() / IP(src=OTHER_NODE, dst=NODE, ttl=HOPS) / UDP(sport=50000, dport=PORT) / bytes(100)
    out[IP].ttl = HOPS
    return {
        "across nodes, VXLAN: out of a pod": (A, POD, bytes(out)),
        "across nodes, VXLAN: at the device": (A, DEVICE, bytes(outside)),
    }


def routed(world: World) -> dict[str, Packet]:
    """Run past the stack: from the device into the pod."""
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), DeviceConfig(bytes(6)).pack())
    frame = Ether(src="0a:00:00:00:00:0a", dst="0a:00:00:00:00:09")
    world.device_gets(frame / tcp(REMOTE, A.ip, "S", sport=40003))
    back = frame / tcp(REMOTE, A.ip, "A", sport=40003)
    back[IP].ttl = HOPS
    return {"across nodes, past the stack: from the device into a pod": (A, DEVICE, bytes(back))}


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return ns per packet of each kind, a value a round."""
    del folder
    found: dict[str, list[float]] = defaultdict(list)
    with World() as stack, World(DatapathSettings(enable_host_legacy_routing=False)) as past:
        kinds: tuple[tuple[World, Callable[[World], dict[str, Packet]]], ...] = (
            (stack, native),
            (stack, tunnelled),
            (past, routed),
        )
        for index in range(rounds + 1):
            for world, packets in kinds:
                world.reset()
                known = IpcacheValue(REMOTE_IDENTITY, IPv4Address(OTHER_NODE), 0, 0)
                world.maps["cilium_ipcache"].update(IpcacheKey.of(ip_network(REMOTE)).pack(), known.pack())
                for what, (sender, program, packet) in packets(world).items():
                    took = ns_a_packet(world, sender, program, packet)
                    if index:  # the first round warms up
                        found[what].append(took)
    return [Figure(what, "ns", Sample(tuple(values)), None) for what, values in found.items()]
