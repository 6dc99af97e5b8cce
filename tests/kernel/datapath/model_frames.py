"""Generates frames for the property tests: few hosts and ports, so that flows meet, and some odd frames."""

from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6ND_NS,
    ICMPv6ND_RS,
    ICMPv6NDOptSrcLLAddr,
    ICMPv6PacketTooBig,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from tests.kernel.datapath.model_icmp6 import link_local
from tests.kernel.datapath.world import (
    NET_MAC,
    NODE,
    NODE6,
    OUTSIDE,
    OUTSIDE6,
    ROUTER,
    ROUTER6,
    A,
    B,
    Pod,
    raw,
)

KNOWN = "203.0.113.5"
"""An address outside the cluster with an identity."""
PODS = (A, B)
KNOWN6 = "2001:db8:5::5"
SHORTEST = 34
SHORTEST_IPV6 = 54
"""Bytes: the kernel runs no program on an IP frame without a complete header."""
ADDRESSES = (A.ip, B.ip, ROUTER, NODE, OUTSIDE, KNOWN)
ADDRESSES6 = (A.ip6, B.ip6, ROUTER6, NODE6, OUTSIDE6, KNOWN6, "ff02::1", "fe80::1")
PORTS = (53, 80, 40000)
TCP_FLAGS = ("S", "SA", "A", "FA", "RA", "R", "SF", "SR", "PA", "")
ICMP_KINDS = (0, 3, 5, 8, 11, 12, 13, 14)

addresses = st.sampled_from(ADDRESSES)
addresses6 = st.sampled_from(ADDRESSES6)
ports = st.sampled_from(PORTS)
pods = st.sampled_from(PODS)
hops = st.sampled_from((64, 64, 64, 255, 2, 1, 0))


@st.composite
def transports(draw: st.DrawFn) -> Packet:
    """Generate the payload of an IP packet."""
    match draw(st.sampled_from(("tcp", "tcp", "udp", "icmp", "other"))):
        case "tcp":
            return TCP(sport=draw(ports), dport=draw(ports), flags=draw(st.sampled_from(TCP_FLAGS)))
        case "udp":
            return UDP(sport=draw(ports), dport=draw(ports)) / Raw(b"payload")
        case "icmp":
            kind, code = draw(st.sampled_from(ICMP_KINDS)), draw(st.sampled_from((0, 4)))
            return ICMP(type=kind, code=code, id=draw(st.sampled_from((1, 80)))) / Raw(bytes(28))
        case _:
            return Raw(bytes(40))


@st.composite
def ipv4(draw: st.DrawFn, source: str | None = None) -> Packet:
    """Generate a well-formed IPv4 packet, from any source unless one is given."""
    transport = draw(transports())
    packet = IP(
        src=source or draw(addresses), dst=draw(addresses), ttl=draw(hops), id=draw(st.integers(0, 65535))
    )
    if isinstance(transport, Raw):
        packet.proto = draw(st.sampled_from((2, 47, 132, 255)))
    if draw(st.integers(0, 7)) == 0:
        packet.id, packet.flags, packet.frag = (
            9,
            draw(st.sampled_from((0, 1))),
            draw(st.sampled_from((0, 0, 5))),
        )
        packet.proto = packet.proto if isinstance(transport, Raw) else transport_number(transport)
    if draw(st.integers(0, 9)) == 0:
        packet.options = [b"\x01" * 8]
    if draw(st.integers(0, 9)) == 0:
        packet.chksum = draw(st.sampled_from((0xFEFF, 0xFEFE, 0xFFFF, 0)))  # where the carry of a hop goes
    return packet / transport


def transport_number(transport: Packet) -> int:
    """Return the protocol number, which scapy does not fill in for a fragment."""
    return {TCP: 6, UDP: 17, ICMP: 1}[type(transport)]


@st.composite
def messages6(draw: st.DrawFn) -> Packet:
    """Generate ICMPv6: echoes, errors and neighbour discovery."""
    kinds = (
        ICMPv6EchoRequest(id=draw(st.sampled_from((1, 80)))),
        ICMPv6EchoReply(id=draw(st.sampled_from((1, 80)))),
        ICMPv6DestUnreach(code=draw(st.sampled_from((0, 4)))) / Raw(bytes(48)),
        ICMPv6PacketTooBig() / Raw(bytes(48)),
        ICMPv6TimeExceeded() / Raw(bytes(48)),
        ICMPv6ND_RS(),
    )
    return draw(st.sampled_from(kinds))


EXTENSIONS = (
    IPv6ExtHdrHopByHop(),
    IPv6ExtHdrDestOpt(),
    IPv6ExtHdrRouting(addresses=["fd00::9"]),
    IPv6ExtHdrFragment(id=9, m=1, offset=0),
    IPv6ExtHdrFragment(id=9, m=0, offset=5),
)


@st.composite
def ipv6(draw: st.DrawFn, source: str | None = None) -> Packet:
    """Generate a well-formed IPv6 packet, sometimes with extension headers."""
    packet = IPv6(src=source or draw(addresses6), dst=draw(addresses6), hlim=draw(hops))
    if draw(st.integers(0, 4)) == 0:
        for extension in draw(st.lists(st.sampled_from(EXTENSIONS), min_size=1, max_size=8)):
            packet /= extension.copy()
    match draw(st.sampled_from(("tcp", "tcp", "udp", "icmp", "other"))):
        case "tcp":
            return packet / TCP(sport=draw(ports), dport=draw(ports), flags=draw(st.sampled_from(TCP_FLAGS)))
        case "udp":
            return packet / UDP(sport=draw(ports), dport=draw(ports)) / Raw(b"payload")
        case "icmp":
            return packet / draw(messages6())
    packet.lastlayer().nh = draw(st.sampled_from((1, 47, 59, 132)))
    return packet / Raw(bytes(40))


@st.composite
def solicitations(draw: st.DrawFn, pod: Pod) -> bytes:
    """Generate neighbour solicitations, some of them invalid."""
    target = draw(addresses6)
    message = ICMPv6ND_NS(tgt=target)
    if draw(st.booleans()):
        message /= ICMPv6NDOptSrcLLAddr(lladdr=pod.mac)
    source = draw(st.sampled_from((pod.ip6, "::", "fe80::2", str(link_local(raw(pod.mac))))))
    asked = draw(st.sampled_from(("ff02::1:ff00:1",) * 5 + (target, "2001:db8::1")))
    header = IPv6(src=source, dst=asked, hlim=draw(st.sampled_from((255, 255, 255, 64))))
    return bytes(Ether(src=pod.mac, dst="33:33:ff:00:00:01") / header / message)


@st.composite
def pod_frames(draw: st.DrawFn, pod: Pod) -> bytes:
    """Generate frames of a pod, most of them with its own source address."""
    if draw(st.booleans()):
        source6 = draw(st.sampled_from((pod.ip6,) * 9 + ADDRESSES6))
        return bytes(Ether(src=pod.mac, dst=pod.host_mac) / draw(ipv6(source6)))
    source = draw(st.sampled_from((pod.ip,) * 9 + ADDRESSES))
    return bytes(Ether(src=pod.mac, dst=pod.host_mac) / draw(ipv4(source)))


@st.composite
def host_frames(draw: st.DrawFn) -> bytes:
    """Generate frames that the host sends through cilium_host."""
    return bytes(Ether(src=NET_MAC, dst=NET_MAC) / draw(st.one_of(ipv4(), ipv6())))


CONVERSATIONS = (
    *((A.ip, B.ip), (B.ip, A.ip), (A.ip, OUTSIDE), (ROUTER, A.ip)),
    *((A.ip6, B.ip6), (B.ip6, A.ip6), (ROUTER6, A.ip6)),
)
"""Initiator and peer of each flow. Few, so that packets of one follow each other."""


@st.composite
def quotes(draw: st.DrawFn, source: str, destination: str) -> bytes:
    """Generate the quoted part of an error: a packet of a flow, whole or truncated, or garbage."""
    sport, dport = draw(st.sampled_from(((80, 40000), (40000, 80))))
    six = ":" in source
    echo = draw(st.sampled_from((ICMPv6EchoRequest, ICMPv6EchoReply)))(id=77) if six else ICMP(id=77)
    body = draw(st.sampled_from((TCP(sport=sport, dport=dport), UDP(sport=sport, dport=dport), echo)))
    packet = bytes((IPv6 if six else IP)(src=source, dst=destination) / body)
    return draw(st.sampled_from((packet, packet, packet[: (40 if six else 20) + 8], bytes(48))))


@st.composite
def spoken(draw: st.DrawFn) -> tuple[Pod | None, bytes]:
    """Generate a packet of a flow, in either direction, and the pod that sends it; None: the host does."""
    starter, peer = draw(st.sampled_from(CONVERSATIONS))
    answers = draw(st.booleans())
    source, destination = (peer, starter) if answers else (starter, peer)
    sport, dport = (80, 40000) if answers else (40000, 80)
    match draw(st.sampled_from(("tcp",) * 6 + ("udp", "echo", "error"))):
        case "tcp":
            body = TCP(sport=sport, dport=dport, flags=draw(st.sampled_from(TCP_FLAGS)))
        case "udp":
            body = UDP(sport=sport, dport=dport)
        case "echo":
            body = (
                (ICMPv6EchoReply if answers else ICMPv6EchoRequest)(id=77)
                if ":" in source
                else ICMP(type=0 if answers else 8, id=77)
            )
        case _ if ":" in source:
            kind = draw(st.sampled_from((ICMPv6DestUnreach(code=4), ICMPv6PacketTooBig())))
            body = kind / Raw(draw(quotes(destination, source)))
        case _:
            body = ICMP(type=draw(st.sampled_from((3, 11))), code=draw(st.sampled_from((1, 4)))) / Raw(
                draw(quotes(destination, source))
            )
    pod = next((pod for pod in PODS if source in {pod.ip, pod.ip6}), None)
    ends = {"src": pod.mac, "dst": pod.host_mac} if pod else {"src": NET_MAC, "dst": NET_MAC}
    header = (IPv6 if ":" in source else IP)(src=source, dst=destination)
    return pod, bytes(Ether(**ends) / header / body)


@st.composite
def damaged(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """Generate a frame that is truncated or has changed header bytes."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 2))):
        frame[draw(st.integers(12, min(len(frame), 78) - 1))] = draw(st.integers(0, 255))
    shortest = SHORTEST_IPV6 if frame[12:14] == b"\x86\xdd" else SHORTEST
    if len(frame) < shortest:
        frame += bytes(shortest - len(frame))
    return bytes(frame[: draw(st.integers(shortest, len(frame)))]) if draw(st.booleans()) else bytes(frame)


@st.composite
def questions(draw: st.DrawFn, pod: Pod) -> bytes:
    """Generate ARP packets, most of them requests."""
    to = draw(st.sampled_from(("ff:ff:ff:ff:ff:ff", pod.host_mac, "0a:00:00:00:99:99")))
    message = ARP(
        op=draw(st.sampled_from((1, 1, 1, 2, 3))),
        hwsrc=pod.mac,
        psrc=draw(addresses),
        pdst=draw(addresses),
        hwlen=draw(st.sampled_from((6, 6, 6, 5))),
    )
    return bytes(Ether(src=pod.mac, dst=to) / message) + bytes(draw(st.sampled_from((0, 18))))
