"""Run speakers while there are instances, and observe their sessions.

Input:  the tables of WantedSpeakers.
Output: calls to gobgpd; the table ``bgp-observed-peers``.
Source: gobgp 3.10, pkg/server; Cilium 1.17, pkg/bgpv1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, suppress
from ipaddress import ip_network
from typing import Final

import anyio
import msgspec

from cells.base.addresses import IPAddress
from cells.bgp import SpeakerSettings
from cells.bgp import gobgp_messages as api
from cells.bgp.gobgp_facts import (
    policy_rules,
)
from cells.bgp.gobgpd import GobgpError, connected
from cells.bgp.isolation import Isolation, WantedSpeaker, wanted_speakers
from cells.bgp.sessions import SpeakerLog, held_peer, moment, observed_peer
from cells.bgp.speaker_processes import Speakers
from cells.bgp.speaker_state import (
    IPV4_UNICAST,
    IPV6_UNICAST,
    AfiSafi,
    ListedRoute,
    ObservedPeer,
    RouteTable,
    SpeakerName,
    WantedSpeakers,
)
from cells.bgp.speaker_target import SpeakerTarget
from cells.config import AgentConfig
from lifecycle import Backoff, Derived, Jobs, Logger, ReadTable, Reconciler, Table, Tables

__all__ = ["BGPSpeakers"]

SWEEP: Final = 60.0
"""Seconds between full reconciliations."""
MAX_BACKOFF: Final = 5.0
"""Maximum backoff in seconds for a speaker that fails: peers wait for it to restart."""
ROUTES_INTERVAL: Final = 1.0
"""Seconds for which events of received routes are ignored after one, to limit the work that a peer can cause.
"""
LIST_INTERVAL: Final = 0.2
"""Minimum seconds between two lists of sessions, to limit the work that a flapping peer can cause."""


class BGPSpeakers:
    """Runs speakers while there are instances. They continue to run when the agent stops."""

    def __init__(
        self,
        settings: SpeakerSettings,
        agent: AgentConfig,
        wanted: WantedSpeakers,
        observed: Table[tuple[str, IPAddress], ObservedPeer],
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._speakers = Speakers(settings, agent.state_dir, log)
        self._target = SpeakerTarget(self._speakers, wanted.peers)
        self._logs: dict[SpeakerName, SpeakerLog] = {}
        self._peers = wanted.peers
        self._isolation = isolation = Isolation(self._speakers, wanted.peers, log)
        self._wanted: ReadTable[SpeakerName, WantedSpeaker] = Derived(
            "bgp-speakers",
            wanted_speakers,
            wanted.instances,
            wanted.peers,
            wanted.policies.map(policy_rules, name="bgp-rules"),
            wanted.paths,
            isolation.held,
            isolation.isolated,
        )
        self.observed = observed
        self.reconciler: Reconciler[SpeakerName, WantedSpeaker] = Reconciler(
            self._wanted, self._target, full_every=SWEEP, backoff=Backoff(maximum=MAX_BACKOFF)
        )
        tables.add(self.reconciler.statuses, isolation.held, isolation.isolated)
        jobs.observe("reconcile", self.reconciler)
        self._list_soon = jobs.timer("list sessions", self.refresh, SWEEP, rest=LIST_INTERVAL).trigger
        jobs.one_shot("watch sessions", self._watch)
        jobs.one_shot("release peers", isolation.release)
        jobs.observe("return changed peers", wanted.peers.changes, isolation.configured)

    async def refresh(self) -> None:
        """List all sessions now, as route counts change without an event. Raises OSError."""
        async with anyio.create_task_group() as tasks:
            for name in [row.name for row in self._wanted.all()]:
                self._read_log(name)
                tasks.start_soon(self._list_one, name)
        self._drop_stale(self._wanted.all())

    async def _list_one(self, name: SpeakerName) -> None:
        listed: list[api.ApiPeer] = []
        with suppress(GobgpError):  # a speaker that does not answer has no sessions
            async with connected(self._speakers.socket(name)) as gobgp:
                listed = await gobgp.peers(advertised=True)
        self._update_sessions(name, listed)

    async def listed_routes(
        self, instance: str, table: RouteTable, family: AfiSafi, peer: IPAddress | None = None
    ) -> list[ListedRoute]:
        """List the routes of a RIB; an Adj-RIB is that of a peer. Raises GobgpError."""
        afi = ADDRESS_FAMILIES[family]
        text = "" if peer is None else str(peer)
        async with connected(self._speakers.socket(self._speaker_of(instance, peer))) as gobgp:
            found = await gobgp.routes(TABLE_TYPES[table], afi, text, binary=True)
        return [
            ListedRoute(
                ip_network(destination.prefix),
                path.nlri_binary,
                tuple(path.pattrs_binary),
                moment(path.age),
                path.best,
                path.stale,
            )
            for destination in found
            for path in destination.paths
        ]

    def _speaker_of(self, instance: str, peer: IPAddress | None) -> SpeakerName:
        """Return the speaker of a peer."""
        own = SpeakerName(instance, "" if peer is None else str(peer))
        return own if self._wanted.get(own) is not None else SpeakerName(instance)

    def _update_sessions(self, name: SpeakerName, listed: Iterable[api.ApiPeer]) -> None:
        log, wanted = self._logs.get(name), self._wanted.get(name)
        if log is None or wanted is None:
            return  # the speaker is no longer desired
        found = [
            observed_peer(name.instance, one, log.ends.get(one.conf.neighbor_address, ""))
            for one in listed
            if one.conf
        ]
        rows = {row.key: row for row in found}
        held = [(self._peers.get(row.key), row) for row in self._isolation.held.all()]
        rows |= {
            peer.key: held_peer(peer, row)
            for peer, row in held
            if peer is not None and self._speaker_of(*peer.key) == name
        }
        with self.observed.txn() as table:
            for row in self.observed.all():
                if self._speaker_of(*row.key) == name and row.key not in rows:
                    table.delete(row.key)
            for row in rows.values():
                if self._speaker_of(*row.key) != name:
                    continue
                if (own := self._isolation.isolated.get(row.key)) is not None:
                    row = msgspec.structs.replace(row, isolated_at=own.since, crashes=own.crashes)  # noqa: PLW2901
                if self.observed.get(row.key) != row:
                    table.put(row)
        if wanted.peers.keys() != {row.address for row in found}:
            self.reconciler.trigger()

    def _drop_stale(self, wanted: Iterable[WantedSpeaker]) -> None:
        names = {row.name for row in wanted}
        for name in self._logs.keys() - names:
            del self._logs[name]
        with self.observed.txn() as table:
            for row in self.observed.all():
                if SpeakerName(row.instance) not in names:
                    table.delete(row.key)

    def _read_log(self, name: SpeakerName, *, ended: bool = False) -> None:
        """Process new lines of gobgpd's log, including crashes before this agent started."""
        if name not in self._logs:
            self._logs[name] = SpeakerLog(self._speakers.log(name))
        for crash in self._logs[name].read(ended=ended):
            self._isolation.crashed(name, crash)

    async def _watch(self) -> None:
        """Follow each speaker while it is desired."""
        watched: dict[SpeakerName, anyio.CancelScope] = {}
        async with anyio.create_task_group() as tasks:
            async for _ in self._changes():
                names = {row.name for row in self._wanted.all()}
                for name in watched.keys() - names:
                    watched.pop(name).cancel()
                for name in names - watched.keys():
                    watched[name] = anyio.CancelScope()
                    tasks.start_soon(self._follow, name, watched[name])
                self._list_soon()

    async def _changes(self) -> AsyncIterator[None]:
        async for _ in self._wanted.changes():
            yield

    async def _follow(self, name: SpeakerName, scope: anyio.CancelScope) -> None:
        """List sessions on each event of a speaker; when it exits, reconcile and wait for its restart."""
        with scope:
            while True:
                written = self._target.written
                try:
                    async with (
                        connected(self._speakers.socket(name)) as gobgp,
                        aclosing(gobgp.events()) as events,
                        anyio.create_task_group() as tasks,
                    ):
                        tasks.start_soon(self._follow_routes, name)
                        async for _ in events:
                            self._list_soon()
                except* GobgpError:
                    self._speakers.notice_end(name)
                    self._read_log(name, ended=True)
                    self._list_soon()
                    self.reconciler.trigger()
                    await written.wait()

    async def _follow_routes(self, name: SpeakerName) -> None:
        """List sessions when peers have sent routes, at most once in ROUTES_INTERVAL seconds."""
        while True:
            async with connected(self._speakers.socket(name)) as gobgp:
                self._list_soon()
                async with aclosing(gobgp.events(routes=True)) as events:
                    async for _ in events:
                        break
            await anyio.sleep(ROUTES_INTERVAL)


TABLE_TYPES: Final = {
    RouteTable.LOC_RIB: api.TableType.GLOBAL,
    RouteTable.ADJ_RIB_IN: api.TableType.ADJ_IN,
    RouteTable.ADJ_RIB_OUT: api.TableType.ADJ_OUT,
}
ADDRESS_FAMILIES: Final = {IPV4_UNICAST: 1, IPV6_UNICAST: 2}
"""AFI numbers (IANA, Address Family Numbers)."""
