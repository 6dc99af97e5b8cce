"""Reasons of ended sessions, and crashes of gobgpd, as read from its log."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.bgp.sessions import SpeakerLog

A, B, C = (IPv4Address(f"192.0.2.{number}") for number in (1, 2, 3))
BEGIN = 'time="2026-11-29T09:50:51Z" level=info msg="gobgpd started"\n'
PANIC = """panic: runtime error: invalid memory address or nil pointer dereference
[signal SIGSEGV: segmentation violation code=0x1 addr=0x1a pc=0xac4916]

goroutine 193 [running]:
github.com/osrg/gobgp/pkg/server.(*fsmHandler).handlingError(0xc000325ec0?, 0xc000458088?, 0xa0?)
	github.com/osrg/gobgp/pkg/server/fsm.go:886 +0x36
created by github.com/osrg/gobgp/pkg/server.(*fsmHandler).{state}
	github.com/osrg/gobgp/pkg/server/fsm.go:1774 +0x28d
"""
"""The stack trace of gobgpd 3.10."""


def line(message: str, peer: object, more: str = "") -> str:
    """A line of gobgpd's log."""
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
    again = SpeakerLog(path).read(ended=True)
    assert [one.after for one in again] == [crash.after], "another agent knows it again"
    with path.open("a") as more:
        more.write(BEGIN + PANIC.replace("{state}", "opensent") + BEGIN + line("Peer Up", A)[:20])
    (crash,) = log.read()
    assert (crash.up, crash.established) == ((), False)
    assert crash.at == datetime(2026, 11, 29, 9, 50, 51, tzinfo=UTC)
    path.write_text(BEGIN + "fatal error: out of memory\n\ngoroutine 1 [running]:\nmain.main()\n")
    assert log.read(ended=True) == [], "it was cut; and no peer has to do with this one"
