"""Mark and conntrack state passed between programs with the host's stack between them."""

import pytest
from scapy.packet import Packet

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    INGRESS,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    ROUTER6,
    A,
    B,
    World,
)

pytestmark = pytest.mark.kernel

SENT_BY_A = 0x0F00 | A.identity << 16
ENDS = [(A.ip, B.ip), (A.ip6, B.ip6)]


def by_stack(world: World, packet: Packet, mark: int) -> tuple[int, int]:
    """The host's stack sends a packet with this mark to a pod: the verdict, and the mark afterwards."""
    outcome = world.host_sends(packet, mark=mark)
    return outcome.action, outcome.mark


def mark_of(world: World, packet: Packet) -> int:
    """The mark that what A sends has behind the program."""
    world.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
    outcome = world.pod_sends(A, packet)
    assert outcome.action == OK
    return outcome.mark


@pytest.mark.parametrize(("source", "outside"), [(A.ip, OUTSIDE), (A.ip6, OUTSIDE6)])
def test_packets_to_the_stack_carry_the_identity_of_their_sender_in_the_mark(
    world: World, source: str, outside: str
) -> None:
    for _ in range(3):  # evaluated, then from the cache
        assert mark_of(world, from_pod(A) / udp(source, outside)) == SENT_BY_A


def test_behind_masquerading_policy_knows_the_pod_that_sent(world: World) -> None:
    packet = from_host() / tcp(ROUTER, B.ip, "S")
    world.allow(B, [(PolicyKey(A.identity, egress=False), PolicyEntry())])
    assert by_stack(world, packet, SENT_BY_A) == (REDIRECT, 0)
    world.allow(B, [(PolicyKey(1, egress=False), PolicyEntry())])
    assert by_stack(world, packet, SENT_BY_A)[0] == 2
    assert by_stack(world, packet, 0) == (REDIRECT, 0)


@pytest.mark.parametrize(("one", "other"), ENDS)
@pytest.mark.parametrize("mark", [SENT_BY_A, 0x4000])
def test_replies_go_back_the_way_the_request_came(world: World, one: str, other: str, mark: int) -> None:
    """0x4000: another program has put its own mark in the place of ours."""
    request, reply = tcp(one, other, "S"), tcp(other, one, "SA", sport=80, dport=40000)
    assert by_stack(world, from_host() / request, mark)[0] == REDIRECT
    for _ in range(3):
        assert world.pod_sends(B, from_pod(B) / reply).action == OK
    later = tcp(other, one, "A", sport=80, dport=40000)
    for _ in range(3):
        assert world.pod_sends(B, from_pod(B) / later).action == OK
    # The same ports again, this time straight: the answers follow the last request.
    world.pod_sends(A, from_pod(A) / tcp(one, other, "A"))
    assert world.pod_sends(B, from_pod(B) / later).action == REDIRECT
    by_stack(world, from_host() / tcp(one, other, "A"), mark)
    assert world.pod_sends(B, from_pod(B) / later).action == OK


@pytest.mark.parametrize(("router", "ip"), [(ROUTER, B.ip), (ROUTER6, B.ip6)])
def test_replies_to_the_host_take_the_direct_way(world: World, router: str, ip: str) -> None:
    assert by_stack(world, from_host() / tcp(router, ip, "S"), 0)[0] == REDIRECT
    assert world.pod_sends(B, from_pod(B) / tcp(ip, router, "SA", sport=80, dport=40000)).action == OK
    private = [entry.flags & 0x8000 for entry in world.connections(version=6 if ":" in ip else 4).values()]
    assert not any(private)


@pytest.mark.parametrize(("one", "other"), ENDS)
def test_cached_replies_end_with_policy_and_identity(world: World, one: str, other: str) -> None:
    """The cache of replies is emptied by the same changes as that of requests."""
    request, reply = tcp(one, other, "A"), tcp(other, one, "A", sport=80, dport=40000)
    for _ in range(3):
        assert world.pod_sends(A, from_pod(A) / request).action == REDIRECT
        assert world.pod_sends(B, from_pod(B) / reply).action == REDIRECT
    for name in ("cilium_ct4_global", "cilium_ct6_global"):
        world.maps[name].clear()
    world.allow(A, [])
    assert world.pod_sends(B, from_pod(B) / reply).dropped == (133, INGRESS)


def test_policy_entries_with_an_auth_type_drop_packets(world: World) -> None:
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry(auth_type=1))])
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S")).dropped == (189, INGRESS)
