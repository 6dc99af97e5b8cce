"""What our programs take of a packet that leaves the cluster by an egress gateway, by BPF_PROG_TEST_RUN.

On the pod's node the kernel runs the program over and over on one packet. On the gateway a run changes the
packet, so each is timed alone, and beside it what comes out of the tunnel for a pod of the node itself.
The tunnel and routes there are a test's: the kernel's test run has neither.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from statistics import median

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from cells.maps.bpf import test_run
from cells.maps.records.cluster import TUNNEL_GATEWAYS, EgressKey, EgressValue, TunnelConfig
from cells.maps.records.flows import DEVICE_MASQUERADE_IPV4, DeviceConfig
from tests.bench.packets import CALLS, HOPS, POD, ns_a_packet
from tests.bench.stats import Figure, Sample
from tests.kernel.datapath.packets import from_pod, udp
from tests.kernel.datapath.world import IFINDEX, NODE, OUTSIDE, REDIRECT, A, World, raw
from tests.kernel.datapath_overlay.recorder import Route
from tests.kernel.datapath_overlay.world import IFINDEX as TUNNEL
from tests.kernel.datapath_overlay.world import MTU, OTHER_NODE, PORT, REMOTE, REMOTE_IDENTITY, OverlayWorld

OWN, HOP = "0a:00:00:00:00:09", "0a:00:00:00:00:0a"
EGRESS_IP = "203.0.113.5"
LEAVES = Route(0, IFINDEX, raw(OWN), raw(HOP))


def policy(world: World, pod: str, gateway: str, egress: str = "0.0.0.0") -> None:
    """Return a policy by which the pod's packets to the world leave by this gateway."""
    key = EgressKey(IPv4Address(pod), IPv4Interface(f"{OUTSIDE}/32"))
    value = EgressValue(IPv4Address(egress), IPv4Address(gateway))
    world.maps["cilium_egress_gw_policy_v4"].update(key.pack(), value.pack())
    world.bump(0)


def on_the_node(world: World) -> dict[str, float]:
    """Run from a pod to the world: without gateways, with policies for other pods, and to its gateway."""
    packet = from_pod(A) / udp(A.ip, OUTSIDE)
    packet[IP].ttl = HOPS
    found = {}
    for what, flags, selected in (
        ("no gateways served", 0, False),
        ("no policy selects it", TUNNEL_GATEWAYS, False),
        ("to its gateway", TUNNEL_GATEWAYS, True),
    ):
        world.reset()
        config = TunnelConfig(TUNNEL, MTU, PORT, IPv4Address(NODE), flags)
        world.maps["hive_tunnel"].update(bytes(4), config.pack())
        policy(world, A.ip if selected else REMOTE, OTHER_NODE)
        found[f"out of a pod, {what}"] = ns_a_packet(world, A, POD, bytes(packet))
    return found


def on_the_gateway(world: OverlayWorld) -> dict[str, float]:
    """Run for another node's pod: outwards, and the reply; beside them a packet for a pod of this node."""
    world.reset()
    world.set_tunnel(on=True, flags=TUNNEL_GATEWAYS)
    device = DeviceConfig(raw(OWN), IPv4Address(NODE), flags=DEVICE_MASQUERADE_IPV4)
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), device.pack())
    policy(world, REMOTE, NODE, EGRESS_IP)
    frame = Ether(src=HOP, dst=OWN)
    outwards = bytes(frame / IP(src=REMOTE, dst=OUTSIDE) / UDP(sport=40000, dport=53) / b"payload")
    world.recorder.comes_from(OTHER_NODE, REMOTE_IDENTITY, LEAVES)
    port = world._run("hive_from_vxlan", outwards, 1).packet[UDP].sport
    answer = bytes(frame / IP(src=OUTSIDE, dst=EGRESS_IP) / UDP(sport=53, dport=port) / b"payload")
    found = {
        "gateway, outwards": alone(world, "hive_from_vxlan", outwards),
        "gateway, into a pod of its own": alone(
            world, "hive_from_vxlan", bytes(frame / udp(REMOTE, A.ip, sport=40001))
        ),
    }
    world.recorder.nothing(LEAVES)
    found["gateway, the answer back into the tunnel"] = alone(world, "hive_from_device", answer)
    return found


def alone(world: World, program: str, packet: bytes) -> float:
    """Return the median of single runs in ns."""
    took = []
    for _ in range(CALLS):
        run = test_run(world.programs[program], packet)
        if run.retval != REDIRECT:
            raise RuntimeError(f"{program}: the packet was not sent on, but {run.retval}")
        took.append(run.duration_ns)
    return median(took)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return ns per packet of each kind, a value a round."""
    del folder
    found: dict[str, list[float]] = defaultdict(list)
    with World() as node, OverlayWorld() as gateway:
        for index in range(rounds + 1):
            for what, took in {**on_the_node(node), **on_the_gateway(gateway)}.items():
                if index:  # the first round warms up
                    found[what].append(took)
    return [Figure(f"egress gateway: {what}", "ns", Sample(tuple(values))) for what, values in found.items()]
