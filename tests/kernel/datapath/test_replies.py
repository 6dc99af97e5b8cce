"""Replies pass while policy allows their flow in its original direction, and no longer."""

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import ICMPv6DestUnreach, IPv6
from scapy.packet import Packet, Raw

from cells.maps.records.endpoints import (
    NODE_AUDITS_POLICY,
    NODE_NOTIFY_POLICY_VERDICT,
    PolicyEntry,
    PolicyKey,
)
from cells.maps.records.flows import CtEntry
from cells.observe.events import Verdict
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp
from tests.kernel.datapath.world import EGRESS, INGRESS, OUTSIDE, OUTSIDE6, REDIRECT, A, B, Listen, World

pytestmark = pytest.mark.kernel

Rules = list[tuple[PolicyKey, PolicyEntry]]

IN, OUT = PolicyKey(0, egress=False), PolicyKey(0, egress=True)
ALLOW, DENY = PolicyEntry(), PolicyEntry(deny=True)
ONLY_IN: Rules = [(IN, ALLOW)]
ONLY_OUT: Rules = [(OUT, ALLOW)]
QUARANTINE: Rules = [(IN, DENY), (OUT, ALLOW)]
OUT_DENIED: Rules = [(IN, ALLOW), (OUT, DENY)]

KINDS = ["tcp", "udp", "ping"]


def asks(kind: str, source: str, destination: str) -> Packet:
    """The first packet of a flow."""
    if kind == "ping":
        return echo(source, destination)
    return tcp(source, destination, "S") if kind == "tcp" else udp(source, destination, dport=80)


def replies(kind: str, source: str, destination: str, flags: str = "A") -> Packet:
    """What comes back."""
    if kind == "ping":
        return echo(source, destination, reply=True)
    if kind == "udp":
        return udp(source, destination, sport=80, dport=40000)
    return tcp(source, destination, flags, sport=80, dport=40000)


def ends(version: int) -> tuple[str, str, str]:
    """The addresses of A, B and of an outsider."""
    return (A.ip, B.ip, OUTSIDE) if version == 4 else (A.ip6, B.ip6, OUTSIDE6)


def entries(world: World, kind: str, version: int) -> dict[tuple[int, int], CtEntry]:
    """What conntrack has of the flow, by the pod's side of it."""
    found = world.connections(tcp=kind == "tcp", version=version)
    return {(key.flags, key.protocol): entry for key, entry in found.items()}


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_is_denied_to_be_talked_to_stops_answering_its_neighbour(
    world: World, kind: str, version: int
) -> None:
    a, b, _ = ends(version)
    reply = from_pod(B) / replies(kind, b, a)
    world.allow(B, ONLY_IN)
    assert world.pod_sends(A, from_pod(A) / asks(kind, a, b)).action == REDIRECT
    for _ in range(3):
        assert world.pod_sends(B, reply).action == REDIRECT
    for _ in range(3):
        world.allow(B, QUARANTINE)
        assert world.pod_sends(B, reply).dropped == (181, EGRESS)
        assert world.pod_sends(B, reply).dropped == (181, EGRESS)
        world.allow(B, ONLY_IN)
        assert world.pod_sends(B, reply).action == REDIRECT


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_is_denied_to_talk_gets_no_more_answers_of_its_neighbour(
    world: World, kind: str, version: int
) -> None:
    a, b, _ = ends(version)
    reply = from_pod(B) / replies(kind, b, a)
    world.allow(A, ONLY_OUT)
    assert world.pod_sends(A, from_pod(A) / asks(kind, a, b)).action == REDIRECT
    for _ in range(3):
        assert world.pod_sends(B, reply).action == REDIRECT
    world.allow(A, OUT_DENIED)
    assert world.pod_sends(B, reply).dropped == (181, INGRESS)
    assert world.pod_sends(B, reply).dropped == (181, INGRESS)
    world.allow(A, ONLY_OUT)
    assert world.pod_sends(B, reply).action == REDIRECT


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deny_rule_ends_replies_with_the_world(world: World, kind: str, version: int) -> None:
    a, _, outside = ends(version)
    world.allow(A, ONLY_OUT)
    world.pod_sends(A, from_pod(A) / asks(kind, a, outside))
    answer = from_host() / replies(kind, outside, a)
    assert world.host_sends(answer).action == REDIRECT
    world.allow(A, OUT_DENIED)
    assert world.host_sends(answer).dropped == (181, INGRESS)

    world.reset()
    world.allow(B, ONLY_IN)
    _, b, _ = ends(version)
    assert world.host_sends(from_host() / asks(kind, outside, b)).action == REDIRECT
    answer = from_pod(B) / replies(kind, b, outside)
    assert world.pod_sends(B, answer).dropped is None
    world.allow(B, QUARANTINE)
    assert world.pod_sends(B, answer).dropped == (181, EGRESS)


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_filtered_by_the_new_identity_of_the_peer(world: World, kind: str) -> None:
    """A network that a policy denies gets an identity with the policy."""
    network = 1 << 24 | 7
    world.host_sends(from_host() / asks(kind, OUTSIDE, B.ip))
    world.pod_sends(A, from_pod(A) / asks(kind, A.ip, OUTSIDE))
    mine, theirs = from_pod(B) / replies(kind, B.ip, OUTSIDE), from_host() / replies(kind, OUTSIDE, A.ip)
    assert world.pod_sends(B, mine).dropped is None
    assert world.host_sends(theirs).dropped is None
    world.allow(A, [(IN, ALLOW), (OUT, ALLOW), (PolicyKey(network, egress=True), DENY)])
    world.allow(B, [(IN, ALLOW), (OUT, ALLOW), (PolicyKey(network, egress=False), DENY)])
    assert world.pod_sends(B, mine).dropped is None
    world.identify(f"{OUTSIDE}/32", network)
    assert world.pod_sends(B, mine).dropped == (181, EGRESS)
    assert world.host_sends(theirs).dropped == (181, INGRESS)


def test_only_the_port_that_the_flow_began_with_counts(world: World) -> None:
    world.pod_sends(A, from_pod(A) / asks("tcp", A.ip, B.ip))
    answer = from_pod(B) / replies("tcp", B.ip, A.ip)
    world.allow(B, [(IN, ALLOW), (PolicyKey(A.identity, False, 6, 40000, 16), DENY)])
    assert world.pod_sends(B, answer).action == REDIRECT
    world.allow(B, [(IN, ALLOW), (PolicyKey(A.identity, False, 6, 80, 16), DENY)])
    assert world.pod_sends(B, answer).dropped == (181, EGRESS)


@pytest.mark.parametrize("kind", KINDS)
def test_replies_that_are_dropped_do_not_prolong_the_flow(world: World, kind: str) -> None:
    world.pod_sends(A, from_pod(A) / asks(kind, A.ip, B.ip))
    world.pod_sends(B, from_pod(B) / replies(kind, B.ip, A.ip))
    world.age(20)
    before = {which: entry.lifetime for which, entry in entries(world, kind, 4).items()}
    world.allow(B, QUARANTINE)
    for _ in range(3):
        assert world.pod_sends(B, from_pod(B) / replies(kind, B.ip, A.ip)).dropped == (181, EGRESS)
    assert {which: entry.lifetime for which, entry in entries(world, kind, 4).items()} == before


@pytest.mark.parametrize("flags", ["SA", "FA", "RA"])
def test_replies_with_any_flags_are_dropped(world: World, flags: str) -> None:
    world.pod_sends(A, from_pod(A) / asks("tcp", A.ip, B.ip))
    world.allow(B, QUARANTINE)
    assert world.pod_sends(B, from_pod(B) / replies("tcp", B.ip, A.ip, flags)).dropped == (181, EGRESS)


def test_an_allowed_reply_is_cached_again(world: World) -> None:
    """From then on only the second that has passed, or an epoch, has it evaluated."""
    world.pod_sends(A, from_pod(A) / asks("udp", A.ip, B.ip))
    answer = from_pod(B) / replies("udp", B.ip, A.ip)
    world.allow(B, ONLY_IN)
    for _ in range(100):  # until all of it falls in one second
        world.pod_sends(B, answer)
        world.allow(B, QUARANTINE, without_epochs=True)
        cached = world.pod_sends(B, answer).action == REDIRECT
        world.bump(B.id)
        assert world.pod_sends(B, answer).dropped == (181, EGRESS)
        world.allow(B, ONLY_IN)
        if cached:
            return
    raise AssertionError("no reply was let through by a verdict of before")


def error_about(packet: Packet, source: str, destination: str) -> Packet:
    """Port unreachable."""
    kind = ICMPv6DestUnreach(code=4) if ":" in source else ICMP(type=3, code=3)
    return (IPv6 if ":" in source else IP)(src=source, dst=destination) / kind / Raw(bytes(packet))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_pass_while_policy_allows_the_flow_that_they_quote_and_no_longer(
    world: World, kind: str, version: int
) -> None:
    """Else they would be a way out of a quarantine, and back in, for as long as they are sent."""
    a, b, _ = ends(version)
    world.allow(A, ONLY_OUT)
    world.allow(B, ONLY_IN)
    world.pod_sends(A, from_pod(A) / asks(kind, a, b))
    error = from_pod(B) / error_about(asks(kind, a, b), b, a)
    assert world.pod_sends(B, error).action == REDIRECT
    world.allow(B, [(IN, DENY), (OUT, DENY)])
    assert world.pod_sends(B, error).dropped == (181, EGRESS)
    world.allow(B, ONLY_IN)
    assert world.pod_sends(B, error).action == REDIRECT
    world.allow(A, [(IN, DENY), (OUT, DENY)])
    assert world.pod_sends(B, error).dropped == (181, INGRESS)


@pytest.mark.parametrize("version", [4, 6])
def test_errors_that_quote_no_flow_are_packets_like_any(world: World, version: int) -> None:
    a, b, _ = ends(version)
    world.allow(A, ONLY_OUT)
    world.allow(B, ONLY_IN)
    world.pod_sends(A, from_pod(A) / asks("udp", a, b))
    hidden = from_pod(B) / error_about(udp(a, b, dport=81), b, a)
    assert world.pod_sends(B, hidden).dropped == (133, EGRESS)
    world.allow(B, [(IN, ALLOW), (OUT, ALLOW)])
    assert world.pod_sends(B, hidden).dropped == (133, INGRESS)
    world.allow(A, [(IN, ALLOW), (OUT, ALLOW)])
    assert world.pod_sends(B, hidden).action == REDIRECT


def test_errors_that_are_dropped_do_not_prolong_the_time_for_errors(world: World) -> None:
    world.pod_sends(A, from_pod(A) / asks("udp", A.ip, B.ip))
    world.age(20)
    before = {which: entry.lifetime for which, entry in entries(world, "udp", 4).items()}
    world.allow(B, [(IN, DENY), (OUT, DENY)])
    error = from_pod(B) / error_about(asks("udp", A.ip, B.ip), B.ip, A.ip)
    assert world.pod_sends(B, error).dropped == (181, EGRESS)
    assert {which: entry.lifetime for which, entry in entries(world, "udp", 4).items()} == before


def test_where_policy_is_only_audited_replies_pass(world: World) -> None:
    world.report(NODE_AUDITS_POLICY)
    world.pod_sends(A, from_pod(A) / asks("tcp", A.ip, B.ip))
    world.allow(B, QUARANTINE)
    assert world.pod_sends(B, from_pod(B) / replies("tcp", B.ip, A.ip)).action == REDIRECT


def test_the_event_names_the_rule_of_the_flow(world: World, events: Listen) -> None:
    world.pod_sends(A, from_pod(A) / asks("tcp", A.ip, B.ip))
    world.allow(B, [(IN, ALLOW), (PolicyKey(A.identity, False, 6, 80, 16), DENY)])
    world.report(NODE_NOTIFY_POLICY_VERDICT)
    world.pod_sends(B, from_pod(B) / replies("tcp", B.ip, A.ip))
    (event,) = events()
    assert isinstance(event, Verdict)
    assert (event.source, event.remote_identity, event.verdict) == (B.id, A.identity, -181)
    assert (event.port, event.protocol, event.egress) == (80, 6, False)
