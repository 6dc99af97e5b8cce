"""Packets from native devices with a source of this node, its pods or loopback, most of them forged."""

from __future__ import annotations

import pytest
from scapy.layers.inet import IP, UDP, IPOption, fragment
from scapy.layers.inet6 import ICMPv6ND_NA, ICMPv6ND_NS, IPv6
from scapy.packet import Packet, Raw

from cells.maps.records.flows import NODEPORT_DSR_OTHER, NODEPORT_DSR_TCP
from tests.kernel.datapath.packets import echo, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    INGRESS,
    NODE,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    ROUTER6,
    A,
    B,
    Outcome,
)
from tests.kernel.datapath_nodeport.world import ELSEWHERE, NODE_PORT, SERVICE, NodePortWorld
from tests.kernel.datapath_services.services import TARGET, Backend

pytestmark = pytest.mark.kernel

FORGED = (132, INGRESS)
LOCAL = [NODE, ROUTER, A.ip, B.ip, "127.0.0.1", "127.255.0.9", NODE6, ROUTER6, A.ip6, B.ip6, "::1"]
MARKED_AS_B = 0x0F00 | B.identity << 16


def targets(source: str) -> list[str]:
    """A pod, the node, its router, a service, and an address elsewhere, of the source's family."""
    if ":" in source:
        return [A.ip6, NODE6, ROUTER6, SERVICE[6], OUTSIDE6]
    return [A.ip, NODE, ROUTER, SERVICE[4], OUTSIDE]


def nothing_remembered(world: NodePortWorld) -> bool:
    return not any(
        world.connections(tcp=each, version=version) for each in (True, False) for version in (4, 6)
    )


@pytest.mark.parametrize("source", LOCAL)
def test_an_outsider_with_an_address_of_this_node_reaches_nothing(world: NodePortWorld, source: str) -> None:
    version = 6 if ":" in source else 4
    world.services.serve(SERVICE[version], [Backend(1, ELSEWHERE[version].format(9))], port=NODE_PORT)
    for target in targets(source):
        for packet in (
            tcp(source, target, "S", dport=NODE_PORT),
            tcp(source, target, "A"),
            udp(source, target),
            echo(source, target),
            udp(source, target) / Raw(bytes(40)),
        ):
            assert world.client_sends(packet).dropped == FORGED
    assert nothing_remembered(world)


def test_malformed_packets_with_an_address_of_this_node_reach_nothing(world: NodePortWorld) -> None:
    first, second = fragment(IP(src=B.ip, dst=A.ip, id=7) / UDP(dport=53) / Raw(bytes(2000)), 1400)
    unknown: Packet = IP(src=NODE, dst=A.ip, proto=47) / Raw(bytes(20))
    short: Packet = IPv6(src=NODE6, dst=A.ip6, nh=6) / Raw(bytes(4))
    for packet in (first, second, unknown, short):
        assert world.client_sends(packet).dropped == FORGED
    assert dict(world.maps["cilium_ipv4_frag_datagrams"].items()) == {}


def test_packets_from_other_addresses_are_delivered(world: NodePortWorld) -> None:
    for source, target in ((OUTSIDE, NODE), (OUTSIDE6, NODE6), ("128.0.0.1", NODE), ("::2", NODE6)):
        assert world.client_sends(udp(source, target)).action == OK


def test_the_node_hears_who_else_claims_its_address(world: NodePortWorld) -> None:
    """RFC 4862, 5.4.4: the claim comes from that very address, to all nodes of the link."""
    claim = IPv6(src=NODE6, dst="ff02::1", hlim=255) / ICMPv6ND_NA(tgt=NODE6)
    assert world.client_sends(claim).action == OK
    for forged in (
        IPv6(src=NODE6, dst="ff02::1", hlim=64) / ICMPv6ND_NA(tgt=NODE6),
        IPv6(src=NODE6, dst=A.ip6, hlim=255) / ICMPv6ND_NS(tgt=A.ip6),
    ):
        assert world.client_sends(forged).dropped == FORGED


def marked(world: NodePortWorld, packet: Packet, mark: int) -> Outcome:
    """A packet that a bridge brings, as the program at the sender's link marked it."""
    return world._run("hive_from_device", world.framed(packet), 1, mark)


@pytest.mark.parametrize(("source", "target"), [(B.ip, OUTSIDE), (B.ip6, OUTSIDE6)])
def test_a_bridge_among_the_devices_brings_what_pods_of_this_node_send(
    world: NodePortWorld, source: str, target: str
) -> None:
    assert marked(world, udp(source, target), MARKED_AS_B).action == OK
    assert marked(world, udp(source, target), 0x0F00 | A.identity << 16).dropped == FORGED
    node = NODE6 if ":" in source else NODE
    assert marked(world, udp(node, target), MARKED_AS_B).dropped == FORGED


def passed_on(version: int, flags: str = "S", *, option: bool = True) -> Packet:
    """What another node makes of B's packet to its service, for the backend A: see bpf/nodeport/dsr.h."""
    segment = tcp(B.ip, A.ip, flags, sport=5, dport=TARGET)
    service = ELSEWHERE[version].format(200)
    if version == 4:
        named = NODE_PORT.to_bytes(2, "little") + bytes(reversed([int(each) for each in service.split(".")]))
        options = [IPOption(b"\x9a\x08" + named)] if option else []
        return IP(src=B.ip, dst=A.ip, options=options) / segment.payload
    segment = tcp(B.ip6, A.ip6, flags, sport=5, dport=TARGET)
    body = bytes(IPv6(src=service))[8:24] + NODE_PORT.to_bytes(2, "big") + bytes(2)
    head = IPv6(src=B.ip6, dst=A.ip6, nh=60) / Raw(bytes([6, 2]) + b"\x1b\x14" + body)
    return head / segment.payload if option else segment


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_is_served_by_its_neighbour_through_another_node_that_has_it_answer(
    world: NodePortWorld, version: int
) -> None:
    world.serve_outside(NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER)
    assert world.client_sends(passed_on(version)).dropped == FORGED, "B has asked nobody"
    source, service = (B.ip if version == 4 else B.ip6), ELSEWHERE[version].format(200)
    world.pod_sends(B, from_pod(B) / tcp(source, service, "S", sport=5, dport=NODE_PORT))
    outcome = world.client_sends(passed_on(version))
    assert (outcome.action, outcome.packet.dst) == (REDIRECT, A.mac)
    later = world.client_sends(passed_on(version, "A", option=False))
    assert (later.action, later.packet.dst) == (REDIRECT, A.mac)
