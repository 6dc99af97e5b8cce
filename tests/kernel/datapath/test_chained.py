"""A pod on another plugin's link: policy at both ends, and no redirects past its path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scapy.layers.inet6 import ICMPv6MLReport2, ICMPv6ND_NA, ICMPv6ND_NS, ICMPv6ND_RA, ICMPv6ND_RS, IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from cells.cluster.identity.numbers import HOST
from cells.maps.records.endpoints import (
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_REQUIRE_EGRESS_PROG,
    ENDPOINT_ROUTED_BY_HOST,
    PolicyEntry,
    PolicyKey,
)
from tests.kernel.datapath.packets import BROADCAST, echo, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    ALLOW_ALL,
    EGRESS,
    INGRESS,
    OK,
    OUTSIDE,
    OUTSIDE6,
    ROUTER,
    ROUTER6,
    SHOT,
    A,
    B,
    Pod,
    World,
)

pytestmark = pytest.mark.kernel

CHAINED = ENDPOINT_PASSES_NEIGHBOURS | ENDPOINT_REQUIRE_EGRESS_PROG | ENDPOINT_ROUTED_BY_HOST
ONLY_WORLD = ((PolicyKey(2, egress=False), PolicyEntry()), (PolicyKey(0, egress=True), PolicyEntry()))


def chained(pod: Pod) -> Pod:
    """The same pod, on a bridge."""
    return replace(pod, flags=CHAINED)


def to_pod(pod: Pod) -> Packet:
    """The frame of what a bridge brings the pod."""
    return Ether(src=B.mac, dst=pod.mac)


def test_packets_of_a_chained_pod_to_a_neighbour_go_to_the_bridge(world: World) -> None:
    for source, destination in ((A.ip, B.ip), (A.ip6, B.ip6)):
        packet = from_pod(A) / tcp(source, destination, "S")
        outcome = world.pod_sends(chained(A), packet)
        assert (outcome.action, bytes(outcome.packet)) == (OK, bytes(packet))
        assert len(world.connections(version=6 if ":" in source else 4)) == 1


def test_egress_policy_of_a_chained_pod_uses_the_identity_of_the_destination(world: World) -> None:
    world.allow(A, [(PolicyKey(B.identity, egress=True), PolicyEntry())])
    assert world.pod_sends(chained(A), from_pod(A) / udp(A.ip, B.ip)).action == OK
    assert world.pod_sends(chained(A), from_pod(A) / udp(A.ip, OUTSIDE)).dropped == (133, EGRESS)
    assert world.pod_sends(chained(A), from_pod(A) / udp(A.ip6, B.ip6)).action == OK
    assert world.pod_sends(chained(A), from_pod(A) / udp(A.ip6, OUTSIDE6)).dropped == (133, EGRESS)


def test_ingress_policy_of_a_chained_pod_uses_the_identity_of_the_source(world: World) -> None:
    world.allow(A, [(PolicyKey(B.identity, egress=False), PolicyEntry())])
    for near, far, own in ((B.ip, OUTSIDE, A.ip), (B.ip6, OUTSIDE6, A.ip6)):
        packet = to_pod(A) / udp(near, own)
        outcome = world.pod_gets(chained(A), packet)
        assert (outcome.action, bytes(outcome.packet)) == (OK, bytes(packet))
        assert outcome.counted == {(0, INGRESS): 1}
        assert world.pod_gets(chained(A), to_pod(A) / udp(far, own)).dropped == (133, INGRESS)


def test_a_chained_pod_distinguishes_host_and_world(world: World) -> None:
    world.allow(A, [(PolicyKey(HOST, egress=False), PolicyEntry())])
    assert world.pod_gets(chained(A), to_pod(A) / tcp(ROUTER, A.ip, "S")).action == OK
    assert world.pod_gets(chained(A), to_pod(A) / tcp(ROUTER6, A.ip6, "S")).action == OK
    assert world.pod_gets(chained(A), to_pod(A) / tcp(OUTSIDE, A.ip, "S")).dropped == (133, INGRESS)


@pytest.mark.parametrize(("own", "peer"), [(A.ip, OUTSIDE), (A.ip6, OUTSIDE6)])
def test_an_answer_needs_no_policy_in_either_direction(world: World, own: str, peer: str) -> None:
    world.allow(A, [(PolicyKey(0, egress=True), PolicyEntry())])
    assert world.pod_sends(chained(A), from_pod(A) / tcp(own, peer, "S")).action == OK
    assert world.pod_gets(chained(A), to_pod(A) / tcp(peer, own, "SA", sport=80, dport=40000)).action == OK
    world.allow(A, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_gets(chained(A), to_pod(A) / echo(peer, own)).action == OK
    assert world.pod_sends(chained(A), from_pod(A) / echo(own, peer, reply=True)).action == OK
    assert world.pod_sends(chained(A), from_pod(A) / echo(own, peer, id=5)).dropped == (133, EGRESS)


def test_a_policy_that_changes_cuts_what_flows_already(world: World) -> None:
    packet = to_pod(A) / udp(OUTSIDE, A.ip)
    assert world.pod_gets(chained(A), packet).action == OK
    assert world.connections(tcp=False)
    world.allow(A, ())
    assert world.pod_gets(chained(A), packet).dropped == (133, INGRESS)
    world.allow(A, ALLOW_ALL)
    assert world.pod_gets(chained(A), packet).action == OK


@pytest.mark.parametrize("destination", [B.ip, B.ip6, "10.1.0.255", "ff02::fb"])
def test_packets_that_a_bridge_floods_create_no_conntrack_entry(world: World, destination: str) -> None:
    source = OUTSIDE6 if ":" in destination else OUTSIDE
    assert world.pod_gets(chained(A), to_pod(A) / udp(source, destination)).action == OK
    assert not world.connections(tcp=False, version=6 if ":" in destination else 4)
    world.allow(A, ())
    assert world.pod_gets(chained(A), to_pod(A) / udp(source, destination)).dropped == (133, INGRESS)


LINK_LOCAL = "fe80::800:ff:fe00:1001"
"""The address A's interface gives itself."""
NEIGHBOURLY = (
    IPv6(src=A.ip6, dst=B.ip6, hlim=255) / ICMPv6ND_NA(tgt=A.ip6),
    IPv6(src=LINK_LOCAL, dst="ff02::1:ff00:11", hlim=255) / ICMPv6ND_NS(tgt=B.ip6),
    IPv6(src=LINK_LOCAL, dst="ff02::16", hlim=1) / ICMPv6MLReport2(),
)


@pytest.mark.parametrize("packet", NEIGHBOURLY, ids=lambda packet: packet.lastlayer().name)
def test_neighbour_discovery_passes_under_every_policy(world: World, packet: Packet) -> None:
    world.allow(A, ())
    assert world.pod_sends(chained(A), from_pod(A) / packet).action == OK
    assert world.pod_gets(chained(A), to_pod(A) / packet).action == OK
    far = packet.copy()
    far.hlim = 64
    assert world.pod_sends(chained(A), from_pod(A) / far).action == SHOT
    assert world.pod_gets(chained(A), to_pod(A) / far).dropped == (133, INGRESS)


@pytest.mark.parametrize(
    ("hops", "message"), [(255, ICMPv6ND_RS()), (1, ICMPv6MLReport2())], ids=["a router", "listeners"]
)
def test_packets_for_neighbours_stay_on_the_bridge(world: World, hops: int, message: Packet) -> None:
    world.allow(A, ())
    sent = IPv6(src=A.ip6, dst=OUTSIDE6, hlim=hops) / message
    assert world.pod_sends(chained(A), from_pod(A) / sent).dropped == (133, EGRESS)
    come = IPv6(src=OUTSIDE6, dst=A.ip6, hlim=hops) / message
    assert world.pod_gets(chained(A), to_pod(A) / come).dropped == (133, INGRESS)


def test_router_advertisements_are_dropped_from_a_pod_and_pass_to_it(world: World) -> None:
    world.allow(A, ())
    advertisement = IPv6(src="fe80::1", dst="ff02::1", hlim=255) / ICMPv6ND_RA()
    assert world.pod_sends(chained(A), from_pod(A) / advertisement).dropped == (132, EGRESS)
    assert world.pod_gets(chained(A), to_pod(A) / advertisement).action == OK


def test_arp_of_a_chained_pod_goes_through_the_bridge_both_ways(world: World) -> None:
    question = ARP(op=1, hwsrc=A.mac, psrc=A.ip, pdst=B.ip)
    assert world.pod_sends(chained(A), Ether(src=A.mac, dst=BROADCAST) / question).action == OK
    assert world.pod_gets(chained(A), Ether(src=B.mac, dst=BROADCAST) / question).action == OK


def test_a_chained_pod_without_an_ipv6_address_gets_no_ipv6_packet(world: World) -> None:
    single = replace(chained(A), ip6="::")
    assert world.pod_gets(single, to_pod(A) / udp(OUTSIDE6, A.ip6)).dropped == (139, INGRESS)


def test_frames_that_are_not_ip_are_dropped_at_ingress(world: World) -> None:
    assert world.pod_gets(chained(A), Ether(src=B.mac, dst=A.mac, type=0x88CC) / bytes(46)).dropped == (
        139,
        INGRESS,
    )
    assert world.pod_gets(chained(A), Ether(src=B.mac, dst=A.mac, type=46) / bytes(46)).dropped == (
        166,
        INGRESS,
    )


def test_a_link_without_an_endpoint_delivers_nothing(world: World) -> None:
    assert world.pod_gets(None, to_pod(A) / udp(OUTSIDE, A.ip)).dropped == (165, INGRESS)
