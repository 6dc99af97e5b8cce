"""Assign peers to gobgpd processes: that of the instance or, for suspects of a crash, a separate one.

Input:  crashes found in logs, and the peers.
Output: the tables ``bgp-isolated-peers`` and ``bgp-held-peers``, and a WantedSpeaker for each gobgpd.
Why:    gobgpd 3.10 panics on a message of an unknown type, which ends all its sessions, and its log does not
        name the peer. Each peer that may have sent the message is moved to its own gobgpd when its session
        is established again, so the next crash identifies the peer and ends only its session. A file has the
        isolated peers and their crashes, for the next agent.
Source: gobgp 3.10, pkg/server/fsm.go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Final

import anyio
import msgspec

from cells.base.addresses import IPAddress
from cells.bgp.gobgp_facts import PeerFacts, PolicyRules, SpeakerFacts, wanted_facts
from cells.bgp.sessions import Crash
from cells.bgp.speaker_processes import Speakers
from cells.bgp.speaker_state import (
    NOT_LISTENING,
    AnnouncedPath,
    BGPInstance,
    BGPPeer,
    HeldPeer,
    IsolatedPeer,
    SpeakerName,
    held_peers,
    isolated_peers,
)
from lifecycle import Logger, ReadTable

__all__ = ["CrashSuspects", "Isolation", "WantedSpeaker", "configuration_of", "wanted_speakers"]

FIRST_HOLD: Final = timedelta(minutes=1)
FIRST_OWN_HOLD: Final = timedelta(seconds=5)
"""First hold time of a peer that crashed its own gobgpd; FIRST_HOLD: a shared one."""
MAX_HOLD: Final = timedelta(minutes=30)
"""Maximum time for which a peer is held down; the time doubles with each crash."""
RESET_AFTER: Final = timedelta(hours=2)
"""Crash counts are reset after this time without a crash."""
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


# The desired state of each gobgpd.


class WantedSpeaker(msgspec.Struct, frozen=True):
    """The desired state of one gobgpd."""

    name: SpeakerName
    instance: BGPInstance
    """The instance; the gobgpd of an isolated peer does not listen, as that of the instance has the port."""
    facts: SpeakerFacts
    peers: Mapping[IPAddress, BGPPeer]


def wanted_speakers(
    instances: Iterable[BGPInstance],
    peers: Iterable[BGPPeer],
    policies: Iterable[PolicyRules],
    paths: Iterable[AnnouncedPath],
    held: Iterable[HeldPeer] = (),
    isolated: Iterable[IsolatedPeer] = (),
) -> Mapping[SpeakerName, WantedSpeaker]:
    """Return the desired state of each gobgpd, without peers that are held down."""
    held_keys = {row.key for row in held}
    isolated_by_key = {row.key: row.configuration for row in isolated}
    of_peers: dict[SpeakerName, dict[IPAddress, BGPPeer]] = {}
    own: dict[str, list[SpeakerName]] = {}
    of_policies: dict[str, list[PolicyRules]] = {}
    of_paths: dict[str, list[AnnouncedPath]] = {}
    for peer in peers:
        name = SpeakerName(peer.instance)
        if peer.key in isolated_by_key and isolated_by_key[peer.key] == configuration_of(peer):
            name = SpeakerName(peer.instance, str(peer.address))
            own.setdefault(peer.instance, []).append(name)
        if peer.key not in held_keys:
            of_peers.setdefault(name, {})[peer.address] = peer
    for policy in policies:
        of_policies.setdefault(policy.instance, []).append(policy)
    for path in paths:
        of_paths.setdefault(path.instance, []).append(path)
    found = {}
    for one in instances:
        rules, routes = of_policies.get(one.name, ()), of_paths.get(one.name, ())
        for name in (SpeakerName(one.name), *own.get(one.name, ())):
            its_peers = of_peers.get(name, {})
            instance = msgspec.structs.replace(one, listen_port=NOT_LISTENING) if name.peer else one
            only = ip_address(name.peer) if name.peer else None
            facts = wanted_facts(instance, its_peers.values(), rules, routes, only)
            found[name] = WantedSpeaker(name, instance, facts, its_peers)
    return found


def configuration_of(peer: BGPPeer) -> str:
    """Return a hash of a peer's configuration, without its password."""
    return msgspec.structs.replace(PeerFacts.of_row(peer), password="").digest


# Attribution of crashes to peers.


class CrashSuspects:
    """Finds the peer that crashes a shared gobgpd, if no more gobgpd may be started.

    The peer that established its session last is suspected first, as most crashes follow immediately. If
    gobgpd crashes while that peer is held down, it is cleared, released, and suspected last from then on. So
    each crash rules out one peer; a peer that is suspected again is not released early.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._crashes: dict[IPAddress, int] = {}
        self._cleared: set[IPAddress] = set()
        self._held: dict[IPAddress, datetime] = {}
        self._last = _NEVER

    def crashed(self, crash: Crash, peers: Collection[IPAddress]) -> list[HeldPeer]:
        """Return the peers to hold down; none if the instance has only one peer."""
        if crash.at - self._last > RESET_AFTER:
            self._crashes.clear()
            self._cleared.clear()
        self._last = crash.at
        for address, until in list(self._held.items()):
            if until <= crash.at:
                del self._held[address]
            elif address not in self._cleared:
                self._cleared.add(address)
                del self._held[address], self._crashes[address]
        if len(peers) > 1 and (found := self.suspects(crash, peers)):
            self._crashes[found[0]] = count = self._crashes.get(found[0], 0) + 1
            self._held[found[0]] = crash.at + _hold_time(FIRST_HOLD, count)
        return [
            HeldPeer(self._instance, address, self._crashes[address], until)
            for address, until in self._held.items()
        ]

    def suspects(self, crash: Crash, peers: Collection[IPAddress]) -> Sequence[IPAddress]:
        """Return the peers that may have caused a crash, most likely first."""
        up = [address for address in map(ip_address, crash.up) if address in peers]
        if not crash.established:
            up = [address for address in peers if address not in up]
        found = [address for address in reversed(up) if address not in self._held]
        return sorted(found, key=lambda address: address in self._cleared)


def _hold_time(first: timedelta, crashes: int) -> timedelta:
    return min(first * (1 << min(crashes - 1, 10)), MAX_HOLD)


class _PeerRecord(msgspec.Struct):
    instance: str
    address: str
    configuration: str
    since: datetime
    crashes: int = 0
    last: datetime | None = None
    counted: datetime | None = None


class _IsolationRecord(msgspec.Struct):
    """The file of isolated peers, which the next agent reads."""

    seen: dict[str, datetime] = {}
    """Crash.after of the last handled crash, by instance."""
    peers: list[_PeerRecord] = []


class Isolation:
    """The isolated peers and those that are held down, by the crashes so far."""

    def __init__(
        self, speakers: Speakers, peers: ReadTable[tuple[str, IPAddress], BGPPeer], log: Logger
    ) -> None:
        self._speakers = speakers
        self._path = speakers.isolated
        self._peers = peers
        self._log = log
        self._suspects: dict[str, CrashSuspects] = {}
        self._seen: dict[str, datetime] = {}
        self.isolated = isolated_peers()
        self.held = held_peers()
        self._load()

    def crashed(self, name: SpeakerName, crash: Crash) -> None:
        """Isolate or hold down peers after a crash. A crash that was already handled is ignored."""
        if name.peer:
            row = self.isolated.get((name.instance, ip_address(name.peer)))
            if row is not None and crash.after > (row.counted or _NEVER):
                self._isolated_crashed(row, crash)
        elif crash.after > self._seen.get(name.instance, _NEVER):
            self._shared_crashed(name.instance, crash)

    def _isolated_crashed(self, row: IsolatedPeer, crash: Crash) -> None:
        lately = row.last is not None and crash.at - row.last <= RESET_AFTER
        row = msgspec.structs.replace(
            row, crashes=row.crashes + 1 if lately else 1, last=crash.at, counted=crash.after
        )
        self.isolated.put(row)
        self._save()
        self._hold_down([_held_isolated(row)])

    def _shared_crashed(self, instance: str, crash: Crash) -> None:
        sharing = [
            row.address
            for row in self._peers.all()
            if row.instance == instance and self.isolated.get(row.key) is None
        ]
        suspects = self._suspects.setdefault(instance, CrashSuspects(instance))
        found = suspects.suspects(crash, sharing)[: max(0, self._speakers.most_own - len(self.isolated))]
        if len(sharing) < 2 or not found:
            held = {row.key: row for row in suspects.crashed(crash, sharing)}
            with self.held.txn() as table:
                for row in self.held.all():
                    if row.instance == instance and not row.isolated and row.key not in held:
                        table.delete(row.key)
            self._hold_down(held.values())
            return
        self._seen[instance] = crash.after
        with self.isolated.txn() as table:
            for address in found:
                peer = self._peers.get((instance, address))
                if peer is not None:
                    table.put(IsolatedPeer(instance, address, configuration_of(peer), crash.at))
                    self._log.warning(
                        "BGP peer gets a gobgpd of its own: it may have crashed that of the instance",
                        instance=instance,
                        peer=str(address),
                    )
        self._save()

    def _hold_down(self, rows: Iterable[HeldPeer]) -> None:
        now = datetime.now(UTC)
        with self.held.txn() as table:
            for row in rows:
                if row.until > now and self.held.get(row.key) != row:
                    about = {"instance": row.instance, "peer": str(row.address)}
                    self._log.warning("BGP peer is held down", **about, error=row.error)
                    table.put(row)

    async def release(self) -> None:
        """Release peers when their hold time ends, so that they are dialled again."""
        changes = self.held.changes()
        while True:
            changes.take()
            now = datetime.now(UTC)
            with self.held.txn() as table:
                for row in self.held.all():
                    if row.until <= now:
                        table.delete(row.key)
            due = min((row.until for row in self.held.all()), default=None)
            with anyio.move_on_after(None if due is None else max(0.0, (due - now).total_seconds())):
                await changes.wait()

    async def configured(self, changed: object) -> None:
        """Return peers with a changed configuration to the gobgpd of their instance; drop removed peers."""
        del changed
        known = self._peers.initialized
        returned = []
        for row in self.isolated.all():
            peer = self._peers.get(row.key)
            if known if peer is None else row.configuration != configuration_of(peer):
                returned.append(row)
        if not returned:
            return
        with self.isolated.txn() as isolated, self.held.txn() as held:
            for row in returned:
                isolated.delete(row.key)
                held.delete(row.key)
                about = {"instance": row.instance, "peer": str(row.address)}
                self._log.info("BGP peer has no gobgpd of its own: it was changed or removed", **about)
        self._save()

    def _load(self) -> None:
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_IsolationRecord)
            rows = [
                IsolatedPeer(**msgspec.structs.asdict(one) | {"address": ip_address(one.address)})
                for one in record.peers[: self._speakers.most_own]
            ]
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._log.warning(
                "BGP peers share a gobgpd: which had their own is not known",
                path=str(self._path),
                error=str(error),
            )
            return
        self._seen = record.seen
        with self.isolated.txn() as table:
            for row in rows:
                table.put(row)
        self._hold_down(_held_isolated(row) for row in rows if row.crashes)

    def _save(self) -> None:
        peers = [
            _PeerRecord(**msgspec.structs.asdict(row) | {"address": str(row.address)})
            for row in self.isolated.all()
        ]
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.write_bytes(msgspec.json.encode(_IsolationRecord(self._seen, peers)))
            fresh.replace(self._path)
        except OSError as error:
            self._log.warning(
                "the next agent will not know which BGP peers have a gobgpd of their own",
                path=str(self._path),
                error=str(error),
            )


def _held_isolated(row: IsolatedPeer) -> HeldPeer:
    until = (row.last or row.since) + _hold_time(FIRST_OWN_HOLD, row.crashes)
    return HeldPeer(row.instance, row.address, row.crashes, until, isolated=True)
