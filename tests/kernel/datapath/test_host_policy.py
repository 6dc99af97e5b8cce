"""The host endpoint's policy decides which packets the node may send and receive."""

import struct
from collections.abc import Iterator

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import (
    ICMPv6MLReport2,
    ICMPv6ND_NS,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrHopByHop,
    RouterAlert,
)
from scapy.layers.l2 import ARP, LLC, SNAP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from cells.maps.map import Map, create_map
from cells.maps.records.endpoints import NODE_AUDITS_HOST, PolicyEntry, PolicyKey
from cells.maps.records.flows import DeviceConfig
from cells.maps.specs import policy_spec
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    IFINDEX,
    INGRESS,
    NODE,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    A,
    World,
)
from tests.kernel.datapath_overlay.recorder import NOWHERE, Recorder, Route, recorded_object
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

NUMBER = 20
"""Of the host endpoint."""
WORLD4, WORLD6 = 9, 10
TCP, UDP, GRE = 6, 17, 47
FRAME = Ether(src="0a:00:00:00:99:01", dst="0a:00:00:00:99:02")
ALLOW = PolicyEntry()
SOMEWHERE = Route(0, 9)
FWD_DISABLED = Route(5)


class GuardedWorld(World):
    """The world, with routes that a test gives."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        super().__init__(None, recorded_object(), self.recorder.map)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.map.close()

    def reset(self) -> None:
        """As new, with a device, and a way to every address."""
        super().reset()
        self.maps["hive_devices"].update(struct.pack("<I", IFINDEX), DeviceConfig(bytes(6)).pack())
        self.recorder.nothing(SOMEWHERE)


@pytest.fixture(scope="module")
def loaded_world() -> Iterator[World]:
    """Maps and programs, compiled so that routes are the test's."""
    need_root()
    with GuardedWorld() as world:
        yield world


class Host:
    """The node, and its policy."""

    def __init__(self, world: World, policy: Map) -> None:
        self.world = world
        self._policy = policy

    def allow(self, *keys: PolicyKey) -> None:
        """Make these its whole policy."""
        self._policy.clear()
        for key in keys:
            self._policy.update(key.pack(), ALLOW.pack(key))
        self.world.bump(NUMBER)


@pytest.fixture
def host(world: World) -> Iterator[Host]:
    """A node with a policy that allows nothing."""
    with create_map(policy_spec(NUMBER, 256)) as policy:
        world.maps["hive_policies"].update(struct.pack("<I", NUMBER), struct.pack("<I", policy.fd))
        world.report(host_endpoint=NUMBER)
        world.bump(0)
        yield Host(world, policy)
        world.maps["hive_policies"].delete(struct.pack("<I", NUMBER))
        world.report()


def gets(identity: int, protocol: int = 0, port: int = 0) -> PolicyKey:
    return PolicyKey(identity, False, protocol, port, 16 if port else 0)


def sends(identity: int, protocol: int = 0, port: int = 0) -> PolicyKey:
    return PolicyKey(identity, True, protocol, port, 16 if port else 0)


SSH = FRAME / tcp(OUTSIDE, NODE, "S", dport=22)
FETCH = FRAME / tcp(NODE, OUTSIDE, "S", dport=443)


def test_a_node_without_a_policy_may_do_everything(world: World) -> None:
    assert world.device_gets(SSH).action == OK
    assert world.device_sends(FETCH).action == OK


@pytest.mark.parametrize(
    ("client", "node", "identity"), [(OUTSIDE, NODE, WORLD4), (OUTSIDE6, NODE6, WORLD6)], ids=["v4", "v6"]
)
def test_ingress_host_policy_filters_connections_and_replies_pass(
    host: Host, client: str, node: str, identity: int
) -> None:
    knock = FRAME / tcp(client, node, "S", dport=22)
    assert host.world.device_gets(knock).dropped == (133, INGRESS)
    host.allow(gets(identity, TCP, 22))
    assert host.world.device_gets(knock).action == OK
    answer = FRAME / tcp(node, client, "SA", sport=22, dport=40000)
    assert host.world.device_sends(answer).action == OK
    assert host.world.device_gets(FRAME / tcp(client, node, "S", dport=23)).dropped == (133, INGRESS)


def test_egress_host_policy_filters_connections_and_replies_pass(host: Host) -> None:
    assert host.world.device_sends(FETCH).dropped == (133, EGRESS)
    host.allow(sends(WORLD4, TCP, 443))
    assert host.world.device_sends(FETCH).action == OK
    assert host.world.device_gets(FRAME / tcp(OUTSIDE, NODE, "SA", sport=443, dport=40000)).action == OK
    assert host.world.device_sends(FRAME / udp(NODE, OUTSIDE)).dropped == (133, EGRESS)


def test_a_flow_of_the_node_is_cut_when_its_allowance_goes(host: Host) -> None:
    host.allow(gets(WORLD4, TCP, 22))
    for packet in (SSH, FRAME / tcp(OUTSIDE, NODE, "A", dport=22)):
        assert host.world.device_gets(packet).action == OK
    host.allow()
    assert host.world.device_gets(FRAME / tcp(OUTSIDE, NODE, "A", dport=22)).dropped == (133, INGRESS)


def test_host_policy_filters_each_packet_of_a_pod_by_its_identity(host: Host) -> None:
    begin, go_on = (from_pod(A) / tcp(A.ip, NODE, flags) for flags in "SA")
    assert host.world.pod_sends(A, begin).dropped == (133, INGRESS)
    host.allow(gets(A.identity, TCP, 80))
    assert host.world.pod_sends(A, begin).action == OK
    assert (
        host.world.host_sends(from_host() / tcp(NODE, A.ip, "SA", sport=80, dport=40000)).action == REDIRECT
    )
    assert host.world.pod_sends(A, go_on, repeat=3).action == OK
    host.allow()
    assert host.world.pod_sends(A, go_on).dropped == (133, INGRESS)


def test_the_node_reaches_a_pod_by_both_policies_and_the_pod_answers(host: Host) -> None:
    begin = from_host() / tcp(NODE, A.ip, "S")
    assert host.world.host_sends(begin).dropped == (133, EGRESS)
    host.allow(sends(A.identity, TCP, 80))
    assert host.world.host_sends(begin).action == REDIRECT
    assert host.world.pod_sends(A, from_pod(A) / tcp(A.ip, NODE, "SA", sport=80, dport=40000)).action == OK


def test_host_policy_ignores_forwarded_packets(host: Host) -> None:
    assert host.world.device_gets(FRAME / tcp(OUTSIDE, "203.0.113.9", "S")).action == OK
    assert host.world.device_sends(FRAME / tcp("203.0.113.9", OUTSIDE, "S")).action == OK


def test_neighbour_discovery_passes_under_every_host_policy(host: Host) -> None:
    ask = FRAME / IPv6(src=OUTSIDE6, dst=NODE6, hlim=255) / ICMPv6ND_NS(tgt=NODE6)
    assert host.world.device_gets(ask).action == OK
    assert host.world.device_gets(FRAME / echo(OUTSIDE6, NODE6)).dropped == (133, INGRESS)


def test_protocols_without_conntrack_are_filtered_packet_by_packet(host: Host) -> None:
    tunnel: Packet = FRAME / IP(src=OUTSIDE, dst=NODE, proto=GRE) / b"inside"
    assert host.world.device_gets(tunnel).dropped == (133, INGRESS)
    host.allow(gets(WORLD4))
    assert host.world.device_gets(tunnel).action == OK
    assert not host.world.connections(tcp=False)


def test_an_audited_node_lets_through_what_its_policy_refuses_and_pods_do_not(host: Host) -> None:
    host.world.report(NODE_AUDITS_HOST, host_endpoint=NUMBER)
    assert host.world.device_gets(SSH).action == OK
    host.world.allow(A, [])
    assert host.world.pod_sends(A, from_pod(A) / tcp(A.ip, NODE, "S")).dropped == (133, EGRESS)


def test_without_its_policy_map_the_node_stays_reachable(host: Host) -> None:
    host.world.maps["hive_policies"].delete(struct.pack("<I", NUMBER))
    assert host.world.device_gets(SSH).action == OK
    assert host.world.device_sends(FETCH).action == OK


LINK_LOCAL, NEIGHBOUR = "fe80::7", "fe80::1"
REFUSED = (133, INGRESS)


@pytest.mark.parametrize(
    "target",
    [LINK_LOCAL, "ff02::1", "ff05::2", "224.0.0.1", "239.1.2.3", "255.255.255.255", "0.0.0.0"],
)
def test_packets_that_routers_never_forward_are_of_the_node(host: Host, target: str) -> None:
    client, pod = (OUTSIDE6, A.ip6) if ":" in target else (OUTSIDE, A.ip)
    for packet in (tcp(client, target, "S", dport=10250), udp(client, target), echo(client, target)):
        assert host.world.device_gets(FRAME / packet).dropped == REFUSED
        packet[IPv6 if ":" in target else IP].src = pod
        assert host.world.pod_sends(A, from_pod(A) / packet, repeat=3).dropped == REFUSED
    host.allow(gets(WORLD6 if ":" in target else WORLD4, UDP, 53), gets(A.identity, UDP, 53))
    assert host.world.device_gets(FRAME / udp(client, target)).action == OK
    assert host.world.pod_sends(A, from_pod(A) / udp(pod, target)).action == OK


@pytest.mark.parametrize(("source", "target"), [(OUTSIDE, "192.168.7.255"), (OUTSIDE6, "fd00:7::")])
@pytest.mark.parametrize("route", [NOWHERE, FWD_DISABLED], ids=["local", "no router"])
def test_packets_without_another_route_are_of_the_node(
    host: Host, source: str, target: str, route: Route
) -> None:
    """Broadcast addresses of networks and anycast addresses of routers, also on devices that are none."""
    pod = A.ip6 if ":" in target else A.ip
    assert host.world.device_gets(FRAME / udp(source, target)).action == OK
    host.world.recorder.nothing(route)  # type: ignore[attr-defined]  # of GuardedWorld
    assert host.world.device_gets(FRAME / udp(source, target)).dropped == REFUSED
    assert host.world.pod_sends(A, from_pod(A) / udp(pod, target)).dropped == REFUSED
    assert host.world.device_gets(FRAME / udp(source, pod)).action == OK, "it is a pod's"


def test_host_policy_filters_link_local_addresses_of_neighbours(host: Host) -> None:
    ask, answer = (
        tcp(LINK_LOCAL, NEIGHBOUR, "S", sport=5, dport=179),
        tcp(NEIGHBOUR, LINK_LOCAL, "SA", sport=179, dport=5),
    )
    assert host.world.device_sends(FRAME / ask).dropped == (133, EGRESS)
    assert host.world.device_gets(FRAME / answer).dropped == REFUSED
    host.allow(sends(WORLD6, TCP, 179))
    assert host.world.device_sends(FRAME / ask).action == OK
    assert host.world.device_gets(FRAME / answer).action == OK


def listener_report(source: str) -> Packet:
    return (
        IPv6(src=source, dst="ff02::16", hlim=1)
        / IPv6ExtHdrHopByHop(options=RouterAlert())
        / ICMPv6MLReport2()
    )


def test_multicast_listener_reports_and_dhcp_pass_under_every_host_policy(host: Host) -> None:
    query: Packet = IP(src=OUTSIDE, dst="224.0.0.1", proto=2, ttl=1) / Raw(bytes(8))
    offer = udp(OUTSIDE, "255.255.255.255", sport=67, dport=68)
    offer6 = udp(NEIGHBOUR, LINK_LOCAL, sport=547, dport=546)
    for packet in (query, listener_report(NEIGHBOUR), offer, offer6):
        assert host.world.device_gets(FRAME / packet).action == OK
    for packet in (
        listener_report(LINK_LOCAL),
        udp(LINK_LOCAL, "ff02::1:2", sport=546, dport=547),
        udp(NODE, "255.255.255.255", sport=68, dport=67),
    ):
        assert host.world.device_sends(FRAME / packet).action == OK
    for packet in (
        udp(OUTSIDE, "255.255.255.255", sport=68, dport=67),
        udp(OUTSIDE, NODE, sport=67, dport=68),
        udp(NEIGHBOUR, LINK_LOCAL, sport=546, dport=547),
        udp(OUTSIDE6, NODE6, sport=547, dport=546),
        IP(src=OUTSIDE, dst="224.0.0.1", proto=2, ttl=2) / Raw(bytes(8)),
        IP(src=OUTSIDE, dst=NODE, proto=2, ttl=1) / Raw(bytes(8)),
    ):
        assert host.world.device_gets(FRAME / packet).dropped == REFUSED


@pytest.mark.parametrize("version", [4, 6])
def test_an_icmp_error_reaches_the_node_about_a_flow_of_its_own_and_no_other(
    host: Host, version: int
) -> None:
    node, peer, router = (NODE, OUTSIDE, "203.0.113.9") if version == 4 else (NODE6, OUTSIDE6, "2001:db8::9")
    kind = ICMP(type=11, code=0) if version == 4 else ICMPv6TimeExceeded()
    fetch = tcp(node, peer, "S", dport=443)

    def error(source: str, about: bytes) -> Packet:
        return FRAME / (IP if version == 4 else IPv6)(src=source, dst=node) / kind / Raw(about)

    host.allow(sends(WORLD4 if version == 4 else WORLD6, TCP, 443))
    assert host.world.device_gets(error(peer, bytes(fetch))).dropped == REFUSED
    assert host.world.device_sends(FRAME / fetch).action == OK
    for source in (peer, router):
        assert host.world.device_gets(error(source, bytes(fetch))).action == OK
        for about in (b"", bytes(48), bytes(fetch)[:10], bytes(tcp(node, peer, "S", dport=80))):
            assert host.world.device_gets(error(source, about)).dropped == REFUSED


TAGS = [
    Dot1Q(vlan=0),
    Dot1AD(vlan=0),
    Dot1AD(vlan=0) / Dot1Q(vlan=0),
    Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=0),
]


@pytest.mark.parametrize("tags", TAGS, ids=repr)
@pytest.mark.parametrize(("client", "node"), [(OUTSIDE, NODE), (OUTSIDE6, NODE6)])
def test_priority_tagged_frames_are_filtered(host: Host, tags: Packet, client: str, node: str) -> None:
    """The kernel takes them off behind the program, however many there are."""
    knock = FRAME / tags / tcp(client, node, "S", dport=22)
    assert host.world.device_gets(knock).dropped == REFUSED
    host.allow(gets(WORLD6 if ":" in node else WORLD4, TCP, 22))
    assert host.world.device_gets(knock).action == OK


def test_frames_with_too_many_vlan_tags_are_dropped(host: Host) -> None:
    knock: Packet = tcp(OUTSIDE, NODE, "S", dport=22)
    for _ in range(9):
        knock = Dot1Q(vlan=0) / knock
    assert host.world.device_gets(FRAME / knock).dropped == (182, INGRESS)


@pytest.mark.parametrize("to", ["203.0.113.9", NODE])
@pytest.mark.parametrize(
    "tags",
    [
        Dot1Q(vlan=5),
        Dot1AD(vlan=5) / Dot1Q(vlan=7),
        Dot1Q(vlan=0) / Dot1Q(vlan=5),
        Dot1AD(vlan=0) / Dot1Q(vlan=5),
        Dot1Q(vlan=0) / Dot1Q(vlan=0) / Dot1Q(vlan=5),
    ],
    ids=repr,
)
def test_vlan_tagged_frames_belong_to_the_vlan_device(host: Host, tags: Packet, to: str) -> None:
    """Its policy decides there, whatever priority tags stand before the VLAN's."""
    done = host.world.device_gets(FRAME / tags / tcp(OUTSIDE, to, "S", dport=22))
    assert (done.action, done.counted) == (OK, {})


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Ether(src=FRAME.src, dst=FRAME.dst, type=0x8847) / Raw(bytes(40)), 139),
        (Ether(src=FRAME.src, dst=FRAME.dst, type=0x88B5) / Raw(bytes(40)), 139),
        (Ether(src=FRAME.src, dst=FRAME.dst, type=40) / LLC() / SNAP(code=0x800) / Raw(bytes(40)), 166),
    ],
    ids=["MPLS", "experimental", "802.3"],
)
def test_frames_other_than_ip_and_arp_are_dropped_under_a_host_policy(
    host: Host, frame: Packet, reason: int
) -> None:
    assert host.world.device_gets(frame).dropped == (reason, INGRESS)
    assert host.world.device_gets(FRAME / ARP(pdst=NODE)).action == OK
    host.world.report()
    assert host.world.device_gets(frame).action == OK
