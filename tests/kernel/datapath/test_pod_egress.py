"""A pod's packet before conntrack and policy: ARP, header checks, source addresses, routing."""

import struct

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot3, Ether
from scapy.packet import Packet, Raw

from tests.kernel.datapath.packets import BROADCAST, echo, from_pod, tcp, udp, who_has
from tests.kernel.datapath.world import EGRESS, INGRESS, OK, OUTSIDE, REDIRECT, ROUTER, A, B, World

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("target", [ROUTER, B.ip, OUTSIDE])
def test_every_address_a_pod_asks_for_is_behind_its_link(world: World, target: str) -> None:
    outcome = world.pod_sends(A, who_has(A, target))
    assert outcome.action == REDIRECT
    answer = outcome.packet
    assert (answer[Ether].src, answer[Ether].dst) == (A.host_mac, A.mac)
    assert (answer[ARP].op, answer[ARP].hwsrc, answer[ARP].psrc) == (2, A.host_mac, target)
    assert (answer[ARP].hwdst, answer[ARP].pdst) == (A.mac, A.ip)


def test_a_pod_asking_for_its_own_address_gets_no_answer(world: World) -> None:
    question = who_has(A, A.ip)
    outcome = world.pod_sends(A, question)
    assert outcome.action == OK
    assert bytes(outcome.packet) == bytes(question)


def test_an_arp_question_to_another_station_is_left_to_the_stack(world: World) -> None:
    question = who_has(A, ROUTER)
    question[Ether].dst = B.mac
    assert world.pod_sends(A, question).action == OK
    question[Ether].dst = A.host_mac
    assert world.pod_sends(A, question).action == REDIRECT


def test_other_arp_than_questions_is_left_to_the_stack(world: World) -> None:
    answer = who_has(A, ROUTER)
    answer[ARP].op = 2
    assert world.pod_sends(A, answer).action == OK


def test_a_cut_off_arp_message_is_invalid(world: World) -> None:
    assert world.pod_sends(A, bytes(who_has(A, ROUTER))[:40]).dropped == (134, EGRESS)


@pytest.mark.parametrize("packet", [tcp(OUTSIDE, B.ip, "S"), udp(B.ip, ROUTER), echo("0.0.0.0", B.ip)])
def test_a_source_that_is_not_the_pods_is_dropped(world: World, packet: Packet) -> None:
    assert world.pod_sends(A, from_pod(A) / packet).dropped == (132, EGRESS)
    assert world.connections() == {}
    assert world.connections(tcp=False) == {}


def test_a_packet_of_an_unknown_endpoint_is_dropped(world: World) -> None:
    world.maps["hive_endpoints"].clear()
    outcome = world._run("hive_from_pod", from_pod(A) / tcp(A.ip, B.ip, "S"), 1)
    assert outcome.dropped == (165, EGRESS)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (from_pod(A) / IPv6(src="fe80::1", dst="ff02::2") / UDP(), 132),
        (Ether(src=A.mac, dst=BROADCAST, type=0x88CC) / Raw(bytes(50)), 139),
        (Dot3(src=A.mac, dst=BROADCAST, len=50) / Raw(bytes(50)), 166),
    ],
    ids=["IPv6", "LLDP", "802.3"],
)
def test_frames_that_a_pod_may_not_send_are_dropped(world: World, frame: Packet, reason: int) -> None:
    assert world.pod_sends(A, frame).dropped == (reason, EGRESS)


@pytest.mark.parametrize(
    "header",
    [
        IP(src=A.ip, dst=B.ip, version=6, ihl=5),
        IP(src=A.ip, dst=B.ip, ihl=4),
        IP(src=A.ip, dst=B.ip, ihl=15),
        IP(src=A.ip, dst=B.ip, len=19),
        IP(src=A.ip, dst=B.ip, len=2000),
        IP(src=A.ip, dst=B.ip, len=0),
    ],
    ids=["version", "short header", "header beyond the end", "short total", "long total", "no total"],
)
def test_a_malformed_ipv4_header_is_invalid(world: World, header: Packet) -> None:
    assert world.pod_sends(A, from_pod(A) / header / UDP(dport=53)).dropped == (134, EGRESS)


@pytest.mark.parametrize(
    ("packet", "cut"), [(tcp(A.ip, B.ip, "S"), 19), (udp(A.ip, B.ip), 7), (echo(A.ip, B.ip), 7)]
)
def test_a_cut_off_transport_header_is_dropped(world: World, packet: Packet, cut: int) -> None:
    del packet.len, packet.chksum
    body = bytes(packet.payload)[:cut]
    headless = IP(src=packet.src, dst=packet.dst, proto=packet.proto) / Raw(body)
    assert world.pod_sends(A, from_pod(A) / headless).dropped == (135, EGRESS)


@pytest.mark.parametrize("protocol", [2, 41, 47, 132])
def test_a_transport_conntrack_does_not_know_is_dropped(world: World, protocol: int) -> None:
    packet = IP(src=A.ip, dst=B.ip, proto=protocol) / Raw(bytes(40))
    assert world.pod_sends(A, from_pod(A) / packet).dropped == (137, EGRESS)


def test_ip_options_do_not_hide_the_ports(world: World) -> None:
    packet = (
        from_pod(A) / IP(src=A.ip, dst=B.ip, options=[b"\x01" * 8]) / TCP(sport=40000, dport=80, flags="S")
    )
    assert world.pod_sends(A, packet).action == REDIRECT
    assert {(key.sport, key.dport) for key in world.connections()} == {(40000, 80)}


@pytest.mark.parametrize("ttl", [0, 1])
def test_a_packet_at_the_end_of_its_hops_is_not_delivered(world: World, ttl: int) -> None:
    packet = tcp(A.ip, B.ip, "S")
    packet.ttl = ttl
    assert world.pod_sends(A, from_pod(A) / packet).dropped == (196, EGRESS)


def test_a_packet_for_the_node_may_end_its_hops_there(world: World) -> None:
    packet = echo(A.ip, ROUTER)
    packet.ttl = 1
    assert world.pod_sends(A, from_pod(A) / packet).action == OK


def test_a_packet_for_another_pod_is_rewritten_and_redirected(world: World) -> None:
    sent = from_pod(A) / tcp(A.ip, B.ip, "S")
    outcome = world.pod_sends(A, sent)
    assert outcome.action == REDIRECT
    assert (outcome.packet.src, outcome.packet.dst) == (B.host_mac, B.mac)
    assert outcome.packet[IP].ttl == 63
    again = outcome.packet.copy()
    del again[IP].chksum
    assert bytes(again) == bytes(outcome.packet), "the header's checksum is wrong"
    assert bytes(outcome.packet[TCP]) == bytes(Ether(bytes(sent))[TCP])


def test_the_header_checksum_survives_every_ttl(world: World) -> None:
    for ttl in range(2, 256):
        for identifier in (0, 0xFEFF - ttl, 0xFFFF):
            packet = tcp(A.ip, B.ip, "S")
            packet.ttl, packet.id = ttl, identifier
            passed = world.pod_sends(A, from_pod(A) / packet).packet
            fresh = passed.copy()
            del fresh[IP].chksum
            assert passed[IP].chksum == Ether(bytes(fresh))[IP].chksum


@pytest.mark.parametrize("destination", [ROUTER, "192.168.7.7", OUTSIDE])
def test_a_packet_for_the_node_or_beyond_is_left_to_the_stack(world: World, destination: str) -> None:
    sent = from_pod(A) / udp(A.ip, destination)
    outcome = world.pod_sends(A, sent)
    assert outcome.action == OK
    assert bytes(outcome.packet) == bytes(sent)
    assert outcome.counted == {(0, EGRESS): 1}


def test_a_delivered_packet_is_counted_once_with_its_bytes(world: World) -> None:
    sent = from_pod(A) / udp(A.ip, B.ip)
    outcome = world.pod_sends(A, sent, repeat=5)
    assert outcome.counted == {(0, INGRESS): 5}
    (value,) = [value for _, value in world.maps["cilium_metrics"].items()]
    assert sum(octets for _, octets in struct.iter_unpack("<QQ", value)) == 5 * len(sent)
