"""Short functions for the packets that tests send."""

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoReply, ICMPv6EchoRequest, IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from tests.kernel.datapath.world import NET_MAC, Pod

BROADCAST = "ff:ff:ff:ff:ff:ff"


def from_pod(pod: Pod) -> Packet:
    """Return the frame of a packet from the pod."""
    return Ether(src=pod.mac, dst=pod.host_mac)


def from_host() -> Packet:
    """Return the frame of a packet that the host sends through cilium_host."""
    return Ether(src=NET_MAC, dst=NET_MAC)


def ip(source: str, destination: str) -> Packet:
    """Return the network header of the addresses' family."""
    return (IPv6 if ":" in source else IP)(src=source, dst=destination)


def tcp(source: str, destination: str, flags: str, *, sport: int = 40000, dport: int = 80) -> Packet:
    """Return a TCP segment."""
    return ip(source, destination) / TCP(sport=sport, dport=dport, flags=flags)


def udp(source: str, destination: str, *, sport: int = 40000, dport: int = 53) -> Packet:
    """Return a UDP datagram."""
    return ip(source, destination) / UDP(sport=sport, dport=dport) / b"payload"


def echo(source: str, destination: str, *, reply: bool = False, id: int = 77) -> Packet:  # noqa: A002
    """Return an ICMP echo, request or reply."""
    if ":" in source:
        return ip(source, destination) / (ICMPv6EchoReply if reply else ICMPv6EchoRequest)(id=id, seq=1)
    return IP(src=source, dst=destination) / ICMP(type=0 if reply else 8, id=id, seq=1)


def who_has(pod: Pod, target: str) -> Packet:
    """Return the pod's ARP request for an address."""
    question = ARP(op=1, hwsrc=pod.mac, psrc=pod.ip, hwdst="00:00:00:00:00:00", pdst=target)
    return Ether(src=pod.mac, dst=BROADCAST) / question
