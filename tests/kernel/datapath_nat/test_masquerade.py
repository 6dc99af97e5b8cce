"""Masquerading and its replies, compared with a plain model."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address, ip_network

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6ND_NA,
    ICMPv6PacketTooBig,
    ICMPv6Unknown,
    IPv6,
)
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP
from scapy.packet import Packet, Raw

from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.flows import DEVICE_IP_MASQ, DEVICE_REMOTE_NODES, CtKey, NatEntry
from cells.masquerade.ip_masq_agent import key_of
from tests.kernel.datapath.world import EGRESS, NODE, NODE6, OK, OUTSIDE, OUTSIDE6, SHOT, A, B, World
from tests.kernel.datapath_nat.conftest import FIRST_PORT, LAST_PORT, serve
from tests.kernel.datapath_nat.masqueraded import age, ip, known_to_conntrack, mapped, network, udp
from tests.support.examples import scaled

pytestmark = pytest.mark.kernel

NO_MAPPING, UNSUPPORTED = 167, 168
PORTS = LAST_PORT - FIRST_PORT + 1
OTHER, OTHER6 = "198.51.100.2", "2001:db8::2"
NODES = {4: NODE, 6: NODE6}
OUT, BACK = "out", "back"


def has_true_checksums(packet: Packet) -> bool:
    """Whether they are those that scapy computes for the same packet."""
    again = Ether(bytes(packet))
    for layer in (IP, UDP, TCP, ICMP, ICMPv6EchoRequest, ICMPv6DestUnreach, ICMPv6PacketTooBig):
        if layer in again:
            for name in ("chksum", "cksum"):
                if name in again[layer].fields:
                    delattr(again[layer], name)
            break
    first = [IP] if IP in again else []
    for layer in first:
        del again[layer].chksum
    return bytes(Ether(bytes(again))) == bytes(packet)


@dataclass
class Model:
    """What NAT is, without maps: a port for each flow, no port twice towards one destination."""

    ports: dict[tuple[object, ...], int] = field(default_factory=dict)

    def leaves(self, flow: tuple[object, ...], port: int) -> None:
        """The flow left under this port."""
        assert FIRST_PORT <= port <= LAST_PORT
        assert self.ports.setdefault(flow, port) == port, "a flow keeps its port"
        towards = [other for other in self.ports if other[2:] == flow[2:] and self.ports[other] == port]
        assert towards == [flow], "no two flows to one destination have one port"


FLOWS = st.tuples(
    st.sampled_from([A.ip, B.ip, A.ip6, B.ip6]),
    st.integers(FIRST_PORT - 5, FIRST_PORT + 5),
    st.sampled_from([0, 1]),
    st.sampled_from([53, 443]),
    st.sampled_from([TCP, UDP]),
)


@settings(max_examples=scaled(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FLOWS, min_size=1, max_size=25))
def test_every_flow_has_a_port_and_its_answers(
    world: World, flows: list[tuple[str, int, int, int, type[Packet]]]
) -> None:
    world.reset()
    serve(world)
    model = Model()
    for source, sport, which, dport, kind in flows:
        version = 6 if ":" in source else 4
        destination = ((OUTSIDE6, OTHER6) if version == 6 else (OUTSIDE, OTHER))[which]
        sent = ip(source, destination) / kind(sport=sport, dport=dport) / Raw(b"payload")
        left = world.device_sends(sent)
        assert (left.action, network(left.packet).src) == (OK, NODES[version])
        assert has_true_checksums(left.packet)
        port = left.packet[kind].sport
        model.leaves((source, sport, destination, dport, kind.__name__), port)
        answer = ip(destination, NODES[version]) / kind(sport=dport, dport=port) / Raw(b"answer")
        back = world.device_gets(answer)
        assert back.action == OK
        assert (network(back.packet).dst, back.packet[kind].dport) == (source, sport)
        assert has_true_checksums(back.packet)
    assert mapped(world) + mapped(world, 6) == 2 * len(model.ports)


@pytest.mark.parametrize(("pod", "outside"), [(A.ip, OUTSIDE), (A.ip6, OUTSIDE6)])
def test_when_no_port_is_left_only_new_flows_to_there_are_dropped(
    world: World, pod: str, outside: str
) -> None:
    for number in range(PORTS):
        assert world.device_sends(udp(pod, outside, 1000 + number)).action == OK
        known_to_conntrack(world, udp(pod, outside, 1000 + number))
    full = world.device_sends(udp(pod, outside, 5000))
    assert (full.action, full.counted) == (SHOT, {(NO_MAPPING, EGRESS): 1})
    assert world.device_sends(udp(pod, outside, 1000)).action == OK
    assert world.device_sends(udp(pod, outside, 5000, dport=54)).action == OK
    assert mapped(world, 6 if ":" in pod else 4) == 2 * (PORTS + 1)


@pytest.mark.parametrize(("pod", "other", "outside"), [(A.ip, B.ip, OUTSIDE), (A.ip6, B.ip6, OUTSIDE6)])
def test_when_no_port_is_left_those_of_ended_flows_are_reused(
    world: World, pod: str, other: str, outside: str
) -> None:
    """Before garbage collection, which may be hours away."""
    flows = [udp(pod, outside, 1000 + number) for number in range(PORTS)]
    ports = [world.device_sends(flow).packet[UDP].sport for flow in flows]
    for flow in flows:
        known_to_conntrack(world, flow)
    age(world)
    assert world.device_sends(udp(other, outside, 5000)).dropped == (NO_MAPPING, EGRESS)
    for ended in flows[1:]:
        known_to_conntrack(world, ended, lifetime=1)
    new = [udp(other, outside, 5000 + number) for number in range(9)]
    reused = {world.device_sends(flow).packet[UDP].sport for flow in new}
    for flow in new:
        known_to_conntrack(world, flow)
    assert len(reused) == 9
    assert reused < set(ports[1:])
    assert world.device_sends(flows[0]).packet[UDP].sport == ports[0]
    for again in flows[1:]:
        left = world.device_sends(again)
        assert left.action == SHOT or left.packet[UDP].sport not in {ports[0], *reused}


@pytest.mark.parametrize(("pod", "other", "outside"), [(A.ip, B.ip, OUTSIDE), (A.ip6, B.ip6, OUTSIDE6)])
def test_in_a_full_map_no_answer_reaches_another_flow(
    world: World, pod: str, other: str, outside: str
) -> None:
    """A flow without one of its two rows is translated anew, perhaps to another port; what is used stays."""

    def leaves(sport: int, source: str = pod) -> int:
        outcome = world.device_sends(udp(source, outside, sport))
        assert outcome.action == OK
        return int(outcome.packet[UDP].sport)

    def comes_back(port: int) -> tuple[str, int]:
        answer = world.device_gets(udp(outside, NODES[6 if ":" in pod else 4], 53, port)).packet
        return network(answer).dst, answer[UDP].dport

    used = {(pod, sport): leaves(sport) for sport in range(1000, 1004) for _ in range(3)}
    for port in used.values():
        comes_back(port)
    unused = {(pod, sport): leaves(sport) for sport in range(2000, 2004)}
    frame = bytearray(bytes(udp(other, "2001:db8:f::" if ":" in pod else "198.18.0.0", 3000)))
    at = 52 if ":" in pod else 32
    for number in range(4096):
        frame[at : at + 2] = number.to_bytes(2, "big")
        assert world.device_sends(bytes(frame)).action == OK, "a new flow finds room"
    assert mapped(world, 6 if ":" in pod else 4) <= world.sizes.nat
    for flow, port in used.items():
        assert comes_back(port) == flow
    owners = {port: flow for flow, port in (used | unused).items()}
    for port in range(FIRST_PORT, LAST_PORT + 1):
        assert comes_back(port) in {(NODES[6 if ":" in pod else 4], port), owners.get(port)}
    owners = {port: flow for flow, port in used.items()}
    for sport in (*range(2000, 2004), *range(4000, 4008)):
        port = leaves(sport, other if sport >= 4000 else pod)
        assert port not in owners, "no two flows to one destination have one port"
        owners[port] = (other if sport >= 4000 else pod, sport)
    for port, flow in owners.items():
        assert comes_back(port) == flow


def test_masquerading_preserves_a_free_source_port(world: World) -> None:
    assert world.device_sends(udp(A.ip, OUTSIDE, FIRST_PORT)).packet[UDP].sport == FIRST_PORT
    assert world.device_sends(udp(B.ip, OUTSIDE, FIRST_PORT)).packet[UDP].sport != FIRST_PORT


def test_sctp_keeps_its_port_or_does_not_leave(world: World) -> None:
    def init(pod: str) -> Packet:
        return ip(pod, OUTSIDE) / SCTP(sport=1000, dport=3868)

    left = world.device_sends(init(A.ip))
    assert (left.action, left.packet[IP].src, left.packet[SCTP].sport) == (OK, NODE, 1000)
    assert world.device_sends(init(B.ip)).dropped == (NO_MAPPING, EGRESS)
    age(world)
    assert world.device_sends(init(B.ip)).packet[IP].src == NODE, "the first association has ended"


def test_a_lost_half_of_a_nat_entry_is_restored(world: World) -> None:
    left = world.device_sends(udp(A.ip, OUTSIDE, FIRST_PORT))
    table = world.maps["cilium_snat_v4_external"]
    (answers,) = (key for key, _ in table.items() if key[-1] == 1)
    table.delete(answers)
    again = world.device_sends(udp(A.ip, OUTSIDE, FIRST_PORT))
    assert again.packet[UDP].sport == left.packet[UDP].sport
    assert NatEntry.unpack(table.lookup(answers) or b"").address == ip_address(A.ip)


def test_packets_of_the_node_are_not_masqueraded(world: World) -> None:
    own = udp(NODE, OUTSIDE, FIRST_PORT)
    assert bytes(world.device_sends(own).packet) == bytes(own)
    assert mapped(world) == 0


def test_the_nodes_own_flow_gives_way_to_a_pods(world: World) -> None:
    assert world.device_sends(udp(A.ip, OUTSIDE, FIRST_PORT)).packet[UDP].sport == FIRST_PORT
    left = world.device_sends(udp(NODE, OUTSIDE, FIRST_PORT))
    port = left.packet[UDP].sport
    assert (left.packet[IP].src, port != FIRST_PORT) == (NODE, True)
    assert has_true_checksums(left.packet)
    back = world.device_gets(udp(OUTSIDE, NODE, 53, port))
    assert (back.packet[IP].dst, back.packet[UDP].dport) == (NODE, FIRST_PORT)
    assert world.device_sends(udp(NODE, OUTSIDE, FIRST_PORT)).packet[UDP].sport == port
    assert CtKey(ip_address(NODE), ip_address(OUTSIDE), 53, FIRST_PORT, 17) in world.connections(tcp=False)


def test_no_pod_gets_the_port_of_a_socket_of_the_node(world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        for port in range(FIRST_PORT, LAST_PORT + 1):
            try:
                taken.bind(("0.0.0.0", port))
            except OSError:
                continue
            break
        (_, port) = taken.getsockname()
        assert world.device_sends(udp(A.ip, OUTSIDE, port)).packet[UDP].sport != port
    assert world.device_sends(udp(B.ip, OUTSIDE, port)).packet[UDP].sport == port


@pytest.mark.parametrize(
    ("destination", "why"),
    [("10.1.77.7", "the pods' network"), ("fd00:10:1::77", "the same of IPv6"), (NODE, "the node itself")],
)
def test_packets_to_networks_that_know_pods_are_not_masqueraded(
    world: World, destination: str, why: str
) -> None:
    sent = udp(A.ip6 if ":" in destination else A.ip, destination)
    assert bytes(world.device_sends(sent).packet) == bytes(sent), why


def test_ip_masq_agent_networks_are_not_masqueraded(world: World) -> None:
    for version, listed in ((4, "198.51.100.0/24"), (6, "2001:db8::/64")):
        world.maps[f"cilium_ipmasq_v{version}"].update(key_of(ip_network(listed)), b"\1")
    assert network(world.device_sends(udp(A.ip, OUTSIDE)).packet).src == NODE
    serve(world, DEVICE_IP_MASQ)
    assert network(world.device_sends(udp(A.ip, OUTSIDE)).packet).src == A.ip
    assert network(world.device_sends(udp(A.ip6, OUTSIDE6)).packet).src == A.ip6
    assert network(world.device_sends(udp(A.ip, "203.0.113.1")).packet).src == NODE


def test_other_nodes_see_pods_unless_only_tunnels_lead_back(world: World) -> None:
    world.identify(OUTSIDE, 6)
    assert network(world.device_sends(udp(A.ip, OUTSIDE)).packet).src == A.ip
    serve(world, DEVICE_REMOTE_NODES)
    assert network(world.device_sends(udp(A.ip, OUTSIDE)).packet).src == NODE
    pod = IpcacheValue(4711, IPv4Address("192.0.2.9"))  # of another node
    world.maps["cilium_ipcache"].update(IpcacheKey.host(ip_address(OTHER)).pack(), pod.pack())
    assert network(world.device_sends(udp(A.ip, OTHER)).packet).src == A.ip


def test_replies_to_direct_clients_of_a_pod_are_not_masqueraded(world: World) -> None:
    world.host_sends(udp(OUTSIDE, A.ip, 5000, 80))
    answer = udp(A.ip, OUTSIDE, 80, 5000)
    assert bytes(world.device_sends(answer).packet) == bytes(answer)


@pytest.mark.parametrize("reply", [False, True])
def test_errors_about_a_tcp_flow_are_translated_both_ways(world: World, reply: bool) -> None:
    left = world.device_sends(ip(A.ip, OUTSIDE) / TCP(sport=1000, dport=80))
    if reply:  # the pod reports on a reply
        answer = ip(OUTSIDE, A.ip) / TCP(sport=80, dport=1000, flags="SA")
        error = ip(A.ip, OUTSIDE) / ICMP(type=3, code=3) / bytes(answer[IP])
        seen = world.device_sends(error).packet
        assert (seen[IP].src, seen[IP].dst) == (NODE, OUTSIDE)
        quoted = IP(bytes(seen[ICMP].payload))
        assert (quoted.dst, quoted[TCP].dport) == (NODE, left.packet[TCP].sport)
    else:  # a router reports on what left
        error = ip("203.0.113.9", NODE) / ICMP(type=11) / bytes(left.packet[IP])[:28]
        seen = world.device_gets(error).packet
        assert (seen[IP].src, seen[IP].dst) == ("203.0.113.9", A.ip)
        quoted = IP(bytes(seen[ICMP].payload))
        assert (quoted.src, struct.unpack(">H", bytes(quoted.payload)[:2])[0]) == (A.ip, 1000)
    assert has_true_checksums(seen)


def test_an_ipv6_error_about_an_echo_is_translated(world: World) -> None:
    asked = ip(A.ip6, OUTSIDE6) / ICMPv6EchoRequest(id=7, data=b"payload")
    left = world.device_sends(asked).packet
    assert (left[IPv6].src, left[ICMPv6EchoRequest].id >= FIRST_PORT) == (NODE6, True)
    assert has_true_checksums(left)
    error = ip("2001:db8::9", NODE6) / ICMPv6PacketTooBig(mtu=1280) / bytes(left[IPv6])
    seen = world.device_gets(error).packet
    quoted = IPv6(bytes(seen[ICMPv6PacketTooBig].payload))
    assert (seen[IPv6].dst, quoted.src, quoted[ICMPv6EchoRequest].id) == (A.ip6, A.ip6, 7)
    assert has_true_checksums(seen)
    assert bytes(quoted) == bytes(asked[IPv6])


ROUTER_SOLICITATION, REDIRECTED, NODE_QUERY = 10, 5, 139
"""Types of ICMP messages without an identifier."""


@pytest.mark.parametrize(
    "sent",
    [
        ip(A.ip, OUTSIDE) / ICMP(type="echo-reply", id=7) / Raw(b"payload"),
        ip(A.ip, OUTSIDE) / ICMP(type="timestamp-reply", id=7),
        ip(A.ip6, OUTSIDE6) / ICMPv6EchoReply(id=7, data=b"payload"),
        ip(A.ip6, OUTSIDE6) / ICMPv6ND_NA(tgt=A.ip6),
    ],
    ids=["echo reply", "timestamp reply", "echo reply, IPv6", "neighbour advertisement"],
)
def test_replies_to_no_query_leave_unchanged(world: World, sent: Packet) -> None:
    left = world.device_sends(sent)
    assert (left.action, bytes(left.packet)) == (OK, bytes(sent))
    assert mapped(world) + mapped(world, 6) == 0


@pytest.mark.parametrize(
    "sent",
    [
        ip(A.ip, OUTSIDE) / ICMP(type=ROUTER_SOLICITATION),
        ip(A.ip, OUTSIDE) / ICMP(type=REDIRECTED, gw=OTHER) / bytes(28),
        ip(A.ip6, OUTSIDE6) / ICMPv6Unknown(type=NODE_QUERY, msgbody=bytes(12)),
    ],
    ids=["router solicitation", "redirect", "node information query"],
)
def test_icmp_messages_without_an_identifier_are_not_masqueraded(world: World, sent: Packet) -> None:
    refused = world.device_sends(sent)
    assert refused.dropped == (UNSUPPORTED, EGRESS)
    assert mapped(world) + mapped(world, 6) == 0
    network(sent).src = NODES[6 if IPv6 in sent else 4]
    own = world.device_sends(sent)
    assert (own.action, bytes(own.packet)) == (OK, bytes(sent))


@pytest.mark.parametrize("identifier", [0, 7])
def test_every_fragment_of_an_echo_is_masqueraded(world: World, identifier: int) -> None:
    echo = bytes(ICMP(id=identifier) / Raw(bytes(64)))
    for flags, offset, body in (("MF", 0, echo), ("", 9, bytes(64))):
        fragment = ip(A.ip, OUTSIDE) / Raw(body)
        fragment[IP].flags, fragment[IP].frag, fragment[IP].proto, fragment[IP].id = flags, offset, 1, 99
        left = world.device_sends(fragment)
        assert (left.action, network(left.packet).src) == (OK, NODE)
    assert mapped(world) == 2


def test_without_a_row_a_device_is_left_alone(world: World) -> None:
    world.maps["hive_devices"].clear()
    sent = udp(A.ip, OUTSIDE)
    assert bytes(world.device_sends(sent).packet) == bytes(sent)
    assert world.counts() == {}
