"""Where a packet says it is from: nothing is done or remembered for an address that is not the pod's."""

from dataclasses import replace
from ipaddress import IPv6Address

import pytest
from scapy.layers.inet import IP, UDP, fragment
from scapy.layers.inet6 import ICMPv6ND_NS, ICMPv6ND_RS, IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from tests.kernel.datapath.packets import from_pod, udp, who_has
from tests.kernel.datapath.world import (
    EGRESS,
    NODE6,
    OK,
    OUTSIDE,
    REDIRECT,
    ROUTER,
    ROUTER6,
    A,
    B,
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
def test_nobody_asks_for_neighbours_in_anothers_name(world: World, target: str, flags: int) -> None:
    for source in (B.ip6, "2001:db8::66"):
        assert world.pod_sends(replace(A, flags=flags), asks(source, target)).dropped == (132, EGRESS)


@pytest.mark.parametrize("source", [A.ip6, OWN_LINK_LOCAL, "::"])
def test_a_pod_asks_in_its_own_name_or_in_nobodys(world: World, source: str) -> None:
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


def test_a_fragment_in_anothers_name_leaves_no_ports(world: World) -> None:
    first, second = fragment(IP(src=B.ip, dst=OUTSIDE, id=7) / UDP(dport=53) / Raw(bytes(2000)), 1400)
    assert world.pod_sends(A, from_pod(A) / first).dropped == (132, EGRESS)
    assert dict(world.maps["cilium_ipv4_frag_datagrams"].items()) == {}
    assert world.pod_sends(B, from_pod(B) / second).dropped == (175, EGRESS)


@pytest.mark.parametrize("source", [B.ip6, OTHER_LINK_LOCAL, "::"])
def test_nor_does_one_in_ipv6(world: World, source: str) -> None:
    first = IPv6(src=source, dst=ROUTER6) / IPv6ExtHdrFragment(m=1, id=7) / UDP(dport=53) / Raw(bytes(64))
    assert world.pod_sends(A, from_pod(A) / first).dropped == (132, EGRESS)
    assert dict(world.maps["cilium_ipv6_frag_datagrams"].items()) == {}
