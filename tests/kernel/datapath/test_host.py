"""Packets from the host to pods, and packets to the host."""

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import INGRESS, NET_MAC, NODE, OK, OUTSIDE, REDIRECT, ROUTER, A, World

pytestmark = pytest.mark.kernel


def test_the_host_reaches_a_pod_through_its_link(world: World) -> None:
    outcome = world.host_sends(from_host() / tcp(ROUTER, A.ip, "S"))
    assert outcome.action == REDIRECT
    assert (outcome.packet.src, outcome.packet.dst) == (A.host_mac, A.mac)
    assert outcome.packet[IP].ttl == 63
    assert outcome.counted == {(0, INGRESS): 1}


def test_the_pods_answer_reaches_the_host(world: World) -> None:
    world.host_sends(from_host() / echo(ROUTER, A.ip))
    world.allow(A, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(A, from_pod(A) / echo(A.ip, ROUTER, reply=True)).action == OK


@pytest.mark.parametrize("destination", ["10.1.0.99", OUTSIDE])
def test_an_address_without_an_endpoint_is_unroutable(world: World, destination: str) -> None:
    assert world.host_sends(from_host() / udp(ROUTER, destination)).dropped == (151, INGRESS)


def test_packets_for_the_node_go_on_to_cilium_net(world: World) -> None:
    outcome = world.host_sends(Ether(src="0a:00:00:00:00:01", dst="0a:00:00:00:00:01") / udp(ROUTER, NODE))
    assert outcome.action == OK
    assert outcome.packet.dst == NET_MAC


def test_other_protocols_pass_the_datapath(world: World) -> None:
    assert world.host_sends(from_host() / IPv6(src="fe80::1", dst="ff02::2")).action == OK


def test_a_malformed_packet_of_the_host_is_invalid(world: World) -> None:
    assert world.host_sends(from_host() / IP(src=ROUTER, dst=A.ip, ihl=4) / Raw(bytes(20))).dropped == (
        134,
        INGRESS,
    )


def test_a_packet_at_the_end_of_its_hops_is_dropped(world: World) -> None:
    packet = udp(OUTSIDE, A.ip)
    packet.ttl = 1
    assert world.host_sends(from_host() / packet).dropped == (196, INGRESS)


def test_everything_may_reach_the_host(world: World) -> None:
    packet = from_host() / udp(A.ip, ROUTER)
    outcome = world.reaches_host(packet)
    assert outcome.action == OK
    assert bytes(outcome.packet) == bytes(packet)
