"""Why sessions end, and which peer crashes gobgpd, as far as its log has it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from cells.bgp.sessions import Crash, SpeakerLog, Suspects

A, B, C = (IPv4Address(f"192.0.2.{number}") for number in (1, 2, 3))
START = datetime(2026, 11, 29, 9, 0, tzinfo=UTC)
BEGIN = 'time="2026-11-29T09:50:51Z" level=info msg="gobgpd started"\n'
PANIC = """panic: runtime error: invalid memory address or nil pointer dereference
[signal SIGSEGV: segmentation violation code=0x1 addr=0x1a pc=0xac4916]

goroutine 193 [running]:
github.com/osrg/gobgp/pkg/server.(*fsmHandler).handlingError(0xc000325ec0?, 0xc000458088?, 0xa0?)
	github.com/osrg/gobgp/pkg/server/fsm.go:886 +0x36
created by github.com/osrg/gobgp/pkg/server.(*fsmHandler).{state}
	github.com/osrg/gobgp/pkg/server/fsm.go:1774 +0x28d
"""
"""As gobgpd 3.10 writes it."""


def line(message: str, peer: object, more: str = "") -> str:
    """One of gobgpd's log."""
    return f'time="2026-11-29T09:50:58Z" level=info msg="{message}" Key={peer} {more} Topic=Peer\n'


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        (
            line("sent notification", A, 'Data="as number mismatch expected 65110, received 65210"'),
            "sent NOTIFICATION: as number mismatch expected 65110, received 65210",
        ),
        (
            line("received notification", A, 'Code=2 Data="[]" Subcode=2'),
            "received NOTIFICATION 2/2 (OPEN message error: bad peer AS)",
        ),
        (
            line("Peer Up", A)
            + line("received notification", A, 'Code=6 Communicated-Reason="see \\"us\\"\\n msg=x" Subcode=2')
            + line(
                "Peer Down",
                A,
                'Reason="notification-received code 6(cease) subcode 2(administrative shutdown)"',
            ),
            'received NOTIFICATION 6/2 (cease: administrative shutdown: see "us"\\n msg=x)',
        ),
        (
            line("Peer Up", A)
            + line("sent notification", A, 'Code=3 Data="[]" Subcode=1')
            + line("Peer Down", A, 'Reason="notification-sent code 3(update) subcode 1(malformed list)"'),
            "sent NOTIFICATION 3/1 (UPDATE message error: malformed attribute list)",
        ),
        (line("Peer Up", A) + line("Peer Down", A, "Reason=read-failed"), "the peer ended the connection"),
        (line("Peer Up", A) + line("Peer Down", A, 'Reason="of another sort"'), "of another sort"),
    ],
)
def test_the_reason_of_an_ended_session_is_shown(tmp_path: Path, lines: str, end: str) -> None:
    path = tmp_path / "log"
    log = SpeakerLog(path)
    assert log.read() == [], "there need not be a log"
    path.write_text(BEGIN + lines)
    log.read()
    assert log.ends == {str(A): end}
    with path.open("a") as more:
        more.write(line("Delete a peer configuration", A))
    log.read()
    assert log.ends == {}


def test_a_crash_has_the_sessions_of_its_moment(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        BEGIN
        + line("Peer Up", C)
        + line("Peer Up", A)
        + line("Peer Up", B)
        + line("Peer Down", C, "Reason=read-failed")
        + PANIC.replace("{state}", "established")
    )
    log = SpeakerLog(path)
    assert log.read() == [], "it may write on"
    (crash,) = log.read(ended=True)
    assert (crash.up, crash.established) == ((str(A), str(B)), True)
    assert log.read(ended=True) == [], "each is reported once"
    with path.open("a") as more:
        more.write(BEGIN + PANIC.replace("{state}", "opensent") + BEGIN + line("Peer Up", A)[:20])
    (crash,) = log.read()
    assert (crash.up, crash.established) == ((), False)
    assert crash.at == datetime(2026, 11, 29, 9, 50, 51, tzinfo=UTC)
    path.write_text(BEGIN + "fatal error: out of memory\n\ngoroutine 1 [running]:\nmain.main()\n")
    assert log.read(ended=True) == [], "it was cut; and no peer has to do with this one"


class Speaker:
    """One with peers of which some crash it so many seconds after their sessions came up."""

    def __init__(self, peers: Collection[IPv4Address], hostile: dict[IPv4Address, int]) -> None:
        self.suspects, self.peers, self.hostile = Suspects("edge"), list(peers), hostile
        self.now = START
        self.held: dict[IPv4Address, datetime] = {}
        self.crashes = 0

    def run(self, seconds: int) -> None:
        """Each session comes up 7 s after the start, or when its peer is released, in the order of peers."""
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
            found = self.suspects.crashed(Crash(crash, order, established=True), self.peers)
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
    suspects = Suspects("edge")
    (held,) = suspects.crashed(Crash(START, (str(A), str(B)), established=False), [A, B, C])
    assert (held.address, held.until) == (C, START + timedelta(minutes=1))
    assert held.error == ("held down until 09:01:00 UTC: gobgpd crashed, probably by a message of this peer")


def test_the_only_peer_of_an_instance_is_not_held_down() -> None:
    assert Suspects("edge").crashed(Crash(START, (str(A),), established=True), [ip_address(str(A))]) == []
