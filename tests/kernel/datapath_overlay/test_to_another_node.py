"""Packets into the tunnel: their identity and their node."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import ICMPv6PacketTooBig, IPerror6, IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import echo, from_host, from_pod, ip, tcp, udp
from tests.kernel.datapath.world import EGRESS, NODE, OK, OUTSIDE, REDIRECT, ROUTER, ROUTER6, A, B
from tests.kernel.datapath_overlay.recorder import Redirected, Tunnelled
from tests.kernel.datapath_overlay.world import (
    IFINDEX,
    MTU,
    OTHER_NODE,
    OTHER_NODE6,
    OWN6,
    PORT,
    REMOTE,
    REMOTE6,
    REMOTE_IDENTITY,
    SKIP_TUNNEL,
    UNKNOWN_REMOTE,
    OverlayWorld,
)
from tests.kernel.datapath_services.services import VIP, VIP6, Backend, Services

pytestmark = pytest.mark.kernel

FAMILIES = pytest.mark.parametrize(
    ("source", "destination"), [(A.ip, REMOTE), (A.ip6, REMOTE6)], ids=["ipv4", "ipv6"]
)


def tunnelled(identity: int) -> Tunnelled:
    """To the other node, as this identity."""
    return Tunnelled(identity, IPv4Address(OTHER_NODE), 64, 28, 2)


@FAMILIES
def test_a_packet_to_a_pod_elsewhere_goes_to_its_node_as_its_sender(
    overlay: OverlayWorld, source: str, destination: str
) -> None:
    sent = from_pod(A) / udp(source, destination)
    for _ in range(3):  # the first is evaluated, later ones are remembered
        done = overlay.pod_sends(A, sent)
        assert done.action == REDIRECT
        assert overlay.recorder.tunnelled == tunnelled(A.identity)
        assert overlay.recorder.redirected == Redirected(IFINDEX, 0)
        assert done.counted == {(0, EGRESS): 1}
        assert bytes(done.packet) == bytes(sent)
        overlay.recorder.nothing()


def test_a_flow_moves_with_its_pod(overlay: OverlayWorld) -> None:
    sent = from_pod(A) / udp(A.ip, REMOTE)
    for _ in range(3):
        overlay.pod_sends(A, sent)
    overlay.recorder.nothing()
    overlay.maps["cilium_ipcache"].delete(overlay_key(REMOTE))
    overlay.maps["cilium_tunnel_map"].clear()
    overlay.bump(0)
    assert overlay.pod_sends(A, sent).action == OK
    assert overlay.recorder.tunnelled is None


def overlay_key(address: str) -> bytes:
    """Of an address in the ipcache."""
    from cells.maps.records.cluster import IpcacheKey

    return IpcacheKey.host(IPv4Address(address)).pack()


@FAMILIES
def test_an_address_the_ipcache_does_not_know_goes_by_its_network(
    overlay: OverlayWorld, source: str, destination: str
) -> None:
    other = UNKNOWN_REMOTE if "." in destination else "fd00:10:2::9:9"
    assert overlay.pod_sends(A, from_pod(A) / udp(source, other)).action == REDIRECT
    assert overlay.recorder.tunnelled == tunnelled(A.identity)


@pytest.mark.parametrize("destination", [OUTSIDE, NODE, OTHER_NODE, "10.3.0.1"])
def test_in_the_overlay_packets_without_a_pod_go_to_the_stack(
    overlay: OverlayWorld, destination: str
) -> None:
    overlay.identify(OTHER_NODE, 6)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, destination)).action == OK
    assert overlay.recorder.tunnelled is None


def test_an_address_that_the_network_knows_skips_the_tunnel(overlay: OverlayWorld) -> None:
    overlay.remote(REMOTE, flags=SKIP_TUNNEL)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).action == OK
    assert overlay.host_sends(from_host() / udp(ROUTER, REMOTE)).action == OK
    assert overlay.recorder.tunnelled is None


def test_without_a_tunnel_everything_takes_the_stack(overlay: OverlayWorld) -> None:
    sent = from_pod(A) / udp(A.ip, REMOTE)
    for _ in range(2):
        overlay.pod_sends(A, sent)
    overlay.set_tunnel(on=False)
    overlay.recorder.nothing()
    assert overlay.pod_sends(A, sent).action == OK
    assert overlay.host_sends(from_host() / udp(ROUTER, REMOTE)).dropped == (151, 1)
    assert overlay.recorder.tunnelled is None


def test_policy_is_enforced_before_encapsulation(overlay: OverlayWorld) -> None:
    overlay.allow(
        A, [(PolicyKey(REMOTE_IDENTITY, egress=True, protocol=17, port=53, port_bits=16), PolicyEntry())]
    )
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).action == REDIRECT
    assert overlay.pod_sends(A, from_pod(A) / tcp(A.ip, REMOTE, "S")).dropped == (133, EGRESS)


@pytest.mark.parametrize("remembered", [False, True])
def test_vxlan_packets_of_a_pod_are_dropped(overlay: OverlayWorld, remembered: bool) -> None:
    forged = from_pod(A) / udp(A.ip, OTHER_NODE, dport=PORT)
    if remembered:
        overlay.set_tunnel(on=False)
        assert overlay.pod_sends(A, forged).action == OK
        overlay.set_tunnel(on=True)
    for destination in (OTHER_NODE, NODE, ROUTER, OUTSIDE):
        forged[IP].dst = destination
        assert overlay.pod_sends(A, forged).dropped == (170, EGRESS)
    forged[IP].flags = "MF"
    assert overlay.pod_sends(A, forged).dropped == (170, EGRESS)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE, dport=PORT)).action == REDIRECT
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, B.ip, dport=PORT)).action == REDIRECT


@pytest.mark.parametrize(
    ("identity", "vni"),
    [(1, 6), (1234, 1234), (9, 2), (10, 2), (0x01000007, 2), (0x02000007, 6), (0xFFFFFF, 0xFFFFFF)],
)
def test_the_host_sends_as_what_others_know_it_by(overlay: OverlayWorld, identity: int, vni: int) -> None:
    overlay.identify("172.16.9.9", identity)
    done = overlay.host_sends(from_host() / udp("172.16.9.9", REMOTE))
    assert done.action == REDIRECT
    assert overlay.recorder.tunnelled == tunnelled(vni)


def test_packets_of_the_host_to_an_address_without_a_node_are_dropped(overlay: OverlayWorld) -> None:
    assert overlay.host_sends(from_host() / udp(ROUTER, "10.9.0.1")).dropped == (151, 1)


def big(source: str, destination: str, length: int) -> Ether:
    """A datagram in an IP packet of this length."""
    packet = from_pod(A) / ip(source, destination) / UDP(sport=40000, dport=53)
    return packet / Raw(bytes(length - (len(packet) - 14)))


def test_an_ipv4_packet_above_the_tunnel_mtu_gets_fragmentation_needed(overlay: OverlayWorld) -> None:
    packet = big(A.ip, REMOTE, MTU + 1)
    packet[IP].flags = "DF"
    answer = overlay.pod_sends(A, packet)
    assert answer.action == REDIRECT
    assert overlay.recorder.tunnelled is None
    error = answer.packet
    assert (error.src, error.dst) == (A.host_mac, A.mac)
    assert (error[IP].src, error[IP].dst) == (ROUTER, A.ip)
    assert (error[ICMP].type, error[ICMP].code, error[ICMP].nexthopmtu) == (3, 4, MTU)
    quoted = bytes(error[ICMP].payload)
    assert quoted == bytes(packet)[14:42]
    rebuilt = error.copy()
    del rebuilt[IP].chksum, rebuilt[ICMP].chksum
    assert bytes(rebuilt) == bytes(error)


def test_an_ipv6_packet_above_the_tunnel_mtu_gets_packet_too_big(overlay: OverlayWorld) -> None:
    answer = overlay.pod_sends(A, big(A.ip6, REMOTE6, MTU + 1))
    assert answer.action == REDIRECT
    error = answer.packet
    assert (error[IPv6].src, error[IPv6].dst) == (ROUTER6, A.ip6)
    assert error[ICMPv6PacketTooBig].mtu == MTU
    assert error[IPerror6].dst == REMOTE6
    rebuilt = error.copy()
    del rebuilt[ICMPv6PacketTooBig].cksum
    assert bytes(rebuilt) == bytes(error)


@pytest.mark.parametrize(
    ("source", "service", "backend"), [(A.ip, VIP, REMOTE), (A.ip6, VIP6, REMOTE6)], ids=["ipv4", "ipv6"]
)
def test_an_icmp_error_quotes_the_packet_as_the_pod_sent_it(
    overlay: OverlayWorld, source: str, service: str, backend: str
) -> None:
    Services(overlay.maps).serve(service, [Backend(1, backend)], port=53)
    packet = big(source, service, MTU + 1)
    if IP in packet:
        packet[IP].flags = "DF"
    packet = Ether(bytes(packet))  # with its checksums
    for _ in range(3):  # the first is evaluated, later ones are remembered
        answer = overlay.pod_sends(A, packet)
        assert answer.action == REDIRECT
        assert overlay.recorder.tunnelled is None
        error = answer.packet
        quoted = bytes(error[ICMP].payload if IP in packet else error[ICMPv6PacketTooBig].payload)
        assert quoted == bytes(packet)[14 : 14 + len(quoted)]
        assert len(quoted) >= 28


@pytest.mark.parametrize(("length", "flags"), [(MTU, "DF"), (MTU + 1, "")])
def test_packets_that_fit_or_may_be_fragmented_are_encapsulated(
    overlay: OverlayWorld, length: int, flags: str
) -> None:
    packet = big(A.ip, REMOTE, length)
    packet[IP].flags = flags
    assert overlay.pod_sends(A, packet).action == REDIRECT
    assert overlay.recorder.tunnelled == tunnelled(A.identity)


@FAMILIES
def test_a_datagram_in_fragments_goes_as_a_whole(
    overlay: OverlayWorld, source: str, destination: str
) -> None:
    first, second = fragments(source, destination)
    for each in (first, second):
        overlay.recorder.nothing()
        assert overlay.pod_sends(A, each).action == REDIRECT
        assert overlay.recorder.tunnelled == tunnelled(A.identity)


def fragments(source: str, destination: str) -> tuple[Ether, Ether]:
    """The two fragments of a datagram."""
    frame = from_pod(A)
    if ":" in source:
        header = IPv6(src=source, dst=destination)
        return (
            frame / header / IPv6ExtHdrFragment(id=9, m=1, nh=17) / UDP(sport=1, dport=53) / Raw(bytes(16)),
            frame / header / IPv6ExtHdrFragment(id=9, offset=3, nh=17) / Raw(bytes(16)),
        )
    header = IP(src=source, dst=destination, id=9, proto=17)
    first = header.copy()
    first.flags = "MF"
    second = header.copy()
    second.frag = 3
    return frame / first / UDP(sport=1, dport=53) / Raw(bytes(16)), frame / second / Raw(bytes(16))


def test_the_answer_to_a_pod_elsewhere_goes_back_through_the_tunnel(overlay: OverlayWorld) -> None:
    request = Ether() / tcp(REMOTE, A.ip, "S", sport=40000, dport=80)
    assert overlay.tunnel_brings(request).action == REDIRECT
    overlay.allow(A, [(PolicyKey(0, egress=False), PolicyEntry())])  # a reply needs no policy of its own
    overlay.recorder.nothing()
    answer = from_pod(A) / tcp(A.ip, REMOTE, "SA", sport=80, dport=40000)
    assert overlay.pod_sends(A, answer).action == REDIRECT
    assert overlay.recorder.tunnelled == tunnelled(A.identity)


def test_an_address_here_wins_over_the_tunnel(overlay: OverlayWorld) -> None:
    overlay.maps["cilium_lxc"].update(LxcKey(IPv4Address(REMOTE)).pack(), LxcValue(flags=1).pack())
    assert overlay.pod_sends(A, from_pod(A) / echo(A.ip, REMOTE)).action == OK
    assert overlay.recorder.tunnelled is None


def over_ipv6(identity: int, source: str = OWN6) -> Tunnelled:
    """To the other node's IPv6 address, with a checksum outside."""
    local = IPv6Address(source) if int(IPv6Address(source)) else None
    return Tunnelled(identity, IPv6Address(OTHER_NODE6), 64, 44 if local else 28, 1, local)


@pytest.mark.parametrize("source", [OWN6, "::"])
def test_over_ipv6_packets_go_to_the_node_with_the_range(overlay: OverlayWorld, source: str) -> None:
    overlay.over_ipv6(source)
    services = Services(overlay.maps)
    services.serve(VIP, [Backend(1, REMOTE)], port=53)
    services.serve(VIP6, [Backend(2, REMOTE6)], port=53)
    for own, others in ((A.ip, (REMOTE, UNKNOWN_REMOTE, VIP)), (A.ip6, (REMOTE6, "fd00:10:2::9", VIP6))):
        for other in others:
            for _ in range(3):  # the first is evaluated, later ones are remembered
                overlay.recorder.nothing()
                assert overlay.pod_sends(A, from_pod(A) / udp(own, other)).action == REDIRECT, other
                assert overlay.recorder.tunnelled == over_ipv6(A.identity, source), other
                assert overlay.recorder.redirected == Redirected(IFINDEX, 0)
    assert overlay.host_sends(from_host() / udp(ROUTER, REMOTE)).action == REDIRECT
    assert overlay.recorder.tunnelled == over_ipv6(6, source)


def test_over_ipv6_packets_outside_pod_ranges_go_to_the_stack(overlay: OverlayWorld) -> None:
    """Other nodes and the world by the stack; and a range with a node address that is still IPv4."""
    overlay.over_ipv6()
    overlay.identify(OTHER_NODE, 6)
    for other in (OTHER_NODE, OUTSIDE):
        assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, other)).action == OK
        assert overlay.recorder.tunnelled is None
    assert overlay.host_sends(from_host() / udp(ROUTER, "10.9.0.1")).dropped == (151, 1)
    overlay.maps["cilium_tunnel_map"].clear()
    overlay.remote(REMOTE)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).action == REDIRECT
    assert overlay.recorder.tunnelled == tunnelled(A.identity)._replace(size=28)
    overlay.over_ipv6()
    overlay.remote(REMOTE, flags=SKIP_TUNNEL)
    overlay.recorder.nothing()
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).action == OK
    assert overlay.recorder.tunnelled is None
