"""Features only of IPv6: neighbour discovery, extension headers, hop limit, ICMPv6 errors."""

import pytest
from scapy.layers.inet import TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6ND_RS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptSrcLLAddr,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from cells.maps.records.endpoints import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_PASSES_NEIGHBOURS,
    PolicyEntry,
    PolicyKey,
)
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    NODE6,
    OK,
    OUTSIDE6,
    REDIRECT,
    ROUTER6,
    A,
    B,
    Pod,
    World,
)

pytestmark = pytest.mark.kernel


def solicit(target: str, *, source: str = A.ip6, hops: int = 255, option: bool = True) -> Packet:
    """A neighbour solicitation of pod A."""
    message = ICMPv6ND_NS(tgt=target)
    frame = Ether(src=A.mac, dst="33:33:ff:00:00:01") / IPv6(src=source, dst="ff02::1:ff00:1", hlim=hops)
    return frame / message / ICMPv6NDOptSrcLLAddr(lladdr=A.mac) if option else frame / message


@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize(("target", "router"), [(ROUTER6, 1), (B.ip6, 0)])
def test_the_node_answers_for_its_gateway_and_its_pods(
    world: World, target: str, router: int, option: bool
) -> None:
    outcome = world.pod_sends(A, solicit(target, option=option))
    assert outcome.action == REDIRECT
    answer = outcome.packet
    assert (answer.src, answer.dst) == (A.host_mac, A.mac)
    assert (answer[IPv6].src, answer[IPv6].dst, answer[IPv6].hlim) == (ROUTER6, A.ip6, 255)
    message = answer[ICMPv6ND_NA]
    assert (message.R, message.S, message.O, message.tgt) == (router, 1, 1, target)
    assert answer[ICMPv6NDOptDstLLAddr].lladdr == A.host_mac
    sent = message.cksum
    del message.cksum
    assert Ether(bytes(answer))[ICMPv6ND_NA].cksum == sent


def test_a_solicitation_from_the_unspecified_address_is_answered_to_all_nodes(world: World) -> None:
    answer = world.pod_sends(A, solicit(B.ip6, source="::", option=False)).packet
    assert (answer[IPv6].dst, answer[ICMPv6ND_NA].S) == ("ff02::1", 0)


def test_solicitations_for_the_own_address_and_the_node_are_not_answered(world: World) -> None:
    assert world.pod_sends(A, solicit(A.ip6, source="::", option=False)).action == OK
    assert world.pod_sends(A, solicit(NODE6)).action == OK
    assert world.pod_sends(A, solicit("fe80::1", source="::", option=False)).action == OK


def test_a_node_without_ipv6_drops_ipv6(world: World) -> None:
    single = Pod(A.id, A.ip, "::", A.identity, A.mac, A.host_mac)
    assert world.pod_sends(single, from_pod(A) / udp(A.ip6, B.ip6)).dropped == (139, EGRESS)
    assert world.pod_sends(single, solicit(B.ip6)).dropped == (139, EGRESS)


def test_neighbour_solicitations_for_unknown_addresses_are_dropped(world: World) -> None:
    assert world.pod_sends(A, solicit("fd00:10:1::99")).dropped == (150, EGRESS)


@pytest.mark.parametrize("target", ["fe80::1", A.ip6, NODE6])
def test_a_solicitation_to_another_destination_is_invalid(world: World, target: str) -> None:
    world.allow(A, ())
    message = IPv6(src=A.ip6, dst=OUTSIDE6, hlim=255) / ICMPv6ND_NS(tgt=target)
    assert world.pod_sends(A, from_pod(A) / message).dropped == (134, EGRESS)
    message.dst = target
    assert world.pod_sends(A, from_pod(A) / message).action == OK


def test_a_solicitation_with_a_hop_limit_below_255_is_invalid(world: World) -> None:
    assert world.pod_sends(A, solicit(B.ip6, hops=64)).dropped == (134, EGRESS)


def test_the_stack_answers_for_a_pod_that_wants_it(world: World) -> None:
    own = Pod(A.id, A.ip, A.ip6, A.identity, A.mac, A.host_mac, ENDPOINT_PASSES_NEIGHBOURS)
    assert world.pod_sends(own, solicit(B.ip6)).action == OK


def test_other_neighbour_messages_are_packets_like_any(world: World) -> None:
    router = from_pod(A) / IPv6(src=A.ip6, dst="ff02::2", hlim=255) / ICMPv6ND_RS()
    assert world.pod_sends(A, router).action == OK
    link_local = from_pod(A) / IPv6(src="fe80::1", dst="ff02::2", hlim=255) / ICMPv6ND_RS()
    assert world.pod_sends(A, link_local).dropped == (132, EGRESS)


def test_only_the_pods_own_source_passes(world: World) -> None:
    spoofed = from_pod(A) / udp(B.ip6, OUTSIDE6)
    assert world.pod_sends(A, spoofed).dropped == (132, EGRESS)
    free = Pod(A.id, A.ip, A.ip6, A.identity, A.mac, A.host_mac, ENDPOINT_ANY_SOURCE)
    assert world.pod_sends(free, spoofed).action == OK


def test_a_packet_between_pods_is_a_hop_older_and_readdressed(world: World) -> None:
    outcome = world.pod_sends(A, from_pod(A) / tcp(A.ip6, B.ip6, "S"))
    assert outcome.action == REDIRECT
    assert (outcome.packet.src, outcome.packet.dst) == (B.host_mac, B.mac)
    assert outcome.packet[IPv6].hlim == 63


@pytest.mark.parametrize("destination", [B.ip6, OUTSIDE6], ids=["pod", "outside"])
def test_an_expired_hop_limit_returns_time_exceeded_to_the_sender(world: World, destination: str) -> None:
    head = from_pod(A) / IPv6(src=A.ip6, dst=destination, hlim=1)
    packet = head / UDP(sport=1000, dport=2000) / Raw(bytes(100))
    outcome = world.pod_sends(A, packet)
    assert (outcome.action, outcome.counted) == (REDIRECT, {})
    answer = outcome.packet
    assert (answer.src, answer.dst) == (A.host_mac, A.mac)
    assert (answer[IPv6].src, answer[IPv6].dst) == (ROUTER6, A.ip6)
    exceeded = answer[ICMPv6TimeExceeded]
    quoted = bytes(exceeded.payload)
    assert quoted == bytes(packet[IPv6])[: len(quoted)]
    assert len(quoted) == 48
    sent = exceeded.cksum
    del exceeded.cksum
    assert Ether(bytes(answer))[ICMPv6TimeExceeded].cksum == sent


@pytest.mark.parametrize("destination", [NODE6, "ff02::1", "fe80::1"])
def test_an_expired_hop_limit_does_not_matter_on_the_link(world: World, destination: str) -> None:
    packet = (
        from_pod(A) / IPv6(src=A.ip6, dst=destination, hlim=1) / UDP(sport=1000, dport=2000) / Raw(bytes(9))
    )
    assert world.pod_sends(A, packet).action == OK


def test_an_expired_hop_limit_of_a_denied_packet_or_an_error_is_not_answered(world: World) -> None:
    error = ICMPv6DestUnreach(code=4) / udp(OUTSIDE6, A.ip6)
    packet = from_pod(A) / IPv6(src=A.ip6, dst=OUTSIDE6, hlim=1) / error
    assert world.pod_sends(A, packet).action == OK, "the stack answers no error with another"
    world.allow(A, ())
    packet = from_pod(A) / IPv6(src=A.ip6, dst=OUTSIDE6, hlim=1) / UDP(sport=1000, dport=2000) / Raw(bytes(9))
    assert world.pod_sends(A, packet).dropped == (133, EGRESS)


EXTENSIONS = [
    IPv6ExtHdrHopByHop(),
    IPv6ExtHdrDestOpt(),
    IPv6ExtHdrRouting(addresses=["fd00::9"]),
    IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt(),
]


@pytest.mark.parametrize("extension", EXTENSIONS, ids=["hops", "options", "routing", "several"])
def test_extension_headers_hide_no_port(world: World, extension: Packet) -> None:
    world.allow(A, [(PolicyKey(0, True, 6, 80, 16), PolicyEntry())])
    packet = from_pod(A) / IPv6(src=A.ip6, dst=B.ip6) / extension.copy() / TCP(dport=80, flags="S")
    assert world.pod_sends(A, packet).action == REDIRECT
    other = from_pod(A) / IPv6(src=A.ip6, dst=B.ip6) / extension.copy() / TCP(dport=81, flags="S")
    assert world.pod_sends(A, other).dropped == (133, EGRESS)


def test_more_extensions_than_anyone_needs_are_refused(world: World) -> None:
    packet = from_pod(A) / IPv6(src=A.ip6, dst=B.ip6)
    for _ in range(8):
        packet /= IPv6ExtHdrDestOpt()
    assert world.pod_sends(A, packet / TCP()).dropped == (156, EGRESS)


@pytest.mark.parametrize(
    ("cut", "reason"), [(54, 135), (54 + 4, 135), (54 + 19, 135)], ids=["nothing", "4 bytes", "19 bytes"]
)
def test_a_truncated_packet_is_refused(world: World, cut: int, reason: int) -> None:
    frame = bytearray(bytes(from_pod(A) / tcp(A.ip6, B.ip6, "S"))[:cut])
    frame[18:20] = (cut - 54).to_bytes(2, "big")
    assert world.pod_sends(A, bytes(frame)).dropped == (reason, EGRESS)


def test_a_length_beyond_the_packet_is_invalid(world: World) -> None:
    packet = from_pod(A) / IPv6(src=A.ip6, dst=B.ip6, plen=2000) / TCP()
    assert world.pod_sends(A, packet).dropped == (134, EGRESS)


def test_replies_pass_without_policy_and_requests_do_not(world: World) -> None:
    world.allow(B, [(PolicyKey(0, False), PolicyEntry())])
    assert world.pod_sends(A, from_pod(A) / echo(A.ip6, B.ip6)).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / echo(B.ip6, A.ip6, reply=True)).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / echo(B.ip6, A.ip6)).dropped == (133, EGRESS)


@pytest.mark.parametrize("error", [ICMPv6DestUnreach(code=4), ICMPv6TimeExceeded()])
def test_errors_about_a_flow_reach_its_sender(world: World, error: Packet) -> None:
    world.allow(A, [(PolicyKey(0, True), PolicyEntry())])
    packet = from_host() / IPv6(src=B.ip6, dst=A.ip6) / error / udp(A.ip6, B.ip6)
    assert world.host_sends(packet).dropped == (133, INGRESS)
    assert world.pod_sends(A, from_pod(A) / udp(A.ip6, B.ip6)).action == REDIRECT
    assert world.host_sends(packet).action == REDIRECT


def test_packets_of_the_host_reach_a_pod_and_no_unknown_address(world: World) -> None:
    assert world.host_sends(from_host() / tcp(ROUTER6, A.ip6, "S")).action == REDIRECT
    assert world.host_sends(from_host() / tcp(ROUTER6, "fd00:10:1::99", "S")).dropped == (151, INGRESS)
    assert world.host_sends(from_host() / IPv6(src="fe80::1", dst="ff02::2") / ICMPv6ND_RS()).action == OK
