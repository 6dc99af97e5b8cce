"""Source address checks: a packet with an address not the pod's is dropped and leaves no state."""

import struct
from dataclasses import replace
from ipaddress import IPv6Address

import pytest
from scapy.layers.inet import IP, UDP, fragment
from scapy.layers.inet6 import ICMPv6ND_NS, ICMPv6ND_RS, IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from cells.maps.records.endpoints import ENDPOINT_ROUTED_BY_HOST, PolicyEntry, PolicyKey
from cells.maps.records.flows import DeviceConfig
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp, who_has
from tests.kernel.datapath.world import (
    EGRESS,
    IFINDEX,
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
    Pod,
    World,
)

pytestmark = pytest.mark.kernel

CHAINED = 1
"""The host's stack answers the pod's neighbour discovery."""
OWN_LINK_LOCAL, OTHER_LINK_LOCAL = "fe80::800:ff:fe00:1001", "fe80::bad"


def asks(source: str, target: str) -> Packet:
    """A neighbour solicitation of A's."""
    group = IPv6Address(int(IPv6Address("ff02::1:ff00:0")) | (int(IPv6Address(target)) & 0xFFFFFF))
    return from_pod(A) / IPv6(src=source, dst=str(group), hlim=255) / ICMPv6ND_NS(tgt=target)


@pytest.mark.parametrize("target", [ROUTER6, B.ip6, NODE6, A.ip6, "fe80::1"])
@pytest.mark.parametrize("flags", [0, CHAINED])
def test_arp_requests_with_the_address_of_another_are_dropped(world: World, target: str, flags: int) -> None:
    for source in (B.ip6, "2001:db8::66"):
        assert world.pod_sends(replace(A, flags=flags), asks(source, target)).dropped == (132, EGRESS)


@pytest.mark.parametrize("source", [A.ip6, OWN_LINK_LOCAL, "::"])
def test_neighbour_solicitations_pass_from_own_and_unspecified_addresses(world: World, source: str) -> None:
    assert world.pod_sends(A, asks(source, ROUTER6)).action == REDIRECT
    assert world.pod_sends(A, asks(source, NODE6)).action == OK
    assert world.pod_sends(A, asks(source, "fe80::1")).action == OK
    assert world.pod_sends(replace(A, flags=CHAINED), asks(source, ROUTER6)).action == OK


def test_link_local_addresses_made_up_do_not_reach_the_stacks_table_of_neighbours(world: World) -> None:
    chained = replace(A, flags=CHAINED)
    assert world.pod_sends(A, asks(OTHER_LINK_LOCAL, ROUTER6)).action == REDIRECT
    assert world.pod_sends(A, asks(OTHER_LINK_LOCAL, NODE6)).action == REDIRECT  # answered here
    assert world.pod_sends(A, asks(OTHER_LINK_LOCAL, "fe80::1")).dropped == (132, EGRESS)
    assert world.pod_sends(chained, asks(OTHER_LINK_LOCAL, NODE6)).dropped == (132, EGRESS)
    router = from_pod(A) / IPv6(src=OTHER_LINK_LOCAL, dst="ff02::2", hlim=255) / ICMPv6ND_RS()
    assert world.pod_sends(chained, router).dropped == (132, EGRESS)


def test_a_node_without_ipv4_takes_none(world: World) -> None:
    single = replace(A, ip="0.0.0.0")
    for source in ("0.0.0.0", A.ip):
        assert world.pod_sends(single, from_pod(A) / udp(source, OUTSIDE)).dropped == (139, EGRESS)
    assert world.pod_gets(single, Ether(src=B.mac, dst=A.mac) / udp(OUTSIDE, A.ip)).dropped == (139, 1)
    assert world.pod_sends(single, from_pod(A) / udp(A.ip6, B.ip6)).action == REDIRECT
    assert world.pod_sends(A, who_has(A, ROUTER)).action == REDIRECT


def test_a_fragment_with_the_address_of_another_leaves_no_ports(world: World) -> None:
    first, second = fragment(IP(src=B.ip, dst=OUTSIDE, id=7) / UDP(dport=53) / Raw(bytes(2000)), 1400)
    assert world.pod_sends(A, from_pod(A) / first).dropped == (132, EGRESS)
    assert dict(world.maps["cilium_ipv4_frag_datagrams"].items()) == {}
    assert world.pod_sends(B, from_pod(B) / second).dropped == (175, EGRESS)


@pytest.mark.parametrize("source", [B.ip6, OTHER_LINK_LOCAL, "::"])
def test_an_ipv6_fragment_with_the_address_of_another_leaves_no_ports(world: World, source: str) -> None:
    first = IPv6(src=source, dst=ROUTER6) / IPv6ExtHdrFragment(m=1, id=7) / UDP(dport=53) / Raw(bytes(64))
    assert world.pod_sends(A, from_pod(A) / first).dropped == (132, EGRESS)
    assert dict(world.maps["cilium_ipv6_frag_datagrams"].items()) == {}


FORGED = (132, INGRESS)
BRIDGE = 99
"""Another runtime's, such as docker0: none of our programs is there."""
SENT_BY_B = 0x0F00 | B.identity << 16


def link(pod: Pod) -> bytes:
    """The key of the pod's link in hive_endpoints."""
    return struct.pack("<I", pod.address().ifindex)


@pytest.mark.parametrize(("source", "target", "away"), [(B.ip, A.ip, OUTSIDE), (B.ip6, A.ip6, OUTSIDE6)])
def test_the_host_forwards_what_pods_send_from_their_links_alone(
    world: World, source: str, target: str, away: str
) -> None:
    packet = from_host() / tcp(source, target, "S")
    for mark in (0, 0x4000, 0x0200):
        assert world.host_sends(packet, device=BRIDGE, mark=mark).dropped == FORGED
    assert world.host_sends(from_host() / tcp(source, away, "S"), device=BRIDGE).dropped == FORGED
    assert not world.connections(version=6 if ":" in source else 4)
    # From its link, or as the program there has marked it; out of the stack; or the node's own veth.
    for device in (B.address().ifindex, 0, 1, 2, 3):
        assert world.host_sends(packet, device=device, mark=0x4000).action == REDIRECT
    assert world.host_sends(packet, device=BRIDGE, mark=SENT_BY_B).action == REDIRECT


@pytest.mark.parametrize(("source", "target"), [(B.ip, A.ip), (B.ip6, A.ip6)])
def test_a_bridge_that_pods_are_on_brings_their_packets(world: World, source: str, target: str) -> None:
    row = replace(B, flags=ENDPOINT_ROUTED_BY_HOST).config().pack()
    world.maps["hive_endpoints"].update(link(B), row)
    assert world.host_sends(from_host() / tcp(source, target, "S"), device=BRIDGE).action == REDIRECT


@pytest.mark.parametrize(
    ("node", "target", "world_identity", "sender"), [(NODE, A.ip, 9, 1), (NODE6, A.ip6, 10, 10)]
)
def test_behind_the_bridge_of_another_runtime_ipv6_sources_are_not_the_host(
    world: World, node: str, target: str, world_identity: int, sender: int
) -> None:
    """In IPv4 the kernel refuses such sources, and what is left the stack has translated."""
    world.allow(A, [(PolicyKey(1, egress=False), PolicyEntry())])
    packet = from_host() / tcp(node, target, "S")
    assert (world.host_sends(packet, device=BRIDGE).action == REDIRECT) is (sender == 1)
    world.allow(A, [(PolicyKey(world_identity, egress=False), PolicyEntry())])
    assert (world.host_sends(packet, device=BRIDGE).action == REDIRECT) is (sender == world_identity)
    world.allow(A, [(PolicyKey(1, egress=False), PolicyEntry())])
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), DeviceConfig(bytes(6)).pack())
    for device in (0, IFINDEX, B.address().ifindex):
        assert world.host_sends(packet, device=device).action == REDIRECT
