"""Which gobgpd has which peer: that of the instance or, after a crash, one of its own.

Why:    gobgpd 3.10 panics when a peer sends a message of a type that BGP does not have. All its sessions have
        ended then, and its log does not name the peer. So each peer that may have sent the message comes back
        with a gobgpd of its own, which costs it nothing more: the next crash has one peer, and ends its
        session alone. The peers and their crashes are in a file, as agents come and go.
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

__all__ = ["Isolation", "Suspects", "WantedSpeaker", "configuration_of", "wanted_speakers"]

FIRST_HOLD: Final = timedelta(minutes=1)
FIRST_OWN_HOLD: Final = timedelta(seconds=5)
"""How long a peer is held down after its first crash: of a gobgpd with other peers, and of its own."""
LONGEST_HOLD: Final = timedelta(minutes=30)
"""The longest hold; each one is twice as long as the one before."""
FORGET: Final = timedelta(hours=2)
"""Crashes count anew after so long without one."""
_EVER: Final = datetime.min.replace(tzinfo=UTC)


# The configuration of each gobgpd.


class WantedSpeaker(msgspec.Struct, frozen=True):
    """The configuration of one gobgpd."""

    name: SpeakerName
    instance: BGPInstance
    """A gobgpd of one peer does not listen: that of the instance has the port."""
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
    """The configuration of each gobgpd, without peers that are held down."""
    without = {row.key for row in held}
    alone = {row.key: row.configuration for row in isolated}
    of_peers: dict[SpeakerName, dict[IPAddress, BGPPeer]] = {}
    own: dict[str, list[SpeakerName]] = {}
    of_policies: dict[str, list[PolicyRules]] = {}
    of_paths: dict[str, list[AnnouncedPath]] = {}
    for peer in peers:
        name = SpeakerName(peer.instance)
        if peer.key in alone and alone[peer.key] == configuration_of(peer):
            name = SpeakerName(peer.instance, str(peer.address))
            own.setdefault(peer.instance, []).append(name)
        if peer.key not in without:
            of_peers.setdefault(name, {})[peer.address] = peer
    for policy in policies:
        of_policies.setdefault(policy.instance, []).append(policy)
    for path in paths:
        of_paths.setdefault(path.instance, []).append(path)
    found = {}
    for one in instances:
        rules, routes = of_policies.get(one.name, ()), of_paths.get(one.name, ())
        for name in (SpeakerName(one.name), *own.get(one.name, ())):
            its = of_peers.get(name, {})
            instance = msgspec.structs.replace(one, listen_port=NOT_LISTENING) if name.peer else one
            only = ip_address(name.peer) if name.peer else None
            facts = wanted_facts(instance, its.values(), rules, routes, only)
            found[name] = WantedSpeaker(name, instance, facts, its)
    return found


def configuration_of(peer: BGPPeer) -> str:
    """A hash of how a peer is configured, without its password."""
    return msgspec.structs.replace(PeerFacts.of_row(peer), password="").digest


# Which peer has crashed gobgpd.


class Suspects:
    """Finds the peer of an instance that crashes a gobgpd which it shares, where no further one may run.

    The last session that came up is suspected first: what crashes mostly does so at once. If gobgpd crashes
    while that peer is held down, another did it: the peer is released, and suspected last from then on. So
    each crash rules out a peer; one that is suspected for the second time is not released again.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._crashes: dict[IPAddress, int] = {}
        self._cleared: set[IPAddress] = set()
        self._held: dict[IPAddress, datetime] = {}
        self._last = _EVER

    def crashed(self, crash: Crash, peers: Collection[IPAddress]) -> list[HeldPeer]:
        """The peers to hold down from now on; none if the crash has ended no other peer's session."""
        if crash.at - self._last > FORGET:
            self._crashes.clear()
            self._cleared.clear()
        self._last = crash.at
        for address, until in list(self._held.items()):
            if until <= crash.at:
                del self._held[address]
            elif address not in self._cleared:
                self._cleared.add(address)
                del self._held[address], self._crashes[address]
        if len(peers) > 1 and (found := self.could(crash, peers)):
            self._crashes[found[0]] = count = self._crashes.get(found[0], 0) + 1
            self._held[found[0]] = crash.at + _hold(FIRST_HOLD, count)
        return [
            HeldPeer(self._instance, address, self._crashes[address], until)
            for address, until in self._held.items()
        ]

    def could(self, crash: Crash, peers: Collection[IPAddress]) -> Sequence[IPAddress]:
        """The peers that may have caused a crash, the likeliest first."""
        up = [address for address in map(ip_address, crash.up) if address in peers]
        if not crash.established:
            up = [address for address in peers if address not in up]
        found = [address for address in reversed(up) if address not in self._held]
        return sorted(found, key=lambda address: address in self._cleared)


def _hold(first: timedelta, crashes: int) -> timedelta:
    return min(first * (1 << min(crashes - 1, 10)), LONGEST_HOLD)


class _PeerRecord(msgspec.Struct):
    instance: str
    address: str
    configuration: str
    since: datetime
    crashes: int = 0
    last: datetime | None = None
    counted: datetime | None = None


class _IsolationRecord(msgspec.Struct):
    """The file by which the next agent knows them."""

    seen: dict[str, datetime] = {}
    """By instance: its latest crash after which peers were isolated, as Crash.after."""
    peers: list[_PeerRecord] = []


class Isolation:
    """The peers with a gobgpd of their own, and those that are held down, by the crashes there were."""

    def __init__(
        self, speakers: Speakers, peers: ReadTable[tuple[str, IPAddress], BGPPeer], log: Logger
    ) -> None:
        self._speakers = speakers
        self._path = speakers.isolated
        self._peers = peers
        self._log = log
        self._suspects: dict[str, Suspects] = {}
        self._seen: dict[str, datetime] = {}
        self.isolated = isolated_peers()
        self.held = held_peers()
        self._load()

    def crashed(self, name: SpeakerName, crash: Crash) -> None:
        """Isolate or hold down peers after a crash; one that was handled before is ignored."""
        if name.peer:
            row = self.isolated.get((name.instance, ip_address(name.peer)))
            if row is not None and crash.after > (row.counted or _EVER):
                self._crashed_alone(row, crash)
        elif crash.after > self._seen.get(name.instance, _EVER):
            self._crashed_together(name.instance, crash)

    def _crashed_alone(self, row: IsolatedPeer, crash: Crash) -> None:
        lately = row.last is not None and crash.at - row.last <= FORGET
        row = msgspec.structs.replace(
            row, crashes=row.crashes + 1 if lately else 1, last=crash.at, counted=crash.after
        )
        self.isolated.put(row)
        self._save()
        self._hold_down([_held_alone(row)])

    def _crashed_together(self, instance: str, crash: Crash) -> None:
        sharing = [
            row.address
            for row in self._peers.all()
            if row.instance == instance and self.isolated.get(row.key) is None
        ]
        suspects = self._suspects.setdefault(instance, Suspects(instance))
        found = suspects.could(crash, sharing)[: max(0, self._speakers.most_own - len(self.isolated))]
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
        """Release peers that were held down for long enough: they are dialled again."""
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
        """Return changed peers to the gobgpd of their instance, and forget removed ones."""
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
        self._hold_down(_held_alone(row) for row in rows if row.crashes)

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


def _held_alone(row: IsolatedPeer) -> HeldPeer:
    until = (row.last or row.since) + _hold(FIRST_OWN_HOLD, row.crashes)
    return HeldPeer(row.instance, row.address, row.crashes, until, isolated=True)
