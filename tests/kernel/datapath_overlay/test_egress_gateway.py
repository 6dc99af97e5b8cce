"""Egress gateway traffic: on the pod's node, on the gateway, and its replies."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv4Interface

import pytest
from scapy.layers.inet import ICMP, IP, UDP, IPerror, UDPerror
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from cells.maps.records.cluster import (
    TUNNEL_GATEWAYS,
    TUNNEL_NOT_FOR_PODS,
    EgressKey,
    EgressValue,
)
from cells.maps.records.flows import DEVICE_MASQUERADE_IPV4, DeviceConfig
from tests.kernel.datapath.packets import from_pod, tcp, udp
from tests.kernel.datapath.world import EGRESS, IFINDEX, INGRESS, NODE, OK, OUTSIDE, REDIRECT, A, Outcome, raw
from tests.kernel.datapath_overlay.recorder import NOWHERE, Redirected, Route, Tunnelled
from tests.kernel.datapath_overlay.world import IFINDEX as TUNNEL
from tests.kernel.datapath_overlay.world import (
    OTHER_NODE,
    PORT,
    REMOTE,
    REMOTE_IDENTITY,
    STRANGER,
    OverlayWorld,
)

pytestmark = pytest.mark.kernel

EGRESS_IP, NONE, EXCLUDED = "203.0.113.5", "0.0.0.0", "0.0.0.1"
OWN, HOP = "0a:00:00:00:00:09", "0a:00:00:00:00:0a"
HERE = Route(0, IFINDEX, raw(OWN), raw(HOP))
UPLINK = 99
ELSEWHERE = Route(0, UPLINK, raw(OWN), raw(HOP))
UNROUTABLE, UNSUPPORTED, NO_FIB, ENCAP_PROHIBITED = 151, 168, 169, 170
NO_EGRESS_GATEWAY, NO_EGRESS_IP = 194, 204
REMOTE_NODE, CIDR_IDENTITY, WORLD = 6, 1 << 24 | 1, 2
FIRST_PORT = 32768

MODES = pytest.mark.parametrize("flags", [0, TUNNEL_NOT_FOR_PODS], ids=["tunnel", "native"])


def serve(world: OverlayWorld, flags: int = 0) -> None:
    """Gateways are served, and the device masquerades."""
    world.set_tunnel(on=True, flags=TUNNEL_GATEWAYS | flags)
    config = DeviceConfig(raw(OWN), IPv4Address(NODE), flags=DEVICE_MASQUERADE_IPV4)
    for ifindex in (IFINDEX, UPLINK):
        world.maps["hive_devices"].update(struct.pack("<I", ifindex), config.pack())


def policy(
    world: OverlayWorld,
    gateway: str,
    egress: str = NONE,
    *,
    pod: str = A.ip,
    network: str = "198.51.100.0/24",
) -> None:
    """Packets of the pod to the network leave by the gateway, from this address."""
    key = EgressKey(IPv4Address(pod), IPv4Interface(network))
    value = EgressValue(IPv4Address(egress), IPv4Address(gateway))
    world.maps["cilium_egress_gw_policy_v4"].update(key.pack(), value.pack())
    world.bump(0)


def brought(world: OverlayWorld, packet: Packet, route: Route = HERE) -> Outcome:
    """Out of the tunnel, from the other node's pod, where routes say this."""
    world.recorder.comes_from(OTHER_NODE, REMOTE_IDENTITY, route)
    return world._run("hive_from_vxlan", packet, 1)  # as tunnel_brings(), with routes


def outward(source: str, *, sport: int = 40000, ttl: int = 63) -> Packet:
    return (
        Ether(src=HOP, dst=OWN)
        / IP(src=source, dst=OUTSIDE, ttl=ttl)
        / UDP(sport=sport, dport=53)
        / Raw(b"x")
    )


@MODES
def test_selected_packets_go_to_the_egress_gateway_in_the_tunnel(overlay: OverlayWorld, flags: int) -> None:
    serve(overlay, flags)
    policy(overlay, OTHER_NODE)
    sent = from_pod(A) / udp(A.ip, OUTSIDE)
    for _ in range(3):  # the first is evaluated, later ones are remembered
        done = overlay.pod_sends(A, sent)
        assert done.action == REDIRECT
        assert overlay.recorder.tunnelled == Tunnelled(A.identity, IPv4Address(OTHER_NODE), 64, 28, 2)
        assert overlay.recorder.redirected == Redirected(TUNNEL, 0)
        assert done.counted == {(0, EGRESS): 1}
        overlay.recorder.nothing()
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, "203.0.113.77")).action == OK
    assert overlay.recorder.tunnelled is None


def test_in_native_mode_other_nodes_pods_are_reached_without_the_tunnel(overlay: OverlayWorld) -> None:
    serve(overlay, TUNNEL_NOT_FOR_PODS)
    for _ in range(2):
        assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).action == OK
        assert overlay.recorder.tunnelled is None
    forged = overlay.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE, dport=PORT))
    assert forged.dropped == (ENCAP_PROHIBITED, EGRESS), "nodes believe what comes to the tunnel's port"
    policy(overlay, OTHER_NODE)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE, dport=PORT)).dropped == (
        ENCAP_PROHIBITED,
        EGRESS,
    )


@MODES
def test_a_flow_follows_its_policy(overlay: OverlayWorld, flags: int) -> None:
    serve(overlay, flags)
    sent = from_pod(A) / udp(A.ip, OUTSIDE)

    def becomes() -> object:
        overlay.recorder.nothing()
        done = overlay.pod_sends(A, sent)
        return (
            overlay.recorder.tunnelled.remote if overlay.recorder.tunnelled else done.dropped or done.action
        )

    assert [becomes(), becomes()] == [OK, OK]
    policy(overlay, OTHER_NODE)
    assert [becomes(), becomes()] == [IPv4Address(OTHER_NODE)] * 2
    policy(overlay, "192.168.7.9")
    assert [becomes(), becomes()] == [IPv4Address("192.168.7.9")] * 2
    policy(overlay, NONE)
    assert [becomes(), becomes()] == [(NO_EGRESS_GATEWAY, EGRESS)] * 2
    policy(overlay, EXCLUDED, network=f"{OUTSIDE}/32")
    assert [becomes(), becomes()] == [OK, OK]
    overlay.maps["cilium_egress_gw_policy_v4"].clear()
    overlay.bump(0)
    assert [becomes(), becomes()] == [OK, OK]


def test_egress_gateway_policies_apply_only_to_traffic_out_of_the_cluster(overlay: OverlayWorld) -> None:
    serve(overlay)
    policy(overlay, OTHER_NODE, network="0.0.0.0/0")
    for identity, meant in ((REMOTE_NODE, False), (4712, False), (CIDR_IDENTITY, True), (WORLD, True)):
        overlay.identify(OUTSIDE, identity)
        overlay.bump(0)
        overlay.recorder.nothing()
        overlay.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
        assert (overlay.recorder.tunnelled is not None) is meant, identity


def test_replies_of_a_pod_bypass_the_egress_gateway(overlay: OverlayWorld) -> None:
    serve(overlay)
    policy(overlay, OTHER_NODE)
    overlay.pod_gets(A, from_pod(A) / tcp(OUTSIDE, A.ip, "S", sport=5000, dport=80))
    answer = from_pod(A) / tcp(A.ip, OUTSIDE, "SA", sport=80, dport=5000)
    assert overlay.pod_sends(A, answer).action == OK
    assert overlay.recorder.tunnelled is None
    left = overlay.device_sends(Ether(src=HOP, dst=OWN) / answer[IP])
    assert (left.action, left.packet[IP].src) == (OK, A.ip)


def test_without_enable_ipv4_egress_gateway_entries_are_ignored(overlay: OverlayWorld) -> None:
    serve(overlay)
    overlay.set_tunnel(on=True)
    policy(overlay, OTHER_NODE)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE)).action == OK
    assert overlay.device_sends(outward(A.ip)).packet[IP].src == NODE
    assert brought(overlay, outward(REMOTE)).dropped == (UNROUTABLE, INGRESS)


def test_a_pod_on_its_gateway_leaves_from_the_policys_address(overlay: OverlayWorld) -> None:
    serve(overlay)
    policy(overlay, NODE, EGRESS_IP)
    assert overlay.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE)).action == OK
    overlay.recorder.nothing(HERE)
    left = overlay.device_sends(outward(A.ip))
    assert (left.action, left.packet[IP].src, left.packet[IP].ttl) == (OK, EGRESS_IP, 63)
    assert left.packet[UDP].sport >= FIRST_PORT
    back = (
        Ether(src=HOP, dst=OWN) / IP(src=OUTSIDE, dst=EGRESS_IP) / UDP(sport=53, dport=left.packet[UDP].sport)
    )
    answered = overlay.device_gets(back)
    assert (answered.action, answered.packet[IP].dst, answered.packet[UDP].dport) == (OK, A.ip, 40000)
    assert overlay.recorder.tunnelled is None
    overlay.recorder.nothing(ELSEWHERE)
    other = overlay.device_sends(outward(A.ip, sport=40001))
    assert (other.action, other.packet[IP].src) == (REDIRECT, EGRESS_IP)
    assert overlay.recorder.redirected == Redirected(UPLINK, 0), (
        "routes are by the address that it leaves from"
    )
    policy(overlay, NODE, NONE)
    assert overlay.device_sends(outward(A.ip, sport=40002)).dropped == (NO_EGRESS_IP, EGRESS)


def test_packets_out_of_the_stack_go_to_the_egress_gateway(overlay: OverlayWorld) -> None:
    serve(overlay)
    policy(overlay, OTHER_NODE)
    assert overlay.device_sends(outward(A.ip)).action == REDIRECT
    assert overlay.recorder.tunnelled == Tunnelled(A.identity, IPv4Address(OTHER_NODE), 64, 28, 2)
    policy(overlay, NONE)
    assert overlay.device_sends(outward(A.ip)).dropped == (NO_EGRESS_GATEWAY, EGRESS)
    policy(overlay, EXCLUDED)
    assert overlay.device_sends(outward(A.ip)).packet[IP].src == NODE
    policy(overlay, OTHER_NODE, pod=NODE)
    overlay.recorder.nothing()
    assert overlay.device_sends(outward(NODE)).packet[IP].src == NODE, "the node's own is nobody's"


@MODES
def test_the_gateway_translates_and_sends_answers_back_in_the_tunnel(
    overlay: OverlayWorld, flags: int
) -> None:
    serve(overlay, flags)
    policy(overlay, NODE, EGRESS_IP, pod=REMOTE)
    left = brought(overlay, outward(REMOTE))
    assert (left.action, left.packet[IP].src, left.packet[IP].ttl) == (REDIRECT, EGRESS_IP, 62)
    assert overlay.recorder.redirected == Redirected(IFINDEX, 0)
    assert (left.packet[Ether].src, left.packet[Ether].dst) == (OWN, HOP)
    port = left.packet[UDP].sport
    assert brought(overlay, outward(REMOTE)).packet[UDP].sport == port, "a flow keeps its port"
    (flow,) = overlay.connections(tcp=False)
    assert (str(flow.daddr), str(flow.saddr)) == (REMOTE, OUTSIDE)

    def comes_back(packet: Packet) -> Outcome:
        overlay.recorder.nothing(HERE)
        return overlay.device_gets(Ether(src=HOP, dst=OWN) / packet)

    answered = comes_back(IP(src=OUTSIDE, dst=EGRESS_IP) / UDP(sport=53, dport=port) / Raw(b"y"))
    assert answered.action == REDIRECT
    assert (answered.packet[IP].dst, answered.packet[UDP].dport) == (REMOTE, 40000)
    assert overlay.recorder.tunnelled == Tunnelled(WORLD, IPv4Address(OTHER_NODE), 64, 28, 2)
    assert overlay.recorder.redirected == Redirected(TUNNEL, 0)
    about = IP(src=EGRESS_IP, dst=OUTSIDE) / UDP(sport=port, dport=53)
    erred = comes_back(IP(src="192.0.2.9", dst=EGRESS_IP) / ICMP(type=3, code=4, nexthopmtu=1400) / about)
    assert (erred.action, erred.packet[IP].dst) == (REDIRECT, REMOTE)
    assert (erred.packet[IPerror].src, erred.packet[UDPerror].sport) == (REMOTE, 40000)
    assert overlay.recorder.tunnelled == Tunnelled(WORLD, IPv4Address(OTHER_NODE), 64, 28, 2)


def test_the_egress_gateway_accepts_only_selected_packets(overlay: OverlayWorld) -> None:
    serve(overlay)
    assert brought(overlay, outward(REMOTE)).dropped == (UNROUTABLE, INGRESS)
    policy(overlay, NODE, NONE, pod=REMOTE)
    assert brought(overlay, outward(REMOTE)).dropped == (NO_EGRESS_IP, INGRESS)
    policy(overlay, NODE, EGRESS_IP, pod=REMOTE)
    assert brought(overlay, outward(REMOTE, ttl=1)).dropped == (196, INGRESS)
    overlay.identify(OUTSIDE, REMOTE_NODE)
    assert brought(overlay, outward(REMOTE)).dropped == (UNROUTABLE, INGRESS)
    assert not list(overlay.maps["cilium_snat_v4_external"].items())


def test_the_gateway_translates_no_icmp_message_without_an_identifier(overlay: OverlayWorld) -> None:
    serve(overlay)
    policy(overlay, NODE, EGRESS_IP, pod=REMOTE)
    head = Ether(src=HOP, dst=OWN) / IP(src=REMOTE, dst=OUTSIDE, ttl=63)
    assert brought(overlay, head / ICMP(type="router-solicitation")).dropped == (UNSUPPORTED, EGRESS)
    left = brought(overlay, head / ICMP(type="echo-reply", id=7))
    assert (left.action, left.packet[IP].src, left.packet[ICMP].id) == (REDIRECT, REMOTE, 7), "to no query"
    asked = brought(overlay, head / ICMP(type="echo-request", id=7))
    assert (asked.action, asked.packet[IP].src) == (REDIRECT, EGRESS_IP)


def test_a_gateway_without_a_route_drops_packets_and_counts_them_as_dropped_alone(
    overlay: OverlayWorld,
) -> None:
    serve(overlay)
    policy(overlay, NODE, EGRESS_IP, pod=REMOTE)
    assert brought(overlay, outward(REMOTE), NOWHERE).counted == {(NO_FIB, INGRESS): 1}


@pytest.mark.parametrize("gateway", [EXCLUDED, NONE])
def test_packets_that_their_policy_no_longer_sends_to_a_gateway_are_the_stacks_there(
    overlay: OverlayWorld, gateway: str
) -> None:
    """As in Cilium: the pod's node had the policy of before, and routes of the stack lead on."""
    serve(overlay)
    policy(overlay, gateway, EGRESS_IP, pod=REMOTE)
    passed = brought(overlay, outward(REMOTE))
    assert (passed.action, passed.packet[IP].src) == (REDIRECT, REMOTE)
    assert overlay.recorder.redirected == Redirected(2, 1), "into cilium_host"
    assert passed.mark == 0x0F00 | REMOTE_IDENTITY << 16
    left = overlay._run("hive_to_device", passed.packet, 1, passed.mark)
    assert (left.action, left.packet[IP].src) == (OK, REMOTE)
    assert not list(overlay.maps["cilium_snat_v4_external"].items())


def test_nothing_leaves_by_the_gateway_in_the_name_of_a_pod_that_did_not_send_it(
    overlay: OverlayWorld,
) -> None:
    serve(overlay)
    for pod in (REMOTE, A.ip, NODE):
        policy(overlay, NODE, EGRESS_IP, pod=pod)
    for source in (A.ip, NODE, "127.0.0.1"):
        assert brought(overlay, outward(source)).dropped == (132, INGRESS), source
    overlay.recorder.comes_from(STRANGER, REMOTE_IDENTITY, HERE)
    assert overlay._run("hive_from_vxlan", outward(REMOTE), 1).dropped is not None, "of no known node"
    assert overlay.pod_sends(A, from_pod(A) / udp(REMOTE, OUTSIDE)).dropped == (132, EGRESS)
    assert not list(overlay.maps["cilium_snat_v4_external"].items())
    assert brought(overlay, outward(REMOTE)).action == REDIRECT
