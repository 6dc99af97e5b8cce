"""Frames for the property tests: of few hosts and ports, so that flows meet, and now and then something odd.

Needs: hypothesis, scapy.   Gives: strategies of frames.
"""

from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from tests.kernel.datapath.world import NET_MAC, NODE, OUTSIDE, ROUTER, A, B, Pod

KNOWN = "203.0.113.5"
"""Outside, but with an identity of its own."""
PODS = (A, B)
SHORTEST = 34
"""Bytes: the kernel runs no program on an IPv4 frame without its whole header."""
ADDRESSES = (A.ip, B.ip, ROUTER, NODE, OUTSIDE, KNOWN)
PORTS = (53, 80, 40000)
TCP_FLAGS = ("S", "SA", "A", "FA", "RA", "R", "SF", "SR", "PA", "")
ICMP_KINDS = (0, 3, 8, 11, 12, 13)

addresses = st.sampled_from(ADDRESSES)
ports = st.sampled_from(PORTS)
pods = st.sampled_from(PODS)
hops = st.sampled_from((64, 64, 64, 255, 2, 1, 0))


@st.composite
def transports(draw: st.DrawFn) -> Packet:
    """What is inside an IP packet."""
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
    """A well-formed IPv4 packet, from anybody if no source is given."""
    transport = draw(transports())
    packet = IP(
        src=source or draw(addresses), dst=draw(addresses), ttl=draw(hops), id=draw(st.integers(0, 65535))
    )
    if isinstance(transport, Raw):
        packet.proto = draw(st.sampled_from((2, 47, 132, 255)))
    if draw(st.integers(0, 9)) == 0:
        packet.options = [b"\x01" * 8]
    if draw(st.integers(0, 9)) == 0:
        packet.chksum = draw(st.sampled_from((0xFEFF, 0xFEFE, 0xFFFF, 0)))  # where the carry of a hop goes
    return packet / transport


@st.composite
def pod_frames(draw: st.DrawFn, pod: Pod) -> bytes:
    """What a pod might send: mostly packets of its own."""
    source = draw(st.sampled_from((pod.ip,) * 9 + ADDRESSES))
    return bytes(Ether(src=pod.mac, dst=pod.host_mac) / draw(ipv4(source)))


@st.composite
def host_frames(draw: st.DrawFn) -> bytes:
    """What the host might send out of cilium_host."""
    return bytes(Ether(src=NET_MAC, dst=NET_MAC) / draw(ipv4()))


CONVERSATIONS = ((A.ip, B.ip), (B.ip, A.ip), (A.ip, OUTSIDE), (ROUTER, A.ip))
"""Who started, and with whom. Few, so that packets of one follow each other."""


@st.composite
def said(draw: st.DrawFn) -> tuple[Pod | None, bytes]:
    """A packet of one of the conversations, either way, and the pod that sends it; None: the host does."""
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
            body = ICMP(type=0 if answers else 8, id=77)
        case _:
            body = ICMP(type=draw(st.sampled_from((3, 11))), code=draw(st.sampled_from((1, 4)))) / Raw(
                bytes(28)
            )
    pod = next((pod for pod in PODS if pod.ip == source), None)
    ends = {"src": pod.mac, "dst": pod.host_mac} if pod else {"src": NET_MAC, "dst": NET_MAC}
    return pod, bytes(Ether(**ends) / IP(src=source, dst=destination) / body)


@st.composite
def damaged(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """A frame cut short, or with bytes of its headers changed."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 2))):
        frame[draw(st.integers(12, min(len(frame), 54) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(SHORTEST, len(frame)))]) if draw(st.booleans()) else bytes(frame)


@st.composite
def questions(draw: st.DrawFn, pod: Pod) -> bytes:
    """ARP of all kinds, the most part questions."""
    to = draw(st.sampled_from(("ff:ff:ff:ff:ff:ff", pod.host_mac, "0a:00:00:00:99:99")))
    message = ARP(
        op=draw(st.sampled_from((1, 1, 1, 2, 3))),
        hwsrc=pod.mac,
        psrc=draw(addresses),
        pdst=draw(addresses),
        hwlen=draw(st.sampled_from((6, 6, 6, 5))),
    )
    return bytes(Ether(src=pod.mac, dst=to) / message) + bytes(draw(st.sampled_from((0, 18))))
