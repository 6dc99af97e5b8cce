"""Clients outside: allowed connections, ICMP errors to either side, and DSR replies of backends."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6PacketTooBig, IPv6
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw

from cells.maps.records.flows import NODEPORT_DSR_CHOSEN, NODEPORT_DSR_OTHER, NODEPORT_DSR_TCP
from cells.services import ServiceFlag
from cells.services.map_entries import source_range_key
from tests.kernel.datapath.packets import from_pod
from tests.kernel.datapath.world import EGRESS, INGRESS, OK, REDIRECT, SHOT, A
from tests.kernel.datapath_nodeport.world import (
    CLIENT,
    CLIENT_MAC,
    DIRECT,
    ELSEWHERE,
    HOP,
    NODE_PORT,
    SERVICE,
    NodePortWorld,
    segment,
)
from tests.kernel.datapath_services.packets import ends, intact
from tests.kernel.datapath_services.services import TARGET, Backend

pytestmark = pytest.mark.kernel

FORWARDED, IS_CLUSTER_IP, SOURCE_RANGE, INVALID, L4_CHECKSUM = 0, 174, 177, 134, 154
HERE = {4: A.ip, 6: A.ip6}
FLAGS = ServiceFlag.ROUTABLE | ServiceFlag.NODE_PORT
ROUTER = {4: "198.51.100.254", 6: "2001:db8::fe"}
SPORT = 33333
BOTH_DSR = NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER


def serve(world: NodePortWorld, version: int, backend: str, flags: ServiceFlag = FLAGS) -> None:
    world.services.serve(SERVICE[version], [Backend(1, backend)], port=NODE_PORT, flags=flags)


def asked(version: int, flags: str = "S", kind: str = "tcp") -> Packet:
    return segment(kind, CLIENT[version], SERVICE[version], SPORT, NODE_PORT, flags)


def test_packets_from_outside_to_a_cluster_ip_are_dropped(world: NodePortWorld) -> None:
    serve(world, 4, A.ip, ServiceFlag(0))
    outcome = world.client_sends(asked(4))
    assert (outcome.action, outcome.dropped) == (SHOT, (IS_CLUSTER_IP, INGRESS))


@pytest.mark.parametrize("version", [4, 6])
def test_source_ranges_are_checked_before_the_kind_of_address(world: NodePortWorld, version: int) -> None:
    """As in Cilium: a client outside the ranges of a cluster IP is dropped for these."""
    serve(world, version, HERE[version], ServiceFlag.SOURCE_RANGE)
    assert world.client_sends(asked(version)).dropped == (SOURCE_RANGE, INGRESS)
    where = source_range_key(1, ip_network(CLIENT[version]))
    world.maps[where.map].update(where.key, b"\0")
    assert world.client_sends(asked(version)).dropped == (IS_CLUSTER_IP, INGRESS)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("deny", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_only_clients_of_the_source_ranges_are_served(
    world: NodePortWorld, version: int, *, deny: bool, listed: bool
) -> None:
    serve(
        *(world, version, HERE[version]),
        FLAGS | ServiceFlag.SOURCE_RANGE | (ServiceFlag.QUARANTINED if deny else ServiceFlag(0)),
    )
    network = ip_network(CLIENT[version] if listed else ROUTER[version])
    where = source_range_key(1, network)
    world.maps[where.map].update(where.key, b"\0")
    outcome = world.client_sends(asked(version))
    assert outcome.dropped == (None if listed != deny else (SOURCE_RANGE, INGRESS))


def test_a_host_port_is_served_by_this_node_alone(world: NodePortWorld) -> None:
    serve(world, 4, ELSEWHERE[4].format(9), ServiceFlag.ROUTABLE | ServiceFlag.HOST_PORT)
    assert world.client_sends(asked(4)).dropped == (INVALID, INGRESS)


@pytest.mark.parametrize("version", [4, 6])
def test_an_icmp_error_about_a_reply_reaches_the_backend(world: NodePortWorld, version: int) -> None:
    """A router on the way knows the service; the backend itself, and who asks it."""
    far = ELSEWHERE[version].format(9)
    for backend, to in ((HERE[version], HERE[version]), (far, far)):
        world.reset()
        serve(world, version, backend)
        sent = world.client_sends(asked(version)).packet
        _, port, _, _ = ends(sent)
        about = segment("tcp", SERVICE[version], CLIENT[version], NODE_PORT, SPORT, "A")
        outcome = world.client_sends(too_big(version, about))
        assert outcome.action == REDIRECT
        head = outcome.packet[IP if version == 4 else IPv6]
        quoted = quote(head)
        assert head.dst == to
        assert (quoted.src, quoted.payload.sport) == (to, TARGET)
        client = (CLIENT[version], SPORT) if backend == HERE[version] else (DIRECT[version], port)
        assert (quoted.dst, quoted.payload.dport) == client


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_a_backend_elsewhere_answers_the_client_itself(world: NodePortWorld, version: int, kind: str) -> None:
    world.serve_outside(BOTH_DSR)
    backend = ELSEWHERE[version].format(9)
    serve(world, version, backend)
    passed_on = world.client_sends(asked(version, kind=kind))
    assert (passed_on.action, passed_on.packet.dst) == (REDIRECT, HOP)
    assert passed_on.counted == {(FORWARDED, EGRESS): 1}
    # The same packet at the node that has the pod, which knows nothing of the service.
    world.reset()
    world.serve_outside(BOTH_DSR)
    head = passed_on.packet[IP if version == 4 else IPv6]
    assert (head.src, head.dst) == (CLIENT[version], backend)
    world.maps["cilium_lxc"].update(*world.row_of(A, backend))
    delivered = world.device_gets(passed_on.packet)
    assert (delivered.action, delivered.packet.dst) == (REDIRECT, A.mac)
    if kind == "tcp":  # later packets of a connection do not show it
        later = segment(kind, CLIENT[version], backend, SPORT, TARGET, "A")
        assert world.comes_back(later).packet.dst == A.mac
    pod = world.moved(A, backend)
    answer = segment(kind, backend, CLIENT[version], TARGET, SPORT, "SA")
    outcome = world.pod_sends(pod, from_pod(pod) / answer)
    assert (outcome.action, outcome.packet.dst) == (REDIRECT, HOP)
    assert ends(outcome.packet) == (SERVICE[version], NODE_PORT, CLIENT[version], SPORT)
    assert intact(outcome.packet)


def too_big(version: int, about: Packet) -> Packet:
    """What a router on the way to the client answers the service."""
    if version == 4:
        return IP(src=ROUTER[4], dst=SERVICE[4]) / ICMP(type=3, code=4, nexthopmtu=1200) / bytes(about)
    return IPv6(src=ROUTER[6], dst=SERVICE[6]) / ICMPv6PacketTooBig(mtu=1200) / bytes(about)


def quote(error: Packet) -> Packet:
    """The packet that an ICMP error is about."""
    head = IP if error.version == 4 else IPv6
    return head(bytes(error.payload)[8:])


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_with_dsr_an_icmp_error_about_an_answer_goes_on_to_the_backend(
    world: NodePortWorld, version: int, kind: str
) -> None:
    """A router for which an answer is too big sends its error to the service: to the node that forwarded."""
    world.serve_outside(BOTH_DSR)
    far = ELSEWHERE[version].format(9)
    serve(world, version, far)
    world.client_sends(asked(version, kind=kind))
    about = segment(kind, SERVICE[version], CLIENT[version], NODE_PORT, SPORT, "A")
    outcome = world.client_sends(too_big(version, about))
    assert (outcome.action, outcome.packet.dst) == (REDIRECT, HOP)
    head = outcome.packet[IP if version == 4 else IPv6]
    assert (head.src, head.dst) == (ROUTER[version], far)
    assert ends(Ether() / quote(head)) == (far, TARGET, CLIENT[version], SPORT)
    assert intact(outcome.packet)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_with_dsr_an_icmp_error_of_the_backend_names_the_service(
    world: NodePortWorld, version: int, kind: str
) -> None:
    """Of a closed port, for instance: the client knows nothing of the backend's address."""
    world.serve_outside(BOTH_DSR)
    backend = ELSEWHERE[version].format(9)
    serve(world, version, backend)
    passed_on = world.client_sends(asked(version, kind=kind)).packet
    world.reset()
    world.serve_outside(BOTH_DSR)
    world.maps["cilium_lxc"].update(*world.row_of(A, backend))
    got = bytes(world.device_gets(passed_on).packet[IP if version == 4 else IPv6])
    pod = world.moved(A, backend)
    if version == 4:
        error = IP(src=backend, dst=CLIENT[4]) / ICMP(type=3, code=3) / got
    else:
        error = IPv6(src=backend, dst=CLIENT[6]) / ICMPv6DestUnreach(code=4) / got
    outcome = world.pod_sends(pod, from_pod(pod) / error)
    assert outcome.action == OK
    left = world.device_sends(outcome.packet).packet
    head = left[IP if version == 4 else IPv6]
    assert (head.src, head.dst) == (SERVICE[version], CLIENT[version])
    quoted = quote(head)
    assert (quoted.src, quoted.dst) == (CLIENT[version], SERVICE[version])
    while not hasattr(quoted, "dport"):  # IPv6 names the service in a header of its own
        quoted = quoted.payload
    assert (quoted.sport, quoted.dport) == (SPORT, NODE_PORT)
    assert intact(left)


def test_in_hybrid_mode_datagrams_come_back_by_this_node(world: NodePortWorld) -> None:
    world.serve_outside(NODEPORT_DSR_TCP)
    serve(world, 4, ELSEWHERE[4].format(9))
    assert ends(world.client_sends(asked(4, kind="udp")).packet)[0] == DIRECT[4]
    assert world.client_sends(asked(4)).packet[IP].src == CLIENT[4]


def test_packets_without_a_service_go_to_the_stack(world: NodePortWorld) -> None:
    for flags in 0, BOTH_DSR:
        world.serve_outside(flags)
        outcome = world.client_sends(asked(4))
        assert (outcome.action, outcome.counted) == (OK, {})


@pytest.mark.parametrize("version", [4, 6])
def test_a_service_may_choose_that_its_backends_answer_themselves(world: NodePortWorld, version: int) -> None:
    world.serve_outside(NODEPORT_DSR_CHOSEN | BOTH_DSR)
    far = ELSEWHERE[version].format(9)
    for flags, source in ((FLAGS, DIRECT[version]), (FLAGS | ServiceFlag.DSR, CLIENT[version])):
        serve(world, version, far, flags)
        outcome = world.client_sends(asked(version))
        assert outcome.action == REDIRECT
        assert ends(outcome.packet)[0] == source


OPTION = {4: 8, 6: 24}
"""Bytes in which a backend elsewhere gets the service's address."""


def long_datagram(version: int, length: int, flags: str = "DF") -> Packet:
    """One of so many bytes, its network header counted."""
    head = (
        IP(src=CLIENT[4], dst=SERVICE[4], flags=flags)
        if version == 4
        else IPv6(src=CLIENT[6], dst=SERVICE[6])
    )
    packet = head / UDP(sport=SPORT, dport=NODE_PORT)
    return packet / Raw(bytes(length - len(packet)))


@pytest.mark.parametrize("version", [4, 6])
def test_a_datagram_above_the_mtu_returns_an_icmp_error_to_the_client(
    world: NodePortWorld, version: int
) -> None:
    world.serve_outside(BOTH_DSR)
    serve(world, version, ELSEWHERE[version].format(9))
    world.recorder.narrow(1500)
    fits = 1500 - OPTION[version]
    assert ends(world.client_sends(long_datagram(version, fits)).packet)[0] == CLIENT[version]
    outcome = world.client_sends(long_datagram(version, fits + 1))
    assert (outcome.action, outcome.packet.dst) == (REDIRECT, CLIENT_MAC)
    head = outcome.packet[IP if version == 4 else IPv6]
    assert (head.src, head.dst) == (SERVICE[version], CLIENT[version])
    if version == 4:
        assert (head[ICMP].type, head[ICMP].code, head[ICMP].nexthopmtu) == (3, 4, fits)
    else:
        assert head[ICMPv6PacketTooBig].mtu == fits
    quoted = quote(head)
    assert (quoted.dst, quoted.payload.dport) == (SERVICE[version], NODE_PORT)


def test_dsr_packets_above_the_mtu_go_to_the_stack_with_the_service_option(world: NodePortWorld) -> None:
    world.serve_outside(BOTH_DSR)
    backend = ELSEWHERE[4].format(9)
    serve(world, 4, backend)
    world.recorder.narrow(1500)
    outcome = world.client_sends(long_datagram(4, 1500, flags=""))
    head = outcome.packet[IP]
    assert (outcome.action, head.dst, head.ihl, head.len) == (OK, backend, 7, 1508)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("far", [False, True])
def test_associations_of_sctp_keep_their_ports(world: NodePortWorld, version: int, far: bool) -> None:
    backend = ELSEWHERE[version].format(9) if far else HERE[version]
    what = [Backend(1, backend, port=NODE_PORT)]
    world.services.serve(SERVICE[version], what, port=NODE_PORT, flags=FLAGS, protocol=132)
    head = IP if version == 4 else IPv6
    association = SCTP(sport=SPORT, dport=NODE_PORT) / SCTPChunkInit()
    outcome = world.client_sends(head(src=CLIENT[version], dst=SERVICE[version]) / association)
    assert outcome.action == REDIRECT
    sent = outcome.packet[head]
    source = DIRECT[version] if far else CLIENT[version]
    assert (sent.src, sent.dst) == (source, backend)
    assert bytes(sent.payload) == bytes(association), "its checksum is over all of it"
    # What would take another port is dropped, and no event reports a broken packet.
    world.services.serve(SERVICE[version], [Backend(1, backend)], port=NODE_PORT, flags=FLAGS, protocol=132)
    other = SCTP(sport=SPORT + 1, dport=NODE_PORT) / SCTPChunkInit()
    dropped = world.client_sends(head(src=CLIENT[version], dst=SERVICE[version]) / other)
    assert (dropped.action, dropped.counted) == (SHOT, {(L4_CHECKSUM, INGRESS): 1})
