"""What the node itself may send and get, by the policy of its host endpoint."""

import struct
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import ICMPv6ND_NS, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from cells.maps import NODE_AUDITS_HOST, Map, PolicyEntry, PolicyKey, create_map
from cells.maps.specs import policy_spec
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
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

pytestmark = pytest.mark.kernel

NUMBER = 20
"""Of the host endpoint."""
WORLD4, WORLD6 = 9, 10
TCP, UDP, GRE = 6, 17, 47
FRAME = Ether(src="0a:00:00:00:99:01", dst="0a:00:00:00:99:02")
ALLOW = PolicyEntry()


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
    """A node whose policy allows nothing."""
    with create_map(policy_spec(NUMBER, 256)) as policy:
        world.maps["hive_policies"].update(struct.pack("<I", NUMBER), struct.pack("<I", policy.fd))
        world.tell(host_endpoint=NUMBER)
        world.bump(0)
        yield Host(world, policy)
        world.maps["hive_policies"].delete(struct.pack("<I", NUMBER))
        world.tell()


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
def test_the_node_is_reached_as_its_policy_says_and_answers(
    host: Host, client: str, node: str, identity: int
) -> None:
    knock = FRAME / tcp(client, node, "S", dport=22)
    assert host.world.device_gets(knock).dropped == (133, INGRESS)
    host.allow(gets(identity, TCP, 22))
    assert host.world.device_gets(knock).action == OK
    answer = FRAME / tcp(node, client, "SA", sport=22, dport=40000)
    assert host.world.device_sends(answer).action == OK
    assert host.world.device_gets(FRAME / tcp(client, node, "S", dport=23)).dropped == (133, INGRESS)


def test_the_node_reaches_whom_its_policy_says_and_gets_the_answers(host: Host) -> None:
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


def test_a_pod_reaches_the_node_by_its_identity_and_every_packet_is_judged(host: Host) -> None:
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


def test_what_only_passes_through_the_node_is_not_its_own(host: Host) -> None:
    assert host.world.device_gets(FRAME / tcp(OUTSIDE, "203.0.113.9", "S")).action == OK
    assert host.world.device_sends(FRAME / tcp("203.0.113.9", OUTSIDE, "S")).action == OK


def test_neighbours_are_found_whatever_the_policy_says(host: Host) -> None:
    ask = FRAME / IPv6(src=OUTSIDE6, dst=NODE6, hlim=255) / ICMPv6ND_NS(tgt=NODE6)
    assert host.world.device_gets(ask).action == OK
    assert host.world.device_gets(FRAME / echo(OUTSIDE6, NODE6)).dropped == (133, INGRESS)


def test_protocols_without_conntrack_are_judged_packet_by_packet(host: Host) -> None:
    tunnel: Packet = FRAME / IP(src=OUTSIDE, dst=NODE, proto=GRE) / b"inside"
    assert host.world.device_gets(tunnel).dropped == (133, INGRESS)
    host.allow(gets(WORLD4))
    assert host.world.device_gets(tunnel).action == OK
    assert not host.world.connections(tcp=False)


def test_an_audited_node_lets_through_what_its_policy_refuses_and_pods_do_not(host: Host) -> None:
    host.world.tell(NODE_AUDITS_HOST, host_endpoint=NUMBER)
    assert host.world.device_gets(SSH).action == OK
    host.world.allow(A, [])
    assert host.world.pod_sends(A, from_pod(A) / tcp(A.ip, NODE, "S")).dropped == (133, EGRESS)


def test_a_node_whose_policy_map_is_gone_is_not_locked_up(host: Host) -> None:
    host.world.maps["hive_policies"].delete(struct.pack("<I", NUMBER))
    assert host.world.device_gets(SSH).action == OK
    assert host.world.device_sends(FETCH).action == OK
