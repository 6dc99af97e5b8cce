"""ICMP errors about translated flows: every protocol, both families and directions, truncated too."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, TCP, UDP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6EchoReply, ICMPv6EchoRequest, ICMPv6TimeExceeded
from scapy.layers.sctp import SCTP
from scapy.packet import Packet, Raw

from tests.kernel.datapath.world import NODE, NODE6, OK, OUTSIDE, OUTSIDE6, A, World
from tests.kernel.datapath_nat.conftest import FIRST_PORT, LAST_PORT, serve
from tests.kernel.datapath_nat.masqueraded import ip, network
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

POD, NODES, SERVER = {4: A.ip, 6: A.ip6}, {4: NODE, 6: NODE6}, {4: OUTSIDE, 6: OUTSIDE6}
ROUTER = {4: "203.0.113.9", 6: "2001:db8::9"}
HEAD = {4: 20, 6: 40}
ETHERNET = {4: bytes(12) + b"\x08\x00", 6: bytes(12) + b"\x86\xdd"}
QUOTED = 8
"""Bytes of the transport that every error quotes at least (RFC 792)."""
SERVICE_PORT = 80


def spoken(kind: str, version: int, port: int, *, answer: bool) -> Packet:
    """The transport of a packet to the server, or of its answer."""
    ends = (SERVICE_PORT, port) if answer else (port, SERVICE_PORT)
    body = Raw(b"something to be quoted")
    if kind == "echo":
        if version == 4:
            return ICMP(type=0 if answer else 8, id=port) / body
        return (ICMPv6EchoReply if answer else ICMPv6EchoRequest)(id=port) / body
    layer = {"tcp": TCP, "udp": UDP, "sctp": SCTP}[kind]
    return layer(sport=ends[0], dport=ends[1]) / body


def port_of(kind: str, transport: bytes) -> int:
    """The source's port in a transport header, or its identifier."""
    at = 4 if kind == "echo" else 0
    return int.from_bytes(transport[at : at + 2], "big")


def error(version: int, about: bytes, *, hops: bool) -> Packet:
    """Time exceeded, or destination unreachable."""
    if version == 4:
        return ICMP(type=11 if hops else 3, code=0 if hops else 3) / Raw(about)
    return (ICMPv6TimeExceeded() if hops else ICMPv6DestUnreach(code=4)) / Raw(about)


def heard(packet: Packet, version: int) -> tuple[str, str, bytes]:
    """Source and destination of an error, and what it quotes; its checksums are true."""
    message = bytes(network(packet))
    head, body = message[: HEAD[version]], message[HEAD[version] :]
    pseudo = b"" if version == 4 else message[8:40] + struct.pack(">II", len(body), 58)
    assert checksum(pseudo + body) == 0
    if version == 4:
        assert checksum(head) == 0
    return network(packet).src, network(packet).dst, body[QUOTED:]


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071): 0 of what has a true one."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data[: len(data) & ~1]))
    if len(data) % 2:
        total += data[-1] << 8
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return ~total & 0xFFFF


@given(
    version=st.sampled_from((4, 6)),
    kind=st.sampled_from(("tcp", "udp", "sctp", "echo")),
    port=st.integers(1024, LAST_PORT),
    cut=st.booleans(),
    hops=st.booleans(),
)
@settings(max_examples=scaled(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_icmp_errors_reach_the_sender_of_the_masqueraded_packet(
    world: World, version: int, kind: str, port: int, cut: bool, hops: bool
) -> None:
    world.reset()
    serve(world)
    asked = bytes(network(ip(POD[version], SERVER[version]) / spoken(kind, version, port, answer=False)))
    left = world.device_sends(ETHERNET[version] + asked)
    whole = bytes(network(left.packet))
    given_port = port_of(kind, whole[HEAD[version] :])
    assert (left.action, network(left.packet).src) == (OK, NODES[version])
    assert given_port == port if kind == "sctp" else FIRST_PORT <= given_port <= LAST_PORT
    quoted = HEAD[version] + QUOTED if cut else len(whole)

    # A router outside reports on the flow's packet: the pod gets the error about its own packet.
    out = ip(ROUTER[version], NODES[version]) / error(version, whole[:quoted], hops=hops)
    found = heard(world.device_gets(out).packet, version)
    assert found == (ROUTER[version], POD[version], asked[:quoted])

    # The pod reports on a reply: the server gets the error about what it sent to the node.
    answer = spoken(kind, version, port, answer=True)
    whole = bytes(network(ip(SERVER[version], POD[version]) / answer))
    back = ip(POD[version], SERVER[version]) / error(version, whole[:quoted], hops=hops)
    answered = spoken(kind, version, given_port, answer=True)
    sent = bytes(network(ip(SERVER[version], NODES[version]) / answered))
    found = heard(world.device_sends(back).packet, version)
    assert found == (NODES[version], SERVER[version], sent[:quoted])


@pytest.mark.parametrize("version", [4, 6])
def test_icmp_errors_about_other_packets_are_unchanged(world: World, version: int) -> None:
    stranger = ip(NODES[version], SERVER[version]) / spoken("tcp", version, 1234, answer=False)
    sent = ip(ROUTER[version], NODES[version]) / error(version, bytes(network(stranger)), hops=False)
    outcome = world.device_gets(sent)
    assert (outcome.action, bytes(outcome.packet)) == (OK, bytes(sent))
