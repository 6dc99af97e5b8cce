"""Packets from the tunnel: accepted sources and served destinations."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, IPerror, UDPerror
from scapy.layers.l2 import ARP, Dot1Q, Ether

from cells.maps.records.cluster import TUNNEL_OWN_IDENTITIES, IpcacheKey, NodeKey, NodeValue
from cells.maps.records.endpoints import NodeConfig, PolicyEntry, PolicyKey
from cells.maps.records.flows import CT_IN
from tests.kernel.datapath.packets import echo, from_pod, tcp, udp
from tests.kernel.datapath.world import INGRESS, NODE, NODE6, REDIRECT, ROUTER, ROUTER6, SHOT, A, B, raw
from tests.kernel.datapath_overlay.recorder import Redirected
from tests.kernel.datapath_overlay.world import (
    OTHER_NODE,
    OTHER_NODE6,
    REMOTE,
    REMOTE6,
    REMOTE_IDENTITY,
    STRANGER,
    STRANGER6,
    OverlayWorld,
)
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

BPF_F_INGRESS = 1
FAMILIES = pytest.mark.parametrize(
    ("source", "pod"), [(REMOTE, A.ip), (REMOTE6, A.ip6)], ids=["ipv4", "ipv6"]
)
FRAME = Ether(src="0e:00:00:00:00:01", dst="0e:00:00:00:00:02")


def only_from(identity: int) -> list[tuple[PolicyKey, PolicyEntry]]:
    """A policy that lets one identity in."""
    return [(PolicyKey(identity, egress=False), PolicyEntry())]


@FAMILIES
def test_an_overlay_packet_is_delivered_with_the_identity_of_its_vni(
    overlay: OverlayWorld, source: str, pod: str
) -> None:
    overlay.allow(A, only_from(REMOTE_IDENTITY))
    done = overlay.tunnel_brings(FRAME / udp(source, pod))
    assert done.action == REDIRECT
    assert (done.packet.src, done.packet.dst) == (A.host_mac, A.mac)
    assert done.counted == {(0, INGRESS): 1}
    other = overlay.tunnel_brings(FRAME / udp(source, pod, sport=7), vni=REMOTE_IDENTITY + 1)
    assert other.dropped == (133, INGRESS)


def test_a_flow_from_the_tunnel_is_marked_in_conntrack(overlay: OverlayWorld) -> None:
    overlay.tunnel_brings(FRAME / tcp(REMOTE, A.ip, "S"))
    ((entry),) = [entry for key, entry in overlay.connections().items() if key.flags & CT_IN]
    assert entry.source_identity == REMOTE_IDENTITY
    assert entry.flags >> 10 & 1


@FAMILIES
@pytest.mark.parametrize("node", [STRANGER, NODE, A.ip, "0.0.0.0", "127.0.0.1"])
def test_an_overlay_packet_of_an_unknown_node_loses_its_identity(
    overlay: OverlayWorld, source: str, pod: str, node: str
) -> None:
    for destination in (pod, ROUTER if "." in pod else ROUTER6):
        assert overlay.tunnel_brings(FRAME / udp(source, destination), node=node).dropped == (172, INGRESS)


def test_an_overlay_packet_of_a_removed_node_loses_its_identity(overlay: OverlayWorld) -> None:
    packet = FRAME / udp(REMOTE, A.ip)
    assert overlay.tunnel_brings(packet).action == REDIRECT
    overlay.maps["cilium_node_map_v2"].clear()
    assert overlay.tunnel_brings(packet).dropped == (172, INGRESS)


@FAMILIES
def test_what_a_node_claims_of_another_nodes_pod_counts_for_its_own_packets_alone(
    overlay: OverlayWorld, source: str, pod: str
) -> None:
    """A node is trusted with identities, so it gains nothing by an address, and gets no answers to it."""
    thief = "192.168.7.9"
    overlay.maps["cilium_node_map_v2"].update(NodeKey(ip_address(thief)).pack(), NodeValue(2).pack())
    overlay.allow(A, only_from(REMOTE_IDENTITY))
    request = FRAME / tcp(source, pod, "S", sport=40000, dport=80)
    for _ in range(2):  # before and after the pod has opened that very flow
        assert overlay.tunnel_brings(request, vni=5000, node=thief).dropped == (133, INGRESS)
        assert overlay.tunnel_brings(request).action == REDIRECT
    assert overlay.tunnel_brings(request, node=thief).action == REDIRECT, "as whom it names"
    assert overlay.tunnel_brings(request, vni=5000).dropped == (133, INGRESS)
    assert overlay.tunnel_brings(request).action == REDIRECT
    overlay.recorder.nothing()
    answer = from_pod(A) / tcp(pod, source, "SA", sport=80, dport=40000)
    assert overlay.pod_sends(A, answer).action == REDIRECT
    sent = overlay.recorder.tunnelled
    assert sent is not None
    assert str(sent.remote) == OTHER_NODE


def test_an_overlay_packet_with_identity_host_is_dropped(overlay: OverlayWorld) -> None:
    assert overlay.tunnel_brings(FRAME / udp(REMOTE, A.ip), vni=1).dropped == (171, INGRESS)


def test_overlay_packets_without_a_tunnel_key_are_dropped(overlay: OverlayWorld) -> None:
    overlay.recorder.nothing()
    assert overlay._run("hive_from_vxlan", FRAME / udp(REMOTE, A.ip), 1).dropped == (147, INGRESS)


@pytest.mark.parametrize(
    ("source", "pod", "world"), [(REMOTE, A.ip, 9), (REMOTE6, A.ip6, 10)], ids=["ipv4", "ipv6"]
)
def test_the_world_is_split_again_by_family(overlay: OverlayWorld, source: str, pod: str, world: int) -> None:
    overlay.allow(A, only_from(world))
    assert overlay.tunnel_brings(FRAME / udp(source, pod), vni=2).action == REDIRECT


def test_on_a_node_of_one_family_there_is_one_world(overlay: OverlayWorld) -> None:
    node_config = NodeConfig.unpack(overlay.maps["hive_node"].lookup(bytes(4)) or b"")
    alone = NodeConfig(
        node_config.router_ip, 2, node_config.host_mac, 3, node_config.net_mac, node_config.pod_cidr
    )
    overlay.maps["hive_node"].update(bytes(4), alone.pack())
    overlay.allow(A, only_from(2))
    assert overlay.tunnel_brings(FRAME / udp(REMOTE, A.ip), vni=2).action == REDIRECT


def test_with_node_local_identities_the_ipcache_decides_the_source_of_overlay_packets(
    overlay: OverlayWorld,
) -> None:
    overlay.set_tunnel(on=True, flags=TUNNEL_OWN_IDENTITIES)
    overlay.allow(A, only_from(B.identity))  # another node may have given this number to any pod
    assert overlay.tunnel_brings(FRAME / udp(REMOTE, A.ip), vni=B.identity).dropped == (133, INGRESS)
    overlay.allow(A, only_from(REMOTE_IDENTITY))  # as the ipcache has it
    assert overlay.tunnel_brings(FRAME / udp(REMOTE, A.ip), vni=B.identity).action == REDIRECT
    overlay.allow(A, only_from(9))
    assert overlay.tunnel_brings(FRAME / udp("10.2.0.99", A.ip), vni=B.identity).action == REDIRECT
    overlay.allow(A, only_from(6))  # reserved numbers are everybody's
    assert overlay.tunnel_brings(FRAME / udp("10.2.0.1", A.ip), vni=6).action == REDIRECT


def test_another_node_may_be_known_as_more_than_that(overlay: OverlayWorld) -> None:
    overlay.identify("10.2.0.1", 7)
    overlay.allow(A, only_from(7))
    assert overlay.tunnel_brings(FRAME / udp("10.2.0.1", A.ip), vni=6).action == REDIRECT
    overlay.allow(A, only_from(6))
    assert overlay.tunnel_brings(FRAME / udp("10.2.0.2", A.ip), vni=6).action == REDIRECT


@pytest.mark.parametrize("source", [NODE, ROUTER, B.ip, A.ip, "127.0.0.1", NODE6, ROUTER6, B.ip6, "::1"])
def test_an_overlay_packet_from_an_address_of_this_node_is_dropped(
    overlay: OverlayWorld, source: str
) -> None:
    pod, router = (A.ip6, ROUTER6) if ":" in source else (A.ip, ROUTER)
    for target in (pod, router):
        for vni in (6, REMOTE_IDENTITY):
            packet = FRAME / udp(source, target)
            assert overlay.tunnel_brings(packet, vni=vni).dropped == (132, INGRESS)


@pytest.mark.parametrize(
    ("source", "own"), [(REMOTE, ROUTER), (REMOTE, NODE), (REMOTE6, ROUTER6), (REMOTE6, NODE6)]
)
def test_overlay_packets_for_the_node_reach_its_stack(overlay: OverlayWorld, source: str, own: str) -> None:
    done = overlay.tunnel_brings(FRAME / echo(source, own))
    assert done.action == REDIRECT
    assert overlay.recorder.redirected == Redirected(2, BPF_F_INGRESS)
    assert raw(done.packet.dst) == raw("0a:00:00:00:00:01")
    assert bytes(done.packet)[14:] == bytes(FRAME / echo(source, own))[14:]


@pytest.mark.parametrize("destination", ["10.1.0.200", "198.51.100.7", REMOTE, "255.255.255.255", "ff02::1"])
def test_overlay_packets_to_unknown_addresses_are_dropped(overlay: OverlayWorld, destination: str) -> None:
    source = REMOTE6 if ":" in destination else REMOTE
    assert overlay.tunnel_brings(FRAME / udp(source, destination)).dropped == (151, INGRESS)


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (FRAME / ARP(op=1, pdst=A.ip), 139),
        (FRAME / Dot1Q(vlan=5) / udp(REMOTE, A.ip), 139),
        (FRAME / udp(REMOTE, A.ip), 196),
    ],
    ids=["arp", "vlan", "used up"],
)
def test_other_packets_are_dropped_with_their_reason(
    overlay: OverlayWorld, packet: Ether, reason: int
) -> None:
    if reason == 196:
        packet[IP].ttl = 1
    assert overlay.tunnel_brings(packet).dropped == (reason, INGRESS)


def test_an_error_about_a_flow_through_the_tunnel_reaches_its_pod(overlay: OverlayWorld) -> None:
    sent = udp(A.ip, REMOTE, sport=5, dport=53)
    assert overlay.pod_sends(A, from_pod(A) / sent).action == REDIRECT
    overlay.allow(A, [(PolicyKey(0, egress=True), PolicyEntry())])
    error = IP(src=REMOTE, dst=A.ip) / ICMP(type=3, code=3) / IPerror(bytes(sent[IP])[:28])
    assert error.haslayer(UDPerror)
    assert overlay.tunnel_brings(FRAME / error).action == REDIRECT
    unasked = IP(src="10.2.0.77", dst=A.ip) / ICMP(type=3, code=3) / IPerror(bytes(sent[IP])[:28])
    assert overlay.tunnel_brings(FRAME / unasked).dropped == (133, INGRESS)


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    node=st.sampled_from([OTHER_NODE, STRANGER, NODE]),
    vni=st.one_of(st.sampled_from([0, 1, 2, 6, REMOTE_IDENTITY]), st.integers(0, 0xFFFFFF)),
    destination=st.sampled_from([A.ip, ROUTER, "10.1.0.200"]),
    allowed=st.sampled_from([2, 6, 9, REMOTE_IDENTITY]),
)
def test_a_packet_arrives_only_as_an_allowed_identity_of_a_node(
    overlay: OverlayWorld, node: str, vni: int, destination: str, allowed: int
) -> None:
    """Against the rule in plain words."""
    overlay.reset()
    overlay.maps["cilium_ipcache"].delete(IpcacheKey.of(ip_network(REMOTE)).pack())
    overlay.allow(A, only_from(allowed))
    done = overlay.tunnel_brings(FRAME / udp(REMOTE, destination), vni=vni, node=node)
    if node != OTHER_NODE:
        expected: int | None = 172
    elif vni == 1:
        expected = 171
    elif destination == "10.1.0.200":
        expected = 151
    elif destination == A.ip and {2: 9}.get(vni, vni) != allowed:
        expected = 133
    else:
        expected = None
    assert (done.dropped or (None, INGRESS)) == (expected, INGRESS)
    assert (done.action == SHOT) == (expected is not None)


def test_random_bytes_in_the_tunnel_are_handled(overlay: OverlayWorld) -> None:
    whole = bytes(FRAME / tcp(REMOTE, A.ip, "S"))
    for length in range(34, len(whole)):
        assert overlay.tunnel_brings(whole[:length]).action in {REDIRECT, SHOT}


@FAMILIES
def test_nodes_are_believed_by_their_ipv6_addresses_too(overlay: OverlayWorld, source: str, pod: str) -> None:
    """Also while this node sends over IPv4: a cluster changes node by node."""
    overlay.allow(A, only_from(REMOTE_IDENTITY))
    packet = FRAME / udp(source, pod)
    assert overlay.tunnel_brings(packet, node=OTHER_NODE6).dropped == (172, INGRESS)
    overlay.over_ipv6()
    assert overlay.tunnel_brings(packet, node=STRANGER6).dropped == (172, INGRESS)
    assert overlay.tunnel_brings(packet, node=OTHER_NODE6).action == REDIRECT
    other = FRAME / udp(source, pod, sport=7)
    assert overlay.tunnel_brings(other, vni=REMOTE_IDENTITY + 1, node=OTHER_NODE6).dropped == (133, INGRESS)
    overlay.set_tunnel(on=True)
    for node in (OTHER_NODE, OTHER_NODE6):
        assert overlay.tunnel_brings(packet, node=node).action == REDIRECT
