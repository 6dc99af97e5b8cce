"""Peers that may have crashed gobgpd are isolated or held down, also by the next agent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from cells.bgp.gobgp_facts import policy_rules
from cells.bgp.isolation import CrashSuspects, Isolation, wanted_speakers
from cells.bgp.sessions import Crash
from cells.bgp.speaker_processes import Speakers
from cells.bgp.speaker_state import (
    NOT_LISTENING,
    AnnouncedPath,
    BGPInstance,
    BGPPeer,
    PeerTimers,
    PolicyDirection,
    PolicyStatement,
    RoutePolicy,
    SpeakerName,
    peer_table,
)
from lifecycle import Secret
from lifecycle.testing import fake

A, B, C = (IPv4Address(f"192.0.2.{number}") for number in (1, 2, 3))
START = datetime(2026, 11, 29, 9, 0, tzinfo=UTC)
EDGE = SpeakerName("edge")


class Agents:
    """Consecutive agents of a node, with the same state directory."""

    def __init__(self, folder: Path, peers: Iterable[IPv4Address] = (A, B, C), most: int = 8) -> None:
        self.speakers, self.peers = fake(Speakers, isolated=folder / "isolated", most_own=most), peer_table()
        for address in peers:
            self.peers.put(BGPPeer("edge", f"peer-{address}", address, 65000, 65001))
        self.now = datetime.now(UTC)
        self.begin()

    def begin(self) -> None:
        """Start the next agent."""
        self.isolation = Isolation(self.speakers, self.peers, structlog.get_logger())

    def crash(self, *up: IPv4Address, own: IPv4Address | None = None, established: bool = True) -> Crash:
        """Report a crash, one second after the previous one."""
        self.now += timedelta(seconds=1)
        crash = Crash(self.now, tuple(map(str, up)), established, self.now)
        self.isolation.crashed(own_of(own) if own is not None else EDGE, crash)
        return crash

    @property
    def isolated(self) -> set[Any]:
        return {row.address for row in self.isolation.isolated.all()}

    @property
    def held(self) -> dict[Any, str]:
        """Errors of held peers, without the time."""
        return {row.address: row.error.partition(": ")[2] for row in self.isolation.held.all()}


def own_of(address: IPv4Address) -> SpeakerName:
    return SpeakerName("edge", str(address))


def test_each_peer_that_may_have_crashed_gobgpd_gets_one_of_its_own(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.crash(A, B)
    assert (agents.isolated, agents.held) == ({A, B}, {}), "the session of C was down"
    for count in (1, 2):
        agents.crash(B, own=B)
        often = "crashed" if count == 1 else "crashed 2 times"
        assert agents.held == {B: f"its own gobgpd {often} by messages of this peer"}
    assert agents.isolated == {A, B}


def test_before_a_session_is_established_those_without_one_get_their_own(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.crash(A, B, established=False)
    assert agents.isolated == {C}


def test_the_next_agent_knows_them_and_counts_no_crash_twice(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    first = agents.crash(A, B)
    own = agents.crash(B, own=B)
    agents.begin()
    assert (agents.isolated, len(agents.held)) == ({A, B}, 1)
    agents.isolation.crashed(EDGE, first)
    agents.isolation.crashed(own_of(B), own)
    assert agents.isolated == {A, B}
    assert {row.address: row.crashes for row in agents.isolation.isolated.all()} == {A: 0, B: 1}


@pytest.mark.anyio
async def test_a_peer_returns_when_its_configuration_changes(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.crash(A, B, C)
    agents.crash(B, own=B)
    for address, change in ((A, {"password": Secret("new")}), (B, {"timers": PeerTimers(connect_retry=5)})):
        peer = agents.peers.get(("edge", address))
        assert peer is not None
        agents.peers.put(msgspec.structs.replace(peer, **change))
    with agents.peers.txn() as rows:
        rows.delete(("edge", C))
    await agents.isolation.configured(None)
    assert (agents.isolated, agents.held) == ({A}, {}), "a new password changes nothing"
    agents.begin()
    assert agents.isolated == {A}


def test_where_no_further_gobgpd_may_run_the_likeliest_peer_is_held_down(tmp_path: Path) -> None:
    agents = Agents(tmp_path, most=1)
    agents.crash(A, B, C)
    assert (agents.isolated, agents.held) == ({C}, {})
    agents.crash(A, B)
    assert agents.isolated == {C}
    why = "gobgpd crashed, probably by a message of this peer, and no further one may run"
    assert agents.held == {B: why}
    agents = Agents(tmp_path, most=0)
    assert agents.isolated == set(), "such as with external-bgp-speaker"


def test_the_only_peer_of_an_instance_needs_no_gobgpd_of_its_own(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [A])
    agents.crash(A)
    assert (agents.isolated, agents.held) == (set(), {})


def test_a_record_that_cannot_be_read_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "isolated").write_text("{")
    agents = Agents(tmp_path)
    assert agents.isolated == set()
    agents.crash(A, B)
    agents.begin()
    assert agents.isolated == {A, B}


def test_a_gobgpd_of_a_peer_has_its_policies_and_all_routes_and_does_not_listen(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.crash(B)
    instance = BGPInstance("edge", 65001, IPv4Address("192.0.2.9"), 179)
    policies = [
        RoutePolicy("edge", str(address), PolicyDirection.EXPORT, (PolicyStatement(neighbors=(address,)),))
        for address in (A, B)
    ]
    paths = [AnnouncedPath("edge", ip_network("10.0.0.0/24"))]
    rows = agents.peers.all(), [policy_rules(one) for one in policies], paths
    found = wanted_speakers([instance], *rows, (), agents.isolation.isolated.all())
    assert found.keys() == {EDGE, own_of(B)}
    assert (set(found[EDGE].peers), set(found[own_of(B)].peers)) == ({A, C}, {B})
    own = found[own_of(B)]
    assert own.instance == msgspec.structs.replace(instance, listen_port=NOT_LISTENING)
    assert own.facts.speaker == (65001, "192.0.2.9", NOT_LISTENING)
    assert [rule.neighbors for rule in own.facts.rules.values()] == [{B}]
    assert own.facts.paths == found[EDGE].facts.paths
    agents.crash(B, own=B)
    held = agents.isolation.held.all()
    found = wanted_speakers([instance], *rows, held, agents.isolation.isolated.all())
    assert found[own_of(B)].facts.peers == {}, "it is held down"


# Where no further one may run.


class Speaker:
    """A gobgpd; hostile peers crash it a number of seconds after their sessions are established."""

    def __init__(self, peers: Collection[IPv4Address], hostile: dict[IPv4Address, int]) -> None:
        self.suspects, self.peers, self.hostile = CrashSuspects("edge"), list(peers), hostile
        self.now = START
        self.held: dict[IPv4Address, datetime] = {}
        self.crashes = 0

    def run(self, seconds: int) -> None:
        """Run for some time. Sessions are established 7 s after the start or release of a peer, in order."""
        end = self.now + timedelta(seconds=seconds)
        up = {
            peer: max(self.now, self.held.get(peer, self.now)) + timedelta(seconds=7) for peer in self.peers
        }
        while self.now < end:
            crash = min(
                (up[peer] + timedelta(seconds=late) for peer, late in self.hostile.items()), default=end
            )
            self.now = min(crash, end)
            if crash >= end:
                return
            order = tuple(str(one) for one in sorted(up, key=lambda one: up[one]) if up[one] <= crash)
            found = self.suspects.crashed(Crash(crash, order, True, crash), self.peers)
            self.held = {IPv4Address(str(row.address)): row.until for row in found}
            self.crashes += 1
            up = {peer: max(crash, self.held.get(peer, crash)) + timedelta(seconds=7) for peer in self.peers}


def test_the_peer_that_crashes_at_once_is_held_down_twice_as_long_each_time() -> None:
    speaker = Speaker([A, C, B], {B: 0})
    speaker.run(60)
    assert (speaker.crashes, set(speaker.held)) == (1, {B})
    speaker.run(4 * 3600)
    assert speaker.crashes <= 14, "1, 2, 4, 8, 16, and then 30 minutes"
    assert speaker.held.keys() == {B}


def test_a_peer_that_waits_is_found_as_the_others_are_ruled_out() -> None:
    speaker = Speaker([A, B, C], {A: 20})
    speaker.run(300)
    assert speaker.held.keys() == {A}
    assert speaker.crashes <= 4, "C and B first, as they came up last"
    speaker.run(24 * 3600)
    assert speaker.held.keys() == {A}


@pytest.mark.parametrize("late", [0, 20])
def test_two_of_them_are_both_held_down(late: int) -> None:
    speaker = Speaker([B, C, A], {A: 0, C: late})
    speaker.run(300)
    assert speaker.held.keys() >= {A, C}


def test_before_a_session_is_established_those_without_are_suspected() -> None:
    suspects = CrashSuspects("edge")
    (held,) = suspects.crashed(Crash(START, (str(A), str(B)), False, START), [A, B, C])
    assert (held.address, held.until) == (C, START + timedelta(minutes=1))
    assert held.error.startswith("held down until 09:01:00 UTC: gobgpd crashed, probably by a message of ")


def test_the_only_peer_of_an_instance_is_not_held_down() -> None:
    assert CrashSuspects("edge").crashed(Crash(START, (str(A),), True, START), [ip_address(str(A))]) == []
