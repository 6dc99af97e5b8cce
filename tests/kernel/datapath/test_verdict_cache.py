"""The verdict cache: verdicts are cached, and invalidated before they can be wrong."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from scapy.packet import Packet

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    A,
    B,
    World,
    now,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.kernel

T = TypeVar("T")

ALLOW = PolicyEntry()
TO_POD = [from_pod(A) / tcp(A.ip, B.ip, "A"), from_pod(A) / udp(A.ip6, B.ip6)]
TO_WORLD = [from_pod(A) / tcp(A.ip, OUTSIDE, "A"), from_pod(A) / udp(A.ip6, OUTSIDE6)]


def establish(world: World, packet: Packet) -> None:
    for _ in range(4):
        assert world.pod_sends(A, packet).dropped is None


def in_one_second(do: Callable[[], T]) -> T:
    """What it returned as it began and ended in one second of the programs: no verdict is older than that."""
    while True:
        began = now()
        done = do()
        if now() == began:
            return done


@pytest.mark.parametrize("packet", [*TO_POD, *TO_WORLD])
def test_every_policy_change_applies_to_the_next_packet(world: World, packet: Packet) -> None:
    allowed, denied = [(PolicyKey(0, True), ALLOW)], [(PolicyKey(0, True), PolicyEntry(deny=True))]
    establish(world, packet)
    for _ in range(300):  # more changes than a byte counts
        world.allow(A, denied)
        assert world.pod_sends(A, packet).dropped == (181, EGRESS)
        world.allow(A, allowed)
        assert world.pod_sends(A, packet).dropped is None
        assert world.pod_sends(A, packet).dropped is None


@pytest.mark.parametrize("packet", TO_POD)
def test_policy_changes_of_the_receiver_apply_to_the_next_packet(world: World, packet: Packet) -> None:
    establish(world, packet)
    world.allow(B, [])
    assert world.pod_sends(A, packet).dropped == (133, INGRESS)


def test_an_identity_change_applies_to_the_next_packet(world: World) -> None:
    world.allow(A, [(PolicyKey(2, True), ALLOW)])
    establish(world, TO_WORLD[0])
    world.identify(f"{OUTSIDE}/32", 4711)
    assert world.pod_sends(A, TO_WORLD[0]).dropped == (133, EGRESS)


def test_an_unrelated_endpoints_change_costs_others_nothing(world: World) -> None:
    def uses() -> list[dict[PolicyKey, int]]:
        world.reset()
        establish(world, TO_WORLD[0])
        before = world.policy_use(A)
        world.allow(B, [])
        world.pod_sends(A, TO_WORLD[0])
        return [before, world.policy_use(A)]

    before, after = in_one_second(uses)
    assert after == before  # not evaluated anew: counted later


@pytest.mark.parametrize("packet", [*TO_POD, *TO_WORLD])
def test_a_manual_map_change_takes_effect_within_a_second(world: World, packet: Packet) -> None:
    establish(world, packet)
    world.allow(A, [], without_epochs=True)
    eventually(lambda: world.pod_sends(A, packet).dropped == (133, EGRESS), within=2.5)
    world.allow(A, [(PolicyKey(0, True), ALLOW)], without_epochs=True)
    assert world.pod_sends(A, packet).dropped is None  # what was refused is never remembered


def test_every_packet_is_counted_at_the_latest_a_second_later(world: World) -> None:
    world.allow(A, [(PolicyKey(0, True), ALLOW)])
    world.allow(B, [(PolicyKey(0, False), ALLOW)])
    sent = 0
    last = time.monotonic() + 1.5
    while time.monotonic() < last:
        assert world.pod_sends(A, TO_POD[0]).action == REDIRECT
        sent += 1
    for _ in range(4200):  # more than the word holds
        world.pod_sends(A, TO_POD[0])
        sent += 1
    world.bump(0)
    world.pod_sends(A, TO_POD[0])
    assert world.policy_use(A) == {PolicyKey(0, True): sent + 1}
    assert world.policy_use(B) == {PolicyKey(0, False): sent + 1}


def test_tcp_flags_that_change_a_connection_bypass_the_verdict_cache(world: World) -> None:
    establish(world, TO_POD[0])
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "FA"))
    closing = [entry.flags & 3 for key, entry in world.connections().items()]
    assert all(closing)


@pytest.mark.parametrize("packet", [*TO_POD, *TO_WORLD])
@pytest.mark.parametrize("idle", [256, 1 << 16])
def test_an_expired_cached_verdict_is_not_used(world: World, packet: Packet, idle: int) -> None:
    """The remembered second has few bits: after just so long they are the same again."""
    establish(world, packet)
    world.age(idle)
    world.allow(A, [], without_epochs=True)
    assert world.pod_sends(A, packet).dropped == (133, EGRESS)


def test_packets_of_the_host_bypass_the_verdict_cache(world: World) -> None:
    packet = from_host() / udp(ROUTER, A.ip)
    for _ in range(3):
        assert world.host_sends(packet).action == REDIRECT
    world.allow(A, [], without_epochs=True)
    assert world.host_sends(packet).dropped == (133, INGRESS)
    assert world.pod_sends(B, from_pod(B) / udp(B.ip, OUTSIDE)).action == OK
