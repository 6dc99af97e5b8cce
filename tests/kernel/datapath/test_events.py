"""Events of the programs about packets: which, when, and their fields."""

import pytest
from scapy.layers.l2 import Ether

from cells.maps.records.endpoints import (
    NODE_AUDITS_POLICY,
    NODE_NOTIFY_DROP,
    NODE_NOTIFY_POLICY_VERDICT,
    NODE_NOTIFY_TRACE,
    PolicyEntry,
    PolicyKey,
)
from cells.observe.events import Drop, Trace, Verdict
from tests.kernel.datapath.packets import from_pod, tcp, udp
from tests.kernel.datapath.world import IFINDEX, OUTSIDE, WORLD, A, B, Listen, World

pytestmark = pytest.mark.kernel

ALL = NODE_NOTIFY_DROP | NODE_NOTIFY_TRACE | NODE_NOTIFY_POLICY_VERDICT
NONE, MEDIUM = 0, 3


@pytest.mark.parametrize(("source", "destination"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_a_drop_notification_has_source_and_reason(
    world: World, events: Listen, source: str, destination: str
) -> None:
    world.report(NODE_NOTIFY_DROP)
    world.allow(B, [])
    packet = from_pod(A) / tcp(source, destination, "S")
    assert world.pod_sends(A, packet).action == 2
    (event,) = events()
    assert isinstance(event, Drop)
    assert (event.reason, event.source, event.destination) == (133, B.id, B.id)
    assert (event.source_identity, event.destination_identity) == (A.identity, B.identity)
    assert (event.length, event.ifindex, event.ext_error) == (len(packet), IFINDEX, 0)
    assert event.packet == bytes(packet)


def test_a_notification_of_a_long_packet_has_its_first_bytes(world: World, events: Listen) -> None:
    world.report(NODE_NOTIFY_DROP)
    packet = from_pod(A) / udp(B.ip, OUTSIDE) / bytes(500)
    world.pod_sends(A, packet)
    (event,) = events()
    assert isinstance(event, Drop)
    assert (event.reason, event.source) == (132, A.id)
    assert event.length == len(packet)
    assert event.packet == bytes(packet)[:128]


def test_a_new_flow_emits_both_policy_verdicts_and_its_trace(world: World, events: Listen) -> None:
    world.report(ALL, MEDIUM)
    world.allow(A, [(PolicyKey(B.identity, True, 6, 80, 16), PolicyEntry())])
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S"))
    out, into, delivered = events()
    assert isinstance(out, Verdict)
    assert isinstance(into, Verdict)
    assert isinstance(delivered, Trace)
    assert (out.source, out.remote_identity, out.verdict, out.match) == (A.id, B.identity, 0, 2)
    assert (into.source, into.remote_identity, into.verdict, into.match) == (B.id, A.identity, 0, 4)
    assert (out.port, out.protocol, out.egress, into.egress) == (80, 6, True, False)
    assert (delivered.point, delivered.source, delivered.destination) == (0, B.id, B.id)
    assert (delivered.source_identity, delivered.destination_identity) == (A.identity, B.identity)


def test_an_established_flow_emits_a_trace_per_aggregation_interval(world: World, events: Listen) -> None:
    world.report(ALL, MEDIUM)
    packet = from_pod(A) / tcp(A.ip, B.ip, "A")
    for _ in range(20):
        world.pod_sends(A, packet)
    assert len([event for event in events() if isinstance(event, Trace)]) < 10
    world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "FA"))  # a flag it had not shown
    assert any(isinstance(event, Trace) for event in events())
    assert not any(isinstance(event, Verdict) for event in events())


def test_a_refusal_is_a_verdict_for_every_packet(world: World, events: Listen) -> None:
    world.report(NODE_NOTIFY_POLICY_VERDICT)
    world.allow(A, [(PolicyKey(WORLD, True), PolicyEntry(deny=True))])
    for _ in range(2):
        world.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
        (event,) = events()
        assert isinstance(event, Verdict)
        assert (event.verdict, event.match, event.remote_identity) == (-181, 1, WORLD)


def test_in_audit_mode_denied_packets_pass_and_emit_a_verdict(world: World, events: Listen) -> None:
    world.report(NODE_NOTIFY_POLICY_VERDICT | NODE_AUDITS_POLICY)
    world.allow(A, [(PolicyKey(WORLD, True), PolicyEntry(deny=True))])
    packet = from_pod(A) / udp(A.ip, OUTSIDE)
    assert world.pod_sends(A, packet).dropped is None
    (event,) = events()
    assert isinstance(event, Verdict)
    assert (event.verdict, event.audited, event.match, event.ipv6) == (0, True, 1, False)
    world.report(NODE_NOTIFY_POLICY_VERDICT)
    world.bump(A.id)
    assert world.pod_sends(A, packet).dropped is not None


def test_notifications_that_are_off_are_not_emitted(world: World, events: Listen) -> None:
    world.report(0)
    world.allow(A, [])
    world.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
    assert events() == []


def test_without_aggregation_every_delivery_emits_a_trace(world: World, events: Listen) -> None:
    world.report(NODE_NOTIFY_TRACE, NONE)
    for _ in range(3):
        world.pod_sends(A, from_pod(A) / udp(A.ip, B.ip))
        world.pod_sends(A, from_pod(A) / udp(A.ip, OUTSIDE))
    points = [event.point for event in events() if isinstance(event, Trace)]
    assert points == [5, 0, 5, 3] * 3


def test_packets_to_a_chained_pod_emit_verdict_and_trace_like_a_delivery(
    world: World, events: Listen
) -> None:
    world.report(ALL, MEDIUM)
    packet = Ether(dst=A.mac) / tcp(OUTSIDE, A.ip, "S")
    assert world.pod_gets(A, packet).action == 0
    into, delivered = events()
    assert isinstance(into, Verdict)
    assert isinstance(delivered, Trace)
    assert (into.source, into.remote_identity, into.verdict, into.egress) == (A.id, WORLD, 0, False)
    assert (delivered.point, delivered.source, delivered.destination) == (0, A.id, A.id)
    assert (delivered.source_identity, delivered.destination_identity) == (WORLD, A.identity)
    world.allow(A, [])
    assert world.pod_gets(A, packet).action == 2
    refused, dropped = events()
    assert isinstance(refused, Verdict)
    assert isinstance(dropped, Drop)
    assert (dropped.reason, dropped.source, dropped.source_identity) == (133, A.id, WORLD)
