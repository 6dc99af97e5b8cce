"""Packets of masqueraded flows, and the entries that they create."""

from __future__ import annotations

from ipaddress import ip_address

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from cells.maps.records.flows import CtEntry, CtKey
from tests.kernel.datapath.world import World

NAT = ("cilium_snat_v4_external", "cilium_snat_v6_external")


def ip(source: str, destination: str) -> Packet:
    layer = IPv6(src=source, dst=destination) if ":" in source else IP(src=source, dst=destination)
    return Ether(src="0a:00:00:00:00:09", dst="0a:00:00:00:00:08") / layer


def udp(source: str, destination: str, sport: int = 40000, dport: int = 53, body: bytes = b"x") -> Packet:
    return ip(source, destination) / UDP(sport=sport, dport=dport) / Raw(body)


def network(packet: Packet) -> Packet:
    return packet[IPv6] if IPv6 in packet else packet[IP]


def known_to_conntrack(world: World, packet: Packet, lifetime: int = 1 << 30) -> None:
    """Create the conntrack entry that the program at the pod's link would have created."""
    head, l4 = network(packet), packet[TCP] if TCP in packet else packet[UDP]
    protocol = 6 if TCP in packet else 17
    key = CtKey(ip_address(head.src), ip_address(head.dst), l4.dport, l4.sport, protocol)
    name = "global" if TCP in packet else "any"
    version = 6 if IPv6 in packet else 4
    table = world.maps[f"cilium_ct{version}_global" if name == "global" else f"cilium_ct_any{version}_global"]
    table.update(key.pack(), CtEntry(lifetime=lifetime).pack())


def age(world: World) -> None:
    """Set the creation of all NAT entries to long ago: new ones do not count as stale."""
    for name in NAT:
        for key, value in list(world.maps[name].items()):
            world.maps[name].update(key, bytes(8) + value[8:])


def mapped(world: World, version: int = 4) -> int:
    return sum(1 for _ in world.maps[f"cilium_snat_v{version}_external"].items())
