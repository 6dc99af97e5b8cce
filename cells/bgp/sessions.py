"""Read the state of sessions from gobgpd's API; read reasons of their ends, and crashes, from its log.

Input:  listed peers; the log of a gobgpd.
Output: ObservedPeer rows; reasons by peer; Crash values.
Why:    only the log has the reason why a session ended. gobgpd 3.10 panics on a message of an unknown type,
        which ends all its sessions, and the log does not name the peer.
Source: gobgp 3.10, pkg/server/fsm.go; RFC 4271, section 4.5; RFC 4486, 8203, 8538 (subcodes of Cease).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from cells.bgp import gobgp_messages as api
from cells.bgp.gobgp_facts import family_of
from cells.bgp.speaker_state import BGPPeer, FamilyCounts, HeldPeer, ObservedPeer, PeerState
from cells.hubble.codec import decode

__all__ = ["Crash", "SpeakerLog", "held_peer", "moment", "observed_peer"]

# The API.

CAPABILITIES: Final = {
    "MultiProtocolCapability": "multiprotocol",
    "RouteRefreshCapability": "route-refresh",
    "ExtendedNexthopCapability": "extended-nexthop",
    "GracefulRestartCapability": "graceful-restart",
    "FourOctetASNCapability": "4-octet-as",
    "AddPathCapability": "add-path",
    "EnhancedRouteRefreshCapability": "enhanced-route-refresh",
    "LongLivedGracefulRestartCapability": "long-lived-graceful-restart",
    "RouteRefreshCiscoCapability": "cisco-route-refresh",
    "FqdnCapability": "fqdn",
}
CODES: Final = {5: "multiple-labels", 6: "extended-message", 9: "role"}
"""Capabilities (IANA) for which gobgpd has no message type."""
STATES: Final = {
    api.SessionState.IDLE: PeerState.IDLE,
    api.SessionState.CONNECT: PeerState.CONNECT,
    api.SessionState.ACTIVE: PeerState.ACTIVE,
    api.SessionState.OPENSENT: PeerState.OPEN_SENT,
    api.SessionState.OPENCONFIRM: PeerState.OPEN_CONFIRM,
    api.SessionState.ESTABLISHED: PeerState.ESTABLISHED,
}


def observed_peer(instance: str, listed: api.ApiPeer, error: str = "") -> ObservedPeer:
    """Convert a listed peer to a row, with the reason why its session ended last."""
    conf, state = listed.conf or api.PeerConf(), listed.state or api.ApiPeerState()
    timers = (listed.timers or api.Timers()).state or api.TimersState()
    established = state.session_state == api.SessionState.ESTABLISHED
    return ObservedPeer(
        instance=instance,
        address=ip_address(conf.neighbor_address),
        asn=conf.peer_asn,
        local_asn=conf.local_asn,
        remote_port=(listed.transport or api.ApiTransport()).remote_port,
        state=STATES.get(api.SessionState(state.session_state), PeerState.UNKNOWN),
        established_at=moment(timers.uptime) if established else None,
        hold_time=timers.negotiated_hold_time,
        keepalive=timers.keepalive_interval,
        families=tuple(
            # with graceful restart, gobgpd counts End-of-RIB as advertised; Cilium shows the same count
            FamilyCounts(family_of(one.family), one.received, one.accepted, one.advertised)
            for one in (each.state for each in listed.afi_safis)
            if one is not None and one.family is not None
        ),
        capabilities=tuple(sorted(set(map(_capability, state.remote_cap)))),
        router_id=state.router_id,
        sessions=state.flops + established,
        error=error,
    )


def _capability(announced: api.Packed) -> str:
    name = announced.type_url.rpartition(".")[2]
    if name != "UnknownCapability":
        return CAPABILITIES.get(name, name)
    code = decode(api.UnknownCapability, announced.value).code
    return CODES.get(code, f"capability {code}")


def moment(nanoseconds: int | None) -> datetime | None:
    """Convert nanoseconds since 1970 to a time, truncated to seconds."""
    return None if nanoseconds is None else datetime.fromtimestamp(nanoseconds // 10**9, UTC)


def held_peer(peer: BGPPeer, held: HeldPeer) -> ObservedPeer:
    """Return the row of a peer that is held down."""
    return ObservedPeer(
        instance=peer.instance,
        address=peer.address,
        asn=peer.asn,
        local_asn=peer.local_asn,
        remote_port=peer.remote_port,
        state=PeerState.IDLE,
        error=held.error,
    )


# The log.

ERRORS: Final = {
    1: "message header error",
    2: "OPEN message error",
    3: "UPDATE message error",
    4: "hold timer expired",
    5: "finite state machine error",
    6: "cease",
}
DETAILS: Final = {
    (2, 1): "unsupported version",
    (2, 2): "bad peer AS",
    (2, 3): "bad BGP identifier",
    (2, 6): "unacceptable hold time",
    (2, 7): "unsupported capability",
    (3, 1): "malformed attribute list",
    (6, 1): "maximum number of prefixes reached",
    (6, 2): "administrative shutdown",
    (6, 3): "peer de-configured",
    (6, 4): "administrative reset",
    (6, 5): "connection rejected",
    (6, 6): "other configuration change",
    (6, 7): "connection collision",
    (6, 8): "out of resources",
    (6, 9): "hard reset",
}
"""Meanings of NOTIFICATION subcodes, by code and subcode."""
REASONS: Final = {
    "read-failed": "the peer ended the connection",
    "write-failed": "the connection ended while it was written to",
    "hold-timer-expired": "sent NOTIFICATION 4/0 (hold timer expired): the peer was silent",
    "graceful-restart": "the peer ended the connection, and may restart gracefully",
}
"""Texts for gobgpd's reasons other than a NOTIFICATION."""

_FIELD: Final = re.compile(r'([\w-]+)=("(?:[^"\\]|\\.)*"|\S*)')
_NOTIFIED: Final = re.compile(r"notification-(sent|received) code (\d+)\(.*?\) subcode (\d+)\(")
_PANICS: Final = ("panic: ", "fatal error: ")


class Crash(NamedTuple):
    """A crash of gobgpd while it read a message of a peer."""

    at: datetime
    up: tuple[str, ...]
    """Addresses of peers with an established session, in the order in which they were established."""
    established: bool
    """Whether the peer that sent the message had an established session."""
    after: datetime
    """Time of the last log line before the crash; identifies the crash when the log is read again."""


class SpeakerLog:
    """Reads the log of one gobgpd incrementally; it may be truncated, or missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._partial = b""
        self._up: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self._trace: list[str] | None = None
        """Lines since a panic; None if there was no panic since the last reported crash."""
        self._last = datetime.min.replace(tzinfo=UTC)
        """Time of the last line with a timestamp."""
        self.ends: dict[str, str] = {}
        """Why each peer's session ended last, or could not be established, by address."""

    def read(self, *, ended: bool = False) -> list[Crash]:
        """Read new lines and return the crashes in them. ``ended``: the process has exited.

        Raises OSError.
        """
        crashes = [crash for line in self._lines() if (crash := self._parse(line)) is not None]
        if ended and (crash := self._crash(datetime.now(UTC))) is not None:
            crashes.append(crash)
        return crashes

    def _lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as log:
                if log.seek(0, 2) < self._read:
                    self._read, self._partial = 0, b""
                log.seek(self._read)
                data = log.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")

    def _parse(self, line: str) -> Crash | None:
        if not line.startswith("time="):
            if self._trace is None and line.startswith(_PANICS):
                self._trace = []
            if self._trace is not None:
                self._trace.append(line)
            return None
        fields = {name: _unquoted(value) for name, value in _FIELD.findall(line)}
        message, peer = fields.get("msg", ""), fields.get("Key", "")
        now = _time(fields.get("time", ""))
        if message == "gobgpd started":
            crash = self._crash(now)
            self._last = now
            self._up.clear()
            return crash
        self._last = now
        if message == "Peer Up":
            self._up.pop(peer, None)
            self._up[peer] = None
        elif message == "Peer Down":
            self._up.pop(peer, None)
            self.ends[peer] = self._end(peer, fields.get("Reason", ""))
        elif message == "Delete a peer configuration":
            self._up.pop(peer, None)
            self.ends.pop(peer, None)
        elif message == "received notification":
            code, subcode = fields.get("Code", ""), fields.get("Subcode", "")
            text = _notification_text("received", code, subcode, fields.get("Communicated-Reason", ""))
            self._reasons[peer] = self.ends[peer] = text
        elif message == "sent notification" and peer not in self._up:
            self.ends[peer] = f"sent NOTIFICATION: {fields.get('Data', '')}"
        return None

    def _end(self, peer: str, reason: str) -> str:
        received = self._reasons.pop(peer, "")
        if (found := _NOTIFIED.match(reason)) is None:
            return REASONS.get(reason, reason)
        direction, code, subcode = found.groups()
        return (
            received if direction == "received" and received else _notification_text(direction, code, subcode)
        )

    def _crash(self, at: datetime) -> Crash | None:
        """Return the crash of a stack trace; None if the code that handles peers is not in it."""
        trace, self._trace = "\n".join(self._trace or ()), None
        if "fsmHandler)" not in trace and "handleFSMMessage" not in trace:
            return None
        established = "fsmHandler).established" in trace or "handleFSMMessage" in trace
        return Crash(at, tuple(self._up), established, self._last)


def _unquoted(value: str) -> str:
    """Remove quotes and their escapes; escapes of unprintable characters remain."""
    return re.sub(r'\\(["\\])', r"\1", value[1:-1]) if value.startswith('"') else value


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC)


def _notification_text(direction: str, code: str, subcode: str, communicated: str = "") -> str:
    numbers = (int(code), int(subcode)) if code.isdecimal() and subcode.isdecimal() else (0, 0)
    words = [ERRORS.get(numbers[0], ""), DETAILS.get(numbers, ""), communicated]
    return f"{direction} NOTIFICATION {code}/{subcode} ({': '.join(word for word in words if word)})"
