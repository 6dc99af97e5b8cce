"""SCTP, allowed by enable-sctp."""

from collections.abc import Iterator

import pytest
from scapy.layers.sctp import SCTP, SCTPChunkInit, SCTPChunkInitAck

from cells.datapath.settings import DatapathSettings
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_pod, ip
from tests.kernel.datapath.world import EGRESS, INGRESS, REDIRECT, A, B, World
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

SCTP_NUMBER = 132
ENDS = [(A.ip, B.ip), (A.ip6, B.ip6)]


@pytest.fixture(scope="module")
def tracking() -> Iterator[World]:
    """A node that tracks SCTP."""
    need_root()
    with World(DatapathSettings(enable_sctp=True)) as world:
        yield world


@pytest.mark.parametrize(("one", "other"), ENDS)
def test_without_enable_sctp_sctp_packets_are_dropped(world: World, one: str, other: str) -> None:
    packet = from_pod(A) / ip(one, other) / SCTP(sport=40000, dport=80) / SCTPChunkInit()
    assert world.pod_sends(A, packet).dropped == (137, EGRESS)


@pytest.mark.parametrize(("one", "other"), ENDS)
def test_sctp_flows_are_tracked_and_filtered_by_port(tracking: World, one: str, other: str) -> None:
    tracking.reset()
    tracking.allow(B, [(PolicyKey(A.identity, False, SCTP_NUMBER, 80, 16), PolicyEntry())])
    there = ip(one, other) / SCTP(sport=40000, dport=80) / SCTPChunkInit()
    back = ip(other, one) / SCTP(sport=80, dport=40000) / SCTPChunkInitAck()
    wrong = ip(one, other) / SCTP(sport=40000, dport=81) / SCTPChunkInit()
    tracking.allow(A, [(PolicyKey(0, egress=True), PolicyEntry())])
    assert tracking.pod_sends(B, from_pod(B) / back).dropped == (133, EGRESS)
    for _ in range(3):
        assert tracking.pod_sends(A, from_pod(A) / there).action == REDIRECT
        assert tracking.pod_sends(B, from_pod(B) / back).action == REDIRECT
    assert tracking.pod_sends(A, from_pod(A) / wrong).dropped == (133, INGRESS)
    cut = bytes(from_pod(A) / ip(one, other) / SCTP(sport=40000, dport=80))[:-2]
    assert tracking.pod_sends(A, cut).dropped is not None
