"""Redirects between pods and native devices, and cases that need the host's stack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import ICMPv6TimeExceeded, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from cells.datapath.settings import DatapathSettings
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.records.flows import DeviceConfig
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    IFINDEX,
    INGRESS,
    NODE,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    A,
    B,
    Outcome,
    Pod,
    World,
    raw,
)
from tests.kernel.datapath_overlay.recorder import NOWHERE, Recorder, Redirected, Route, recorded_object
from tests.support.namespaces import need_root

UPLINK = 99
OWN, HOP = "0a:00:00:00:00:09", "0a:00:00:00:00:0a"
WAY_OUT = Route(0, UPLINK, raw(OWN), raw(HOP))
TOO_LARGE, UNREACHABLE = 8, 2
"""BPF_FIB_LKUP_RET_FRAG_NEEDED, _UNREACHABLE (linux/bpf.h)."""
DENIED = 133
ROUTED_BY_HOST = 8
BY_PROXY_FOR_A = 0x0B00 | A.identity << 16
CLIENT = {4: OUTSIDE, 6: OUTSIDE6}


class RoutedWorld(World):
    """The world with host routing, and a device that routes lead out by."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        settings = DatapathSettings(enable_host_legacy_routing=False)
        super().__init__(settings, recorded_object(), self.recorder.map)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.map.close()

    def reset(self) -> None:
        super().reset()
        self.recorder.nothing(WAY_OUT)
        for ifindex in (IFINDEX, UPLINK):
            self.maps["hive_devices"].update(struct.pack("<I", ifindex), DeviceConfig(raw(OWN)).pack())

    def comes(self, packet: Packet) -> Outcome:
        """From outside, by the device."""
        return self.device_gets(Ether(src=HOP, dst=OWN) / packet)


@pytest.fixture(scope="module")
def loaded_routed() -> Iterator[RoutedWorld]:
    need_root()
    with RoutedWorld() as world:
        yield world


@pytest.fixture
def routed(loaded_routed: RoutedWorld) -> RoutedWorld:
    loaded_routed.reset()
    return loaded_routed


def own(pod: Pod, version: int) -> str:
    return pod.ip if version == 4 else pod.ip6


def hops(packet: Packet) -> int:
    return int(packet[IP].ttl if IP in packet else packet[IPv6].hlim)


@pytest.mark.parametrize("version", [4, 6])
def test_with_host_routing_packets_of_a_pod_are_redirected_to_the_device(
    routed: RoutedWorld, version: int
) -> None:
    source, target = own(A, version), CLIENT[version]
    for flags in ("S", "A", "A", "PA"):  # evaluated, remembered, spared
        routed.recorder.nothing(WAY_OUT)
        sent = from_pod(A) / tcp(source, target, flags)
        out = routed.pod_sends(A, sent)
        assert out.action == REDIRECT
        assert routed.recorder.redirected == Redirected(UPLINK, 0)
        assert (out.packet.src, out.packet.dst) == (OWN, HOP)
        assert hops(out.packet) == hops(Ether(bytes(sent))) - 1


def test_with_host_routing_the_kernel_resolves_unknown_next_hops(routed: RoutedWorld) -> None:
    routed.recorder.nothing(WAY_OUT._replace(answer=7))
    out = routed.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
    assert out.action == REDIRECT
    assert routed.recorder.redirected is None, "by bpf_redirect_neigh()"


@pytest.mark.parametrize(
    "route",
    [
        NOWHERE,
        WAY_OUT._replace(answer=UNREACHABLE),
        WAY_OUT._replace(answer=TOO_LARGE),
        WAY_OUT._replace(ifindex=5),
    ],
    ids=["no route", "unreachable", "too large", "another device"],
)
def test_with_host_routing_packets_without_a_route_out_go_to_the_stack(
    routed: RoutedWorld, route: Route
) -> None:
    for flags in ("S", "A", "A"):
        routed.recorder.nothing(route)
        sent = from_pod(A) / tcp(A.ip, OUTSIDE, flags)
        out = routed.pod_sends(A, sent)
        assert out.action == OK
        assert bytes(out.packet) == bytes(sent)


@pytest.mark.parametrize("version", [4, 6])
def test_with_host_routing_expired_packets_go_to_the_stack(routed: RoutedWorld, version: int) -> None:
    packet = from_pod(A) / udp(own(A, version), CLIENT[version])
    if version == 4:
        packet[IP].ttl = 1
        assert routed.pod_sends(A, packet).action == OK
    else:
        packet[IPv6].hlim = 1
        assert ICMPv6TimeExceeded in routed.pod_sends(A, packet).packet
    back = udp(CLIENT[version], own(A, version))
    if version == 4:
        back.ttl = 1
    else:
        back.hlim = 1
    assert routed.comes(back).action == OK


def test_with_host_routing_packets_to_the_node_go_to_the_stack(routed: RoutedWorld) -> None:
    for target in (NODE, NODE6, "ff02::1", "fe80::1"):
        assert routed.pod_sends(A, from_pod(A) / udp(own(A, 6 if ":" in target else 4), target)).action == OK
        assert routed.recorder.redirected is None


@pytest.mark.parametrize("version", [4, 6])
def test_with_host_routing_packets_reach_a_pod_and_replies_leave(routed: RoutedWorld, version: int) -> None:
    client, pod = CLIENT[version], own(B, version)
    for asked, answered in (("S", "SA"), ("A", "A"), ("A", "A")):
        sent = tcp(client, pod, asked)
        arrived = routed.comes(sent)
        assert arrived.action == REDIRECT
        assert (arrived.packet.src, arrived.packet.dst) == (B.host_mac, B.mac)
        assert hops(arrived.packet) == hops(Ether(bytes(Ether() / sent))) - 1
        routed.recorder.nothing(WAY_OUT)
        answer = routed.pod_sends(B, from_pod(B) / tcp(pod, client, answered, sport=80, dport=40000))
        assert answer.action == REDIRECT
        assert routed.recorder.redirected == Redirected(UPLINK, 0)


def test_with_host_routing_policy_is_enforced(routed: RoutedWorld) -> None:
    routed.allow(B, [(PolicyKey(0, egress=True), PolicyEntry())])
    assert routed.comes(tcp(OUTSIDE, B.ip, "S")).dropped == (DENIED, INGRESS)
    routed.pod_sends(B, from_pod(B) / tcp(B.ip, OUTSIDE, "S", sport=5000, dport=443))
    answer = routed.comes(tcp(OUTSIDE, B.ip, "SA", sport=443, dport=5000))
    assert answer.action == REDIRECT, "what the pod has asked for"
    routed.pod_sends(B, from_pod(B) / echo(B.ip, OUTSIDE))
    assert routed.comes(echo(OUTSIDE, B.ip, reply=True)).action == REDIRECT


def test_with_host_routing_packets_without_a_pod_go_to_the_stack(routed: RoutedWorld) -> None:
    for target in (NODE, "10.1.0.99"):
        assert routed.comes(tcp(OUTSIDE, target, "S")).action == OK


def test_answers_to_what_the_stack_has_brought_go_back_through_it(routed: RoutedWorld) -> None:
    """It may have translated the destination; then only it can put the first one back."""
    answer = from_pod(B) / tcp(B.ip, OUTSIDE, "A", sport=80, dport=40000)
    for _ in range(2):
        assert routed.host_sends(from_host() / tcp(OUTSIDE, B.ip, "S")).action == REDIRECT
        for _ in range(3):
            assert routed.pod_sends(B, answer).action == OK
        assert routed.comes(tcp(OUTSIDE, B.ip, "A")).action == REDIRECT
        for _ in range(3):
            assert routed.pod_sends(B, answer).action == REDIRECT


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("by_link", [False, True], ids=["cilium_host", "endpoint route"])
def test_answers_to_a_proxy_of_this_node_do_not_pass_the_stack(
    routed: RoutedWorld, version: int, *, by_link: bool
) -> None:
    """It has sent in A's name. The stack would drop what belongs to the proxy's socket and is for A."""
    asked = tcp(own(A, version), own(B, version), "S")
    if by_link:
        sent = routed.pod_gets(B, from_host() / asked, mark=BY_PROXY_FOR_A)
    else:
        sent = routed.host_sends(from_host() / asked, mark=BY_PROXY_FOR_A)
    assert (sent.action, sent.mark) == (OK if by_link else REDIRECT, 0)
    for flags in ("SA", "A", "A"):
        answer = tcp(own(B, version), own(A, version), flags, sport=80, dport=40000)
        assert routed.pod_sends(B, from_pod(B) / answer).action == REDIRECT


def test_with_host_routing_links_of_other_plugins_are_not_redirected_to(routed: RoutedWorld) -> None:
    chained = replace(A, flags=ROUTED_BY_HOST)
    assert routed.pod_sends(chained, from_pod(A) / udp(A.ip, OUTSIDE)).action == OK
    link = struct.pack("<I", A.address().ifindex)
    routed.maps["hive_endpoints"].update(link, chained.config().pack())
    routed.bump(A.id)
    assert routed.comes(udp(OUTSIDE, A.ip)).action == OK


@pytest.mark.parametrize("source", ["fe80::bad", "::"])
def test_with_host_routing_unroutable_addresses_go_to_the_stack(routed: RoutedWorld, source: str) -> None:
    """It refuses it (RFC 4291, 2.5.2 and 2.5.6)."""
    assert routed.comes(udp(OUTSIDE6, A.ip6)).action == REDIRECT
    assert routed.comes(udp(source, A.ip6)).action == OK
    assert not [
        key for key in routed.connections(tcp=False, version=6) if source in map(str, (key.saddr, key.daddr))
    ]
