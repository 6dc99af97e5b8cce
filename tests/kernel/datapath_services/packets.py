"""Reads a packet's addresses and checks its checksums."""

from __future__ import annotations

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6PacketTooBig, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet


def ends(packet: Packet) -> tuple[str, int, str, int]:
    """Return source and destination, with ports."""
    network = packet[IPv6] if IPv6 in packet else packet[IP]
    transport = network.payload
    return network.src, transport.sport, network.dst, transport.dport


def intact(packet: Packet) -> bool:
    """Return whether its checksums are correct."""
    fresh = packet.copy()
    for layer, field in ((IP, "chksum"), (TCP, "chksum"), (UDP, "chksum"), (ICMP, "chksum")):
        if layer in fresh:
            delattr(fresh[layer], field)
    for layer in (ICMPv6DestUnreach, ICMPv6PacketTooBig):
        if layer in fresh:
            del fresh[layer].cksum
    return bytes(Ether(bytes(fresh))) == bytes(packet)
