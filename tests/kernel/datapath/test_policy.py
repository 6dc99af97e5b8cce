"""Policy decisions: identities, specificity, deny, and counters."""

import struct

import pytest
from scapy.packet import Packet

from cells.maps.records.endpoints import NODE_CIDR_MATCHES_PODS, PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    HOST,
    INGRESS,
    NODE,
    OK,
    OUTSIDE,
    REDIRECT,
    ROUTER,
    WORLD,
    A,
    B,
    World,
)

pytestmark = pytest.mark.kernel

TCP, UDP, PING = 6, 17, 1
ALLOW, DENY = PolicyEntry(), PolicyEntry(deny=True)


def egress(identity: int, protocol: int = 0, port: int = 0, bits: int | None = None) -> PolicyKey:
    return PolicyKey(identity, True, protocol, port, bits if bits is not None else 16 if port else 0)


def ingress(identity: int, protocol: int = 0, port: int = 0) -> PolicyKey:
    return PolicyKey(identity, False, protocol, port, 16 if port else 0)


SYN = from_pod(A) / tcp(A.ip, B.ip, "S")


def test_nothing_passes_without_an_entry(world: World) -> None:
    world.allow(A, [])
    assert world.pod_sends(A, SYN).dropped == (133, EGRESS)


def test_the_receivers_policy_counts_too(world: World) -> None:
    world.allow(B, [(egress(0), ALLOW)])
    assert world.pod_sends(A, SYN).dropped == (133, INGRESS)
    world.allow(B, [(ingress(A.identity, TCP, 80), ALLOW)])
    assert world.pod_sends(A, SYN).action == REDIRECT


# The broader entry first; the more specific one decides, whichever way it does.
ORDER = [
    egress(0),
    egress(B.identity),
    egress(0, TCP),
    egress(B.identity, TCP),
    egress(0, TCP, 80),
    egress(B.identity, TCP, 80),
]


@pytest.mark.parametrize("specific", range(1, len(ORDER)))
@pytest.mark.parametrize("denies", [True, False], ids=["deny", "allow"])
def test_the_most_specific_entry_decides(world: World, specific: int, denies: bool) -> None:
    for broad in range(specific):
        mine, other = (DENY, ALLOW) if denies else (ALLOW, DENY)
        world.allow(A, [(ORDER[broad], other), (ORDER[specific], mine)])
        outcome = world.pod_sends(A, SYN)
        assert outcome.dropped == ((181, EGRESS) if denies else None), (ORDER[broad], ORDER[specific])
        assert world.policy_use(A) == {ORDER[broad]: 0, ORDER[specific]: 1}


@pytest.mark.parametrize(
    ("entry", "passes"),
    [
        (egress(B.identity, TCP, 80), True),
        (egress(B.identity, TCP, 81), False),
        (egress(B.identity, UDP, 80), False),
        (egress(A.identity, TCP, 80), False),
        (egress(0, TCP, 64, bits=10), True),
        (egress(0, TCP, 128, bits=10), False),
        (ingress(0), False),
    ],
)
def test_an_entry_is_for_its_identity_protocol_port_and_direction(
    world: World, entry: PolicyKey, passes: bool
) -> None:
    world.allow(A, [(entry, ALLOW)])
    assert (world.pod_sends(A, SYN).action == REDIRECT) is passes


def test_a_port_range_counts_as_a_port(world: World) -> None:
    world.allow(A, [(egress(B.identity), DENY), (egress(0, TCP, 64, bits=10), ALLOW)])
    assert world.pod_sends(A, SYN).action == REDIRECT


@pytest.mark.parametrize(("port", "passes"), [(8, True), (0, False), (80, False)])
def test_the_port_of_an_icmp_entry_is_the_type(world: World, port: int, passes: bool) -> None:
    world.allow(A, [(PolicyKey(0, True, PING, port, 16), ALLOW)])
    assert (world.pod_sends(A, from_pod(A) / echo(A.ip, B.ip)).action == REDIRECT) is passes


@pytest.mark.parametrize(
    ("destination", "identity"),
    [(B.ip, B.identity), (ROUTER, HOST), (NODE, HOST), (OUTSIDE, WORLD), ("203.0.113.5", 4242)],
)
def test_the_peer_is_known_by_its_address(world: World, destination: str, identity: int) -> None:
    world.identify("203.0.113.0/24", 4242)
    packet = from_pod(A) / udp(A.ip, destination)
    world.allow(A, [(egress(identity), ALLOW)])
    assert world.pod_sends(A, packet).action in {OK, REDIRECT}
    world.allow(A, [(egress(0), ALLOW), (egress(identity), DENY)])
    assert world.pod_sends(A, packet).dropped == (181, EGRESS)


@pytest.mark.parametrize(("source", "identity"), [(ROUTER, HOST), (NODE, HOST), (OUTSIDE, WORLD)])
def test_what_comes_through_the_host_is_known_by_its_source(world: World, source: str, identity: int) -> None:
    world.allow(A, [(ingress(identity), ALLOW)])
    assert world.host_sends(from_host() / udp(source, A.ip)).action == REDIRECT
    world.allow(A, [(ingress(0), ALLOW), (ingress(identity), DENY)])
    assert world.host_sends(from_host() / udp(source, A.ip)).dropped == (181, INGRESS)


@pytest.mark.parametrize(
    "packet", [from_pod(A) / tcp(A.ip, B.ip, "A"), from_pod(A) / udp(A.ip, OUTSIDE)], ids=["pod", "world"]
)
def test_a_change_of_policy_cuts_flows_at_once(world: World, packet: Packet) -> None:
    assert world.pod_sends(A, packet).action != 2
    assert world.pod_sends(A, packet).action != 2
    world.allow(A, [(egress(0), DENY)])
    assert world.pod_sends(A, packet).dropped == (181, EGRESS)


def test_a_pod_without_a_policy_map_is_not_ready(world: World) -> None:
    row = struct.pack("<I", B.id)
    world.maps["hive_policies"].delete(row)
    try:
        assert world.pod_sends(A, SYN).dropped == (203, INGRESS)
        assert world.pod_sends(B, from_pod(B) / udp(B.ip, OUTSIDE)).dropped == (203, EGRESS)
    finally:
        world.maps["hive_policies"].update(row, struct.pack("<I", world.policies[B.id].fd))


def test_an_entry_counts_packets_and_bytes(world: World) -> None:
    world.pod_sends(A, SYN, repeat=3)
    ((_, value),) = [(k, v) for k, v in world.policies[B.id].items() if v[8:16] != bytes(8)]
    assert PolicyEntry.unpack(value).packets == 3
    assert PolicyEntry.unpack(value).octets == 3 * len(SYN)


NETWORK, INNER = (1 << 24) + 7, (1 << 24) + 8


@pytest.mark.parametrize("six", [False, True], ids=["ipv4", "ipv6"])
def test_networks_select_pods_where_that_is_asked_for(world: World, six: bool) -> None:
    """The nearest network around the peer's address counts beside the peer's identity, in both directions."""
    a, b = (A.ip6, B.ip6) if six else (A.ip, B.ip)
    everywhere, alone = ("fd00:10:1::/64", f"{b}/128") if six else ("10.1.0.0/16", f"{b}/32")
    syn = from_pod(A) / tcp(a, b, "S")
    world.name_network(everywhere, NETWORK)
    world.allow(A, [(egress(NETWORK, TCP, 80), ALLOW)])
    assert world.pod_sends(A, syn).dropped == (133, EGRESS), "networks select no pods by default"
    world.report(NODE_CIDR_MATCHES_PODS)
    assert world.pod_sends(A, syn).action == REDIRECT
    assert world.policy_use(A) == {egress(NETWORK, TCP, 80): 1}
    world.name_network(alone, INNER)
    assert world.pod_sends(A, syn).dropped == (133, EGRESS), "a nearer network is another one"
    world.allow(A, [(egress(0), ALLOW), (egress(INNER), DENY)])
    assert world.pod_sends(A, syn).dropped == (181, EGRESS)
    world.allow(A, [(egress(0), ALLOW)])
    world.allow(B, [(ingress(A.identity, TCP, 80), ALLOW), (ingress(NETWORK), DENY)])
    assert world.pod_sends(A, syn).dropped == (181, INGRESS), "any deny wins over any allow"
    world.allow(B, [(ingress(NETWORK), ALLOW), (ingress(A.identity, TCP, 80), DENY)])
    assert world.pod_sends(A, syn).dropped == (181, INGRESS)
    world.allow(B, [(ingress(NETWORK), ALLOW)])
    assert world.pod_sends(A, syn).action == REDIRECT


def test_answers_pass_while_a_network_allows_their_flow(world: World) -> None:
    world.report(NODE_CIDR_MATCHES_PODS)
    world.name_network("10.1.0.11/32", NETWORK)
    world.name_network("10.1.0.10/32", INNER)
    world.allow(A, [(egress(NETWORK), ALLOW)])
    world.allow(B, [(ingress(INNER), ALLOW)])
    assert world.pod_sends(A, SYN).action == REDIRECT
    answer = from_pod(B) / tcp(B.ip, A.ip, "SA", sport=80, dport=40000)
    assert world.pod_sends(B, answer).action == REDIRECT
    world.allow(B, [])
    assert world.pod_sends(B, answer).dropped == (133, EGRESS)
    world.allow(B, [(ingress(INNER), ALLOW)])
    world.allow(A, [])
    assert world.pod_sends(B, answer).dropped == (133, INGRESS)


def test_networks_select_no_nodes_and_nothing_outside_by_their_pods_numbers(world: World) -> None:
    world.report(NODE_CIDR_MATCHES_PODS)
    world.name_network("0.0.0.0/0", NETWORK)
    world.allow(A, [(egress(NETWORK), ALLOW)])
    for address in (OUTSIDE, NODE):
        assert world.pod_sends(A, from_pod(A) / tcp(A.ip, address, "S")).dropped == (133, EGRESS), address
    assert world.pod_sends(A, SYN).action == REDIRECT


def test_the_closer_entry_decides_between_identity_and_network(world: World) -> None:
    """As closely, what a proxy is to read goes to the proxy, unless it only holds for everybody."""
    world.report(NODE_CIDR_MATCHES_PODS)
    world.name_network("10.1.0.11/32", NETWORK)
    proxied = PolicyEntry(proxy_port=10080)
    everybody, own, network = egress(0, TCP, 80), egress(B.identity, TCP, 80), egress(NETWORK, TCP, 80)
    for rows, used in (
        ([(own, ALLOW), (egress(NETWORK), ALLOW)], own),
        ([(egress(B.identity), ALLOW), (network, ALLOW)], network),
        ([(own, ALLOW), (network, ALLOW)], own),
        ([(own, ALLOW), (network, proxied)], network),
        ([(own, proxied), (network, ALLOW)], own),
        ([(everybody, proxied), (network, ALLOW)], network),
        ([(everybody, ALLOW), (egress(NETWORK), ALLOW)], everybody),
    ):
        world.allow(A, rows)
        world.pod_sends(A, SYN)
        assert [key for key, packets in world.policy_use(A).items() if packets] == [used], rows
