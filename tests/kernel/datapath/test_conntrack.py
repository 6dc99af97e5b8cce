"""Conntrack: the entries of a flow, which packets are replies, and when entries expire."""

from ipaddress import IPv4Address

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6PacketTooBig, ICMPv6Unknown
from scapy.packet import Packet, Raw

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import CT_IN, CT_OUT, CT_RELATED, CtEntry, CtKey
from tests.kernel.datapath.packets import echo, from_host, from_pod, ip, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    A,
    B,
    World,
    now,
)

pytestmark = pytest.mark.kernel

TCP, UDP, PING = 6, 17, 1
RX_CLOSING, TX_CLOSING, SEEN_NON_SYN = 1 << 0, 1 << 1, 1 << 4
FIN, SYN, RST = 1, 2, 4

ONLY_EGRESS = [(PolicyKey(0, egress=True), PolicyEntry())]
"""A pod that may talk but not be talked to: what comes in must be an answer."""
NOTHING: list[tuple[PolicyKey, PolicyEntry]] = []


def key(dport: int, sport: int, protocol: int, flags: int) -> CtKey:
    """Of a flow from A to B."""
    return CtKey(IPv4Address(A.ip), IPv4Address(B.ip), dport, sport, protocol, flags)


def lives(world: World, entry: CtEntry, seconds: int) -> bool:
    """Whether it ends so long after some packet of this test, however long that took."""
    return world.began + seconds <= entry.lifetime <= now() + seconds


def talk(world: World, *flags: str, ends: tuple[str, str] = (A.ip, B.ip)) -> None:
    """A and B exchange segments: ``>S`` is a SYN from A to B, ``<SA`` its answer."""
    one, other = ends
    for each in flags:
        if each[0] == ">":
            world.pod_sends(A, from_pod(A) / tcp(one, other, each[1:]))
        else:
            world.pod_sends(B, from_pod(B) / tcp(other, one, each[1:], sport=80, dport=40000))


OUT = key(80, 40000, TCP, CT_OUT)
IN = key(80, 40000, TCP, CT_IN)


def test_a_flow_between_pods_has_an_entry_at_each(world: World) -> None:
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    entries = world.connections()
    assert entries.keys() == {OUT, IN}
    assert (entries[OUT].source_identity, entries[IN].source_identity) == (A.identity, A.identity)
    assert (entries[OUT].tx_flags_seen, entries[OUT].rx_flags_seen) == (SYN, 0)
    assert (entries[IN].tx_flags_seen, entries[IN].rx_flags_seen) == (0, SYN)
    assert world.began <= entries[OUT].last_tx_report <= now()


def test_errors_about_a_flow_are_expected_beside_it(world: World) -> None:
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    related = world.connections(tcp=False)
    assert related.keys() == {
        key(0, 0, PING, CT_OUT | CT_RELATED),
        key(0, 0, PING, CT_IN | CT_RELATED),
    }
    assert all(lives(world, entry, 8000) for entry in related.values())


def test_a_tcp_flow_lives_a_minute_until_it_is_established(world: World) -> None:
    talk(world, ">S", "<SA")
    assert lives(world, world.connections()[OUT], 60)
    assert not world.connections()[OUT].flags & SEEN_NON_SYN
    talk(world, ">A")
    for entry in world.connections().values():
        assert lives(world, entry, 8000)
        assert entry.flags == SEEN_NON_SYN
        assert (entry.tx_flags_seen, entry.rx_flags_seen) == (SYN, SYN)


def test_a_datagram_flow_lives_a_minute(world: World) -> None:
    world.pod_sends(A, from_pod(A) / udp(A.ip, B.ip))
    entry = world.connections(tcp=False)[key(53, 40000, UDP, CT_OUT)]
    assert lives(world, entry, 60)


def test_a_tcp_flow_that_joins_late_is_established_by_its_next_segment(world: World) -> None:
    talk(world, ">A")
    assert lives(world, world.connections()[OUT], 60)
    talk(world, ">A")
    assert lives(world, world.connections()[OUT], 8000)


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (tcp(A.ip, B.ip, "S"), tcp(B.ip, A.ip, "SA", sport=80, dport=40000)),
        (tcp(A.ip, B.ip, "S", sport=80, dport=40000), tcp(B.ip, A.ip, "SA", sport=40000, dport=80)),
        (udp(A.ip, B.ip), udp(B.ip, A.ip, sport=53, dport=40000)),
        (udp(A.ip, B.ip, sport=5, dport=5), udp(B.ip, A.ip, sport=5, dport=5)),
        (echo(A.ip, B.ip), echo(B.ip, A.ip, reply=True)),
    ],
    ids=["tcp", "tcp to a high port", "udp", "udp on one port", "ping"],
)
def test_an_answer_needs_no_policy(world: World, there: Packet, back: Packet) -> None:
    world.allow(A, ONLY_EGRESS)
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(B, from_pod(B) / back).dropped == (133, EGRESS)
    assert world.pod_sends(A, from_pod(A) / there).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / back).action == REDIRECT
    assert world.policy_use(B) == {PolicyKey(0, egress=False): 1}


@pytest.mark.parametrize(
    "wrong",
    [
        tcp(B.ip, A.ip, "SA", sport=81, dport=40000),
        tcp(B.ip, A.ip, "SA", sport=80, dport=40001),
        udp(B.ip, A.ip, sport=80, dport=40000),
        echo(B.ip, A.ip, reply=True),
    ],
)
def test_packets_that_resemble_a_reply_need_policy(world: World, wrong: Packet) -> None:
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    world.allow(B, NOTHING)
    assert world.pod_sends(B, from_pod(B) / wrong).dropped == (133, EGRESS)


def test_a_ping_is_answered_under_its_own_id_only(world: World) -> None:
    world.pod_sends(A, from_pod(A) / echo(A.ip, B.ip, id=1))
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(B, from_pod(B) / echo(B.ip, A.ip, reply=True, id=1)).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / echo(B.ip, A.ip, reply=True, id=2)).dropped == (133, EGRESS)
    assert world.pod_sends(B, from_pod(B) / echo(B.ip, A.ip, id=1)).dropped == (133, EGRESS)


def test_the_nodes_answer_to_a_pod_needs_no_policy(world: World) -> None:
    world.allow(A, ONLY_EGRESS)
    assert world.host_sends(from_pod(A) / tcp(ROUTER, A.ip, "SA", sport=80, dport=40000)).dropped == (
        133,
        INGRESS,
    )
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, ROUTER, "S")).action == OK
    assert world.host_sends(from_pod(A) / tcp(ROUTER, A.ip, "SA", sport=80, dport=40000)).action == REDIRECT


@pytest.mark.parametrize("kind", [3, 11, 12])
def test_an_icmp_error_from_the_peer_belongs_to_the_flow(world: World, kind: int) -> None:
    header = from_pod(B) / IP(src=B.ip, dst=A.ip) / ICMP(type=kind, code=1)
    error = header / Raw(bytes(tcp(A.ip, B.ip, "S")))
    world.allow(A, ONLY_EGRESS)
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(B, error).dropped == (133, EGRESS)
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    assert world.pod_sends(B, error).action == REDIRECT
    for other in (
        b"\x45" + bytes(27),
        bytes(udp(A.ip, B.ip)),
        bytes(tcp(A.ip, OUTSIDE, "S")),
        b"hidden" * 20,
    ):
        assert world.pod_sends(B, header / Raw(other)).dropped == (133, EGRESS)


def too_big(source: str, destination: str, about: Packet | bytes) -> Packet:
    kind = ICMPv6PacketTooBig(mtu=1280) if ":" in source else ICMP(type=3, code=4, nexthopmtu=1280)
    return ip(source, destination) / kind / Raw(bytes(about))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp", "echo"])
def test_a_router_may_say_what_is_too_big_of_a_flow_and_of_nothing_else(
    world: World, version: int, kind: str
) -> None:
    pod, peer, router = (A.ip, OUTSIDE, "203.0.113.9") if version == 4 else (A.ip6, OUTSIDE6, "2001:db8:1::9")

    def make(source: str, destination: str) -> Packet:
        if kind == "tcp":
            return tcp(source, destination, "S")
        return udp(source, destination) if kind == "udp" else echo(source, destination)

    assert world.pod_sends(A, from_pod(A) / make(pod, peer)).action == OK
    world.allow(A, NOTHING)
    before = [world.connections(tcp=each, version=version).keys() for each in (True, False)]
    about = make(pod, peer)
    assert world.host_sends(from_host() / too_big(router, pod, about)).action == REDIRECT
    for other in (
        bytes(48),
        bytes(about)[:18],
        b"hidden" * 200,
        make(pod, router),
        make(peer, pod),
        make(B.ip if version == 4 else B.ip6, peer),
    ):
        assert world.host_sends(from_host() / too_big(router, pod, other)).dropped == (133, INGRESS)
    for back in (about, make(router, pod), bytes(48)):
        assert world.pod_sends(A, from_pod(A) / too_big(pod, router, back)).dropped == (133, EGRESS)
    assert before == [world.connections(tcp=each, version=version).keys() for each in (True, False)]


@pytest.mark.parametrize("version", [4, 6])
def test_packet_too_big_of_a_pod_passes_to_peers_of_its_connections(world: World, version: int) -> None:
    pod, peer = (A.ip, OUTSIDE) if version == 4 else (A.ip6, OUTSIDE6)
    assert world.host_sends(from_host() / tcp(peer, pod, "S")).action == REDIRECT
    spoken = from_pod(A) / too_big(pod, peer, tcp(peer, pod, "A"))
    world.allow(A, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(A, spoken).action == OK
    world.allow(A, NOTHING)
    assert world.pod_sends(A, spoken).dropped == (133, EGRESS)


def test_a_fin_closes_its_direction_and_both_end_the_flow(world: World) -> None:
    talk(world, ">S", "<SA", ">A", ">FA")
    entries = world.connections()
    assert (entries[OUT].flags, entries[IN].flags) == (TX_CLOSING | SEEN_NON_SYN, RX_CLOSING | SEEN_NON_SYN)
    assert lives(world, entries[OUT], 8000)
    talk(world, "<FA")
    for entry in world.connections().values():
        assert entry.flags == TX_CLOSING | RX_CLOSING | SEEN_NON_SYN
        assert lives(world, entry, 10)
    talk(world, ">A")
    assert lives(world, world.connections()[OUT], 10)


def test_a_reset_before_both_sides_spoke_ends_the_flow(world: World) -> None:
    talk(world, ">S", "<RA")
    for entry in world.connections().values():
        assert entry.flags & (TX_CLOSING | RX_CLOSING) == TX_CLOSING | RX_CLOSING
        assert lives(world, entry, 10)


@pytest.mark.parametrize("reset", [">R", "<RA"])
def test_a_reset_ends_an_open_flow_from_either_side(world: World, reset: str) -> None:
    talk(world, ">S", "<SA", ">A", reset)
    for entry in world.connections().values():
        assert entry.flags & (TX_CLOSING | RX_CLOSING) == TX_CLOSING | RX_CLOSING
        assert lives(world, entry, 10)


@pytest.mark.parametrize("ends", [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_an_error_about_an_open_flow_does_not_shorten_the_time_for_the_next(
    world: World, ends: tuple[str, str]
) -> None:
    talk(world, ">S", "<SA", ">A", ends=ends)
    kind = ICMPv6DestUnreach(code=4) if ":" in ends[0] else ICMP(type=3, code=1)
    error = from_pod(B) / ip(ends[1], ends[0]) / kind / tcp(*ends, "A")
    assert world.pod_sends(B, error).action == REDIRECT
    world.age(600)
    world.allow(A, ONLY_EGRESS)
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(B, error).action == REDIRECT


def test_a_syn_after_the_end_starts_a_new_flow(world: World) -> None:
    talk(world, ">S", "<SA", ">A", ">FA", "<FA")
    uses = world.policy_use(B)[PolicyKey(0, egress=False)]
    talk(world, ">S")
    entry = world.connections()[OUT]
    assert entry.flags == 0
    assert (entry.tx_flags_seen, entry.rx_flags_seen) == (SYN, 0)
    assert lives(world, entry, 60)
    assert world.policy_use(B)[PolicyKey(0, egress=False)] == uses + 1


def test_flags_of_both_directions_are_reported(world: World) -> None:
    talk(world, ">S", "<SA", ">FA")
    assert world.connections()[OUT].tx_flags_seen == SYN | FIN
    assert world.connections()[OUT].rx_flags_seen == SYN
    assert world.connections()[IN].rx_flags_seen == SYN | FIN


def test_an_entry_past_its_lifetime_is_absent(world: World) -> None:
    world.pod_sends(A, from_pod(A) / udp(A.ip, B.ip))
    table = world.maps["cilium_ct_any4_global"]
    for raw_key, value in list(table.items()):
        stale = CtEntry.unpack(value)
        table.update(raw_key, CtEntry(lifetime=now() - 1, source_identity=stale.source_identity).pack())
    world.allow(B, NOTHING)
    answer = from_pod(B) / udp(B.ip, A.ip, sport=53, dport=40000)
    assert world.pod_sends(B, answer).dropped == (133, EGRESS)


def test_a_dropped_packet_creates_no_conntrack_entry(world: World) -> None:
    world.allow(A, NOTHING)
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, OUTSIDE, "S")).dropped == (133, EGRESS)
    assert world.connections() == {}
    world.allow(A, ONLY_EGRESS)
    world.allow(B, NOTHING)
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S")).dropped == (133, INGRESS)
    assert world.connections().keys() == {OUT}


@pytest.mark.parametrize(("asks", "answers"), [(13, 14), (15, 16), (17, 18)])
def test_a_request_of_icmp_is_answered_under_its_id_by_its_own_kind(
    world: World, asks: int, answers: int
) -> None:
    def message(source: str, to: str, kind: int, number: int = 5) -> Packet:
        return IP(src=source, dst=to) / ICMP(type=kind, id=number)

    world.allow(A, ONLY_EGRESS)
    assert world.pod_sends(A, from_pod(A) / message(A.ip, B.ip, asks)).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / message(B.ip, A.ip, answers)).action == REDIRECT
    for kind, number in ((answers, 6), (asks, 5), (5, 5), (9, 5), (8, 5)):
        refused = world.pod_sends(B, from_pod(B) / message(B.ip, A.ip, kind, number))
        assert refused.dropped == (133, INGRESS), kind
    world.allow(B, [(PolicyKey(0, False, PING, asks, 16), PolicyEntry()), *ONLY_EGRESS])
    assert world.pod_sends(B, from_pod(B) / message(B.ip, A.ip, answers)).action == REDIRECT


@pytest.mark.parametrize(("a", "b"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_messages_of_icmp_that_ask_nothing_have_no_answers(world: World, a: str, b: str) -> None:
    """Who sends a redirect, for instance, may not be sent one for that."""

    def message(source: str, to: str) -> Packet:
        redirect = ICMPv6Unknown(type=137, msgbody=bytes(4)) if ":" in to else ICMP(type=5, code=1)
        return ip(source, to) / redirect / Raw(bytes(40))

    world.allow(A, ONLY_EGRESS)
    assert world.pod_sends(A, from_pod(A) / message(a, b)).action == REDIRECT
    assert world.pod_sends(B, from_pod(B) / message(b, a)).dropped == (133, INGRESS)
