"""Services for pods: backend selection, and replies from the service's address."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scapy.layers.inet import ICMP, IP, UDP, fragment
from scapy.layers.inet6 import ICMPv6DestUnreach, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from cells.datapath.settings import DatapathSettings
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.services import BackendState, ServiceFlag
from tests.kernel.datapath.packets import echo, from_host, from_pod, ip, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    A,
    B,
    Outcome,
    World,
)
from tests.kernel.datapath_services.packets import ends, intact
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend, Services

pytestmark = pytest.mark.kernel

FAMILIES = [(VIP, A.ip, B.ip), (VIP6, A.ip6, B.ip6)]
LOOPBACK = "169.254.42.1"
REMOTE = [f"203.0.113.{n}" for n in (1, 2, 3)]
REMOTE6 = [f"2001:db8::{n}" for n in (1, 2, 3)]


def request(kind: str, source: str, vip: str, *, sport: int = 40000, flags: str = "S") -> Packet:
    if kind == "tcp":
        return from_pod(A) / tcp(source, vip, flags, sport=sport, dport=PORT)
    return from_pod(A) / udp(source, vip, sport=sport, dport=PORT)


def reply(kind: str, source: str, to: str, *, flags: str = "SA") -> Packet:
    if kind == "tcp":
        return tcp(source, to, flags, sport=TARGET, dport=40000)
    return udp(source, to, sport=TARGET, dport=40000)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_a_pod_talks_to_its_neighbour_by_a_service(
    world: World, services: Services, vip: str, a: str, b: str, kind: str
) -> None:
    services.serve(vip, [Backend(11, b)])
    for flags in ("S", "A", "A", "A", "FA"):
        there = world.pod_sends(A, request(kind, a, vip, flags=flags))
        assert there.action == REDIRECT
        assert ends(there.packet) == (a, 40000, b, TARGET)
        assert (there.packet.dst, there.packet.src) == (B.mac, B.host_mac)
        assert intact(there.packet)
        back = world.pod_sends(B, from_pod(B) / reply(kind, b, a, flags="SA" if flags == "S" else flags))
        assert back.action == REDIRECT
        assert ends(back.packet) == (vip, PORT, a, 40000)
        assert back.packet.dst == A.mac
        assert intact(back.packet)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize(("vip", "a", "remote"), [(VIP, A.ip, OUTSIDE), (VIP6, A.ip6, OUTSIDE6)])
def test_a_backend_elsewhere_answers_through_the_stack(
    world: World, services: Services, vip: str, a: str, remote: str, kind: str
) -> None:
    services.serve(vip, [Backend(11, remote)])
    for flags in ("S", "A", "A"):
        there = world.pod_sends(A, request(kind, a, vip, flags=flags))
        assert there.action == OK
        assert ends(there.packet) == (a, 40000, remote, TARGET)
        assert intact(there.packet)
        back = world.host_sends(from_host() / reply(kind, remote, a, flags="SA" if flags == "S" else "A"))
        assert back.action == REDIRECT
        assert ends(back.packet) == (vip, PORT, a, 40000)
        assert intact(back.packet)


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
def test_connections_spread_over_the_backends_and_stay(
    world: World, services: Services, vip: str, a: str, remotes: list[str]
) -> None:
    services.serve(vip, [Backend(number, each) for number, each in enumerate(remotes, 1)])
    chosen = {}
    for sport in range(30000, 30600):
        chosen[sport] = ends(world.pod_sends(A, request("tcp", a, vip, sport=sport)).packet)[2]
    assert all(count > 120 for count in Counter(chosen.values()).values())
    assert set(chosen.values()) == set(remotes)
    for sport, backend in chosen.items():
        sent = world.pod_sends(A, request("tcp", a, vip, sport=sport, flags="A"))
        assert ends(sent.packet) == (a, sport, backend, TARGET)


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
def test_a_backend_that_is_about_to_end_keeps_its_connections_only(
    world: World, services: Services, vip: str, a: str, remotes: list[str]
) -> None:
    one, other = Backend(1, remotes[0]), Backend(2, remotes[1])
    services.serve(vip, [one])
    world.pod_sends(A, request("tcp", a, vip, sport=30000))
    services.serve(vip, [one._replace(state=BackendState.TERMINATING), other])
    assert ends(world.pod_sends(A, request("tcp", a, vip, sport=30000, flags="A")).packet)[2] == one.ip
    for sport in range(30001, 30050):
        assert ends(world.pod_sends(A, request("tcp", a, vip, sport=sport)).packet)[2] == other.ip
    again = world.pod_sends(A, request("tcp", a, vip, sport=30000))
    assert ends(again.packet)[2] == other.ip  # the same ports begin anew
    services.remove_backend(one)
    services.serve(vip, [other])
    assert ends(world.pod_sends(A, request("tcp", a, vip, sport=30000, flags="A")).packet)[2] == other.ip


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
def test_a_connection_to_a_removed_backend_moves_to_another(
    world: World, services: Services, vip: str, a: str, remotes: list[str]
) -> None:
    one, other = Backend(1, remotes[0]), Backend(2, remotes[1])
    services.serve(vip, [one])
    world.pod_sends(A, request("udp", a, vip))
    services.serve(vip, [other])
    services.remove_backend(one)
    for _ in range(3):
        assert ends(world.pod_sends(A, request("udp", a, vip)).packet)[2] == other.ip


def test_after_a_close_the_same_ports_stay_for_a_grace_and_then_choose_anew(
    world: World, services: Services
) -> None:
    services.serve(VIP, [Backend(number, each) for number, each in enumerate(REMOTE, 1)])
    first = ends(world.pod_sends(A, request("tcp", A.ip, VIP)).packet)[2]
    world.pod_sends(A, request("tcp", A.ip, VIP, flags="FA"))
    for _ in range(10):
        assert ends(world.pod_sends(A, request("tcp", A.ip, VIP)).packet)[2] == first
        world.pod_sends(A, request("tcp", A.ip, VIP, flags="FA"))


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
def test_a_client_with_affinity_comes_back_to_its_backend(
    world: World, services: Services, vip: str, a: str, remotes: list[str]
) -> None:
    backends = [Backend(number, each) for number, each in enumerate(remotes, 1)]
    services.serve(vip, backends, flags=ServiceFlag.ROUTABLE | ServiceFlag.AFFINITY, timeout=100)
    sports = iter(range(30000, 40000))

    def connect(times: int) -> set[str]:
        return {
            ends(world.pod_sends(A, request("tcp", a, vip, sport=next(sports))).packet)[2]
            for _ in range(times)
        }

    (stays,) = connect(40)
    services.age_clients(90)
    assert connect(1) == {stays}  # and counts from then on
    services.age_clients(90)
    assert connect(1) == {stays}
    seen = set()
    for _ in range(20):
        services.age_clients(101)
        seen |= connect(1)
    assert len(seen) > 1
    (stays,) = connect(40)
    services.part(1, next(each for each in backends if each.ip == stays))
    seen = set()
    for _ in range(20):
        services.age_clients(101)
        seen |= connect(1)
    assert len(seen) > 1


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_a_client_with_affinity_leaves_a_backend_that_is_terminating(
    world: World, services: Services, vip: str, a: str, remotes: list[str], kind: str
) -> None:
    backends = [Backend(number, each) for number, each in enumerate(remotes, 1)]
    flags = ServiceFlag.ROUTABLE | ServiceFlag.AFFINITY
    services.serve(vip, backends, flags=flags, timeout=100)
    sports = iter(range(30000, 40000))

    def asks(sport: int, tcp_flags: str = "S") -> str:
        return str(ends(world.pod_sends(A, request(kind, a, vip, sport=sport, flags=tcp_flags)).packet)[2])

    first = asks(29999)
    # All of them are about to end: the slots have them, and the client stays.
    for each in backends:
        services.set_backend(each._replace(state=BackendState.TERMINATING))
    assert {asks(next(sports)) for _ in range(20)} == {first}
    ending = [each._replace(state=BackendState(each.ip == first)) for each in backends]
    services.serve(vip, ending, flags=flags, timeout=100)
    assert asks(29999, "A") == first  # as a flow that goes on
    (stays,) = {asks(next(sports)) for _ in range(20)}
    assert stays != first


@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_policy_is_enforced_against_the_backend(
    world: World, services: Services, vip: str, a: str, b: str
) -> None:
    services.serve(vip, [Backend(11, b)])
    world.allow(A, [(PolicyKey(B.identity, True, 6, PORT, 16), PolicyEntry())])
    assert world.pod_sends(A, request("tcp", a, vip)).dropped == (133, EGRESS)
    world.allow(A, [(PolicyKey(B.identity, True, 6, TARGET, 16), PolicyEntry())])
    assert world.pod_sends(A, request("tcp", a, vip)).action == REDIRECT
    world.allow(A, [])
    assert world.pod_sends(A, request("tcp", a, vip, flags="A")).dropped == (133, EGRESS)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize(("vip", "a"), [(VIP, A.ip), (VIP6, A.ip6)])
def test_a_service_without_backends_answers_port_unreachable(
    world: World, services: Services, vip: str, a: str, kind: str
) -> None:
    services.serve(vip, [])
    packet = request(kind, a, vip)
    outcome = world.pod_sends(A, packet)
    assert (outcome.action, outcome.counted) == (REDIRECT, {})
    answer = outcome.packet
    assert (answer.src, answer.dst) == (A.host_mac, A.mac)
    assert intact(answer)
    if ":" in vip:
        assert (answer[IPv6].src, answer[IPv6].dst) == (vip, a)
        assert (answer[ICMPv6DestUnreach].type, answer[ICMPv6DestUnreach].code) == (1, 4)
        quoted = bytes(answer[ICMPv6DestUnreach].payload)
    else:
        assert (answer[IP].src, answer[IP].dst) == (vip, a)
        assert (answer[ICMP].type, answer[ICMP].code) == (3, 3)
        quoted = bytes(answer[ICMP].payload)
    assert bytes(packet)[14:].startswith(quoted)
    assert len(quoted) >= 28


@pytest.fixture(scope="module")
def silent() -> Iterator[World]:
    """A node on which services without backends do not answer."""
    with World(DatapathSettings(service_no_backend_response="drop")) as world:
        yield world


def test_with_no_backend_response_drop_a_service_without_backends_drops(silent: World) -> None:
    silent.reset()
    Services(silent.maps).serve(VIP, [])
    assert silent.pod_sends(A, request("tcp", A.ip, VIP)).dropped == (158, EGRESS)


@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_an_external_address_is_served_that_no_node_has(
    world: World, services: Services, vip: str, a: str, b: str
) -> None:
    services.serve(vip, [Backend(11, b)], flags=ServiceFlag.EXTERNAL_IP | ServiceFlag.ROUTABLE)
    assert ends(world.pod_sends(A, request("tcp", a, vip)).packet) == (a, 40000, b, TARGET)


@pytest.fixture(scope="module")
def mitigating() -> Iterator[World]:
    """A node that serves pods only those externalIPs that it has."""
    with World(DatapathSettings(disable_external_ip_mitigation=False)) as world:
        yield world


@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_an_external_address_of_another_owner_is_not_translated(
    mitigating: World, vip: str, a: str, b: str
) -> None:
    mitigating.reset()
    services = Services(mitigating.maps)
    services.serve(vip, [Backend(11, b)], flags=ServiceFlag.EXTERNAL_IP | ServiceFlag.ROUTABLE)
    assert ends(mitigating.pod_sends(A, request("tcp", a, vip)).packet) == (a, 40000, vip, PORT)
    mitigating.identify(vip, 1)
    assert ends(mitigating.pod_sends(A, request("tcp", a, vip)).packet) == (a, 40000, b, TARGET)


def test_fragments_of_a_datagram_follow_the_first(world: World, services: Services) -> None:
    services.serve(VIP, [Backend(11, B.ip)])
    datagram = IP(src=A.ip, dst=VIP, id=9) / UDP(sport=40000, dport=PORT) / Raw(bytes(range(250)) * 10)
    whole = IP(src=A.ip, dst=B.ip) / UDP(sport=40000, dport=TARGET) / Raw(bytes(range(250)) * 10)
    parts = [world.pod_sends(A, from_pod(A) / part) for part in fragment(datagram, 1000)]
    assert [part.action for part in parts] == [REDIRECT] * len(parts)
    assert {part.packet[IP].dst for part in parts} == {B.ip}
    payload = b"".join(bytes(part.packet[IP].payload) for part in parts)
    assert payload == bytes(IP(bytes(whole)).payload)  # and so the checksum is right


def test_a_pod_reaches_itself_by_a_service(world: World, services: Services) -> None:
    services.serve(VIP, [Backend(11, A.ip)])
    world.allow(A, [])  # policy has no say in that
    for flags in ("S", "A", "A"):
        there = world.pod_sends(A, request("tcp", A.ip, VIP, flags=flags))
        assert there.action == REDIRECT
        assert ends(there.packet) == (LOOPBACK, 40000, A.ip, TARGET)
        assert there.packet.dst == A.mac
        assert intact(there.packet)
        back = world.pod_sends(
            A, from_pod(A) / tcp(A.ip, LOOPBACK, "SA" if flags == "S" else "A", sport=TARGET, dport=40000)
        )
        assert back.action == REDIRECT
        assert ends(back.packet) == (VIP, PORT, A.ip, 40000)
        assert intact(back.packet)
    forged = Ether(src=A.host_mac, dst=A.mac) / tcp(LOOPBACK, A.ip, "S", sport=1, dport=TARGET)
    assert world.pod_gets(replace(A, flags=4), forged).dropped is not None


@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_icmp_errors_about_service_traffic_quote_the_service(
    world: World, services: Services, vip: str, a: str, b: str
) -> None:
    services.serve(vip, [Backend(11, b)])
    sent = world.pod_sends(A, request("udp", a, vip)).packet
    kind = ICMPv6DestUnreach(code=4) if ":" in vip else ICMP(type=3, code=3)
    quoted = sent[IPv6] if ":" in vip else sent[IP]
    outcome = world.pod_sends(B, from_pod(B) / ip(b, a) / kind / Raw(bytes(quoted)[:48]))
    assert outcome.action == REDIRECT
    answer = outcome.packet
    assert intact(answer)
    network = IPv6 if ":" in vip else IP
    assert (answer[network].src, answer[network].dst) == (vip, a)
    inner = network(bytes(answer[ICMPv6DestUnreach if ":" in vip else ICMP].payload))
    assert (inner.src, inner.dst) == (a, vip)
    assert (inner.payload.sport, inner.payload.dport) == (40000, PORT)
    if ":" not in vip:
        fresh = inner.copy()
        del fresh.chksum
        assert IP(bytes(fresh)).chksum == inner.chksum


@pytest.mark.parametrize(("vip", "a", "remotes"), [(VIP, A.ip, REMOTE), (VIP6, A.ip6, REMOTE6)])
def test_tcp_and_udp_on_one_port_may_be_two_services(
    world: World, services: Services, vip: str, a: str, remotes: list[str]
) -> None:
    services.serve(vip, [Backend(1, remotes[0])], protocol=6, number=1)
    services.serve(vip, [Backend(2, remotes[1])], protocol=17, number=2)
    assert ends(world.pod_sends(A, request("tcp", a, vip)).packet)[2] == remotes[0]
    assert ends(world.pod_sends(A, request("udp", a, vip)).packet)[2] == remotes[1]


def test_clients_of_the_cluster_have_a_scope_of_their_own(world: World, services: Services) -> None:
    both = ServiceFlag.ROUTABLE | ServiceFlag.TWO_SCOPES
    services.serve(VIP, [Backend(1, REMOTE[0])], flags=both)
    services.serve(VIP, [Backend(2, REMOTE[1])], flags=both, scope=1)
    for sport in range(30000, 30020):
        assert ends(world.pod_sends(A, request("tcp", A.ip, VIP, sport=sport)).packet)[2] == REMOTE[1]


@pytest.mark.parametrize(("vip", "a", "b"), FAMILIES)
def test_the_same_ports_to_the_backend_itself_are_another_flow(
    world: World, services: Services, vip: str, a: str, b: str
) -> None:
    services.serve(vip, [Backend(11, b)])
    answer = from_pod(B) / reply("tcp", b, a, flags="A")
    direct = from_pod(A) / tcp(a, b, "A", dport=TARGET)
    for _ in range(3):
        assert world.pod_sends(A, direct).action == REDIRECT
        assert ends(world.pod_sends(B, answer).packet) == (b, TARGET, a, 40000)
        world.pod_sends(A, request("tcp", a, vip, flags="A"))
        assert ends(world.pod_sends(B, answer).packet) == (vip, PORT, a, 40000)


@pytest.mark.parametrize(("vip", "a"), [(VIP, A.ip), (VIP6, A.ip6)])
def test_connections_to_other_addresses_are_unchanged(
    world: World, services: Services, vip: str, a: str
) -> None:
    services.serve(vip, [Backend(11, A.ip6 if ":" in vip else A.ip)])

    def unchanged(packet: Packet) -> Outcome:
        outcome = world.pod_sends(A, from_pod(A) / packet)
        assert outcome.packet.payload == Ether(bytes(from_pod(A) / packet)).payload
        return outcome

    assert unchanged(tcp(a, vip, "S", dport=81)).action == OK
    assert unchanged(echo(a, vip)).action == OK
