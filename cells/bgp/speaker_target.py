"""The reconciler target of speakers: policies, paths and peers of each gobgpd.

Input:  a WantedSpeaker per gobgpd.
Output: calls to gobgpd.
Why:    speakers outlive the agent, so each agent lists their configuration and changes only differences: a
        session ends only if its own peer is changed.
Source: gobgp 3.10, pkg/server; RFC 4271, 4724; Cilium 1.17, pkg/bgpv1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Final

import anyio
import msgspec

from cells.base.addresses import IPAddress, IPNetwork
from cells.bgp import gobgp_messages as api
from cells.bgp.gobgp_facts import (
    DIRECTIONS,
    NOTHING,
    WITHDRAW,
    PeerFacts,
    RuleFacts,
    SpeakerFacts,
    changed_peer,
    listed_facts,
    new_peer,
    prefix_set,
    route,
    rule_messages,
    withdrawal_policy,
)
from cells.bgp.gobgpd import Gobgp, GobgpError, GobgpUnreachableError, connected
from cells.bgp.isolation import WantedSpeaker
from cells.bgp.speaker_processes import SpeakerError, Speakers
from cells.bgp.speaker_state import (
    BGPInstance,
    BGPPeer,
    PolicyDirection,
    SpeakerName,
)
from lifecycle import ReadTable
from lifecycle.tables import BatchFailures

__all__ = ["SpeakerTarget"]

PATIENCE: Final = 2.0
"""Maximum seconds to wait until a peer has read pending updates, before its session ends."""
LEAST_PAUSE: Final = 0.005
"""Initial interval in seconds between polls of the session's state; it doubles."""


class SpeakerTarget:
    """Reconciler target with a row per gobgpd."""

    def __init__(
        self, speakers: Speakers, peers: ReadTable[tuple[str, IPAddress], BGPPeer] | None = None
    ) -> None:
        """``peers``: the desired peers; None: all speakers are to be stopped."""
        self._speakers = speakers
        self._peers = peers
        self._actual: dict[SpeakerName, SpeakerFacts] = {}
        """Actual state of each speaker by the last list and later writes; absent after a failure."""
        self.written = anyio.Event()
        """Set, and replaced by a new event, whenever a speaker was reconciled."""

    async def observe(self) -> Mapping[SpeakerName, SpeakerFacts]:
        """List the state of each running speaker; NOTHING for one that does not answer. Raises OSError."""
        self._actual.clear()
        self._speakers.truncate_logs()
        found = dict.fromkeys(self._speakers.running(), NOTHING)

        async def list_one(name: SpeakerName) -> None:
            # put() calls a speaker that does not answer again, and reports the error
            with suppress(GobgpError):
                async with connected(self._speakers.socket(name)) as gobgp:
                    found[name] = self._actual[name] = await listed_facts(gobgp)

        async with anyio.create_task_group() as tasks:
            for name in list(found):
                tasks.start_soon(list_one, name)
        return found

    def matches(self, row: WantedSpeaker, observed: SpeakerFacts) -> bool:
        """Return whether the actual state equals the desired one."""
        return row.facts == observed

    async def put(self, batch: Mapping[SpeakerName, WantedSpeaker]) -> None:
        """Reconcile speakers concurrently, so that a slow one does not delay others. Raises BatchError."""
        with BatchFailures(GobgpError, SpeakerError, OSError) as failures:

            async def put_one(row: WantedSpeaker) -> None:
                with failures.of(row.name):
                    await self._reconcile(row)

            async with anyio.create_task_group() as tasks:
                for row in batch.values():
                    tasks.start_soon(put_one, row)

    async def drop(self, batch: Collection[SpeakerName]) -> None:
        """Stop speakers. Raises BatchError.

        Routes are withdrawn first, as a peer with graceful restart and Notifications (RFC 8538) retains the
        routes of an ended session. The gobgpd of an isolated peer that returns to its instance is killed
        instead, so that the peer retains its routes until the new session is established.
        """
        with BatchFailures(GobgpError, OSError) as failures:
            for name in batch:
                with failures.of(name):
                    self._actual.pop(name, None)
                    if self._returned_to_instance(name):
                        await self._speakers.end(name, abruptly=True)
                        continue
                    try:
                        async with connected(self._speakers.socket(name)) as gobgp:
                            actual = await listed_facts(gobgp)
                            await gobgp.put_routes(route(prefix, withdrawn=True) for prefix in actual.paths)
                            await _end_sessions(gobgp, actual.peers)
                            await gobgp.stop()
                    except GobgpUnreachableError:
                        pass  # it has exited, or is killed now
                    await self._speakers.end(name)

    def _returned_to_instance(self, name: SpeakerName) -> bool:
        """Return whether the speaker was that of an isolated peer, which its instance dials now."""
        if self._peers is None or not name.peer:
            return False
        return self._peers.get((name.instance, ip_address(name.peer))) is not None

    async def _reconcile(self, row: WantedSpeaker) -> None:
        actual = self._actual.pop(row.name, None)
        if actual is None:
            await self._speakers.ensure(row.name)
        async with connected(self._speakers.socket(row.name)) as gobgp:
            if actual is None:
                actual = await listed_facts(gobgp)
            await _reconcile(gobgp, row, actual)
        self._actual[row.name] = row.facts
        written, self.written = self.written, anyio.Event()
        written.set()


async def _reconcile(gobgp: Gobgp, row: WantedSpeaker, actual: SpeakerFacts) -> None:
    """Change a speaker to its desired state. Raises GobgpError.

    Policies and paths precede peers, so that the first update to a new peer has all routes. New policies are
    added before old ones are removed, and routes are withdrawn while policies still accept them, because
    gobgpd does not withdraw routes that policies reject.
    """
    wanted = row.facts
    if actual.speaker != wanted.speaker:
        if actual.speaker is not None:
            await gobgp.stop()
        await gobgp.start(_global(row.instance))
        actual = await listed_facts(gobgp)
    actual = await _remove_foreign(gobgp, actual)
    removed_paths = actual.paths.keys() - wanted.paths.keys()
    await _add_rules(gobgp, actual, wanted)
    await gobgp.put_routes(route(prefix, withdrawn=True) for prefix in removed_paths)
    async with _withdrawing(gobgp, actual, wanted) as first:
        await _remove_peers(gobgp, actual.peers.keys() - wanted.peers.keys())
        await _remove_rules(gobgp, actual, wanted, first=first)
    for address in sorted(_peers_to_refresh(actual, wanted), key=str):
        await gobgp.refresh_out(str(address))
    missing = [prefix for prefix, right in wanted.paths.items() if actual.paths.get(prefix) != right]
    await gobgp.put_routes(map(route, missing))
    await _reconcile_peers(gobgp, row, actual)


def _global(instance: BGPInstance) -> api.Global:
    return api.Global(
        asn=instance.local_asn,
        router_id=str(instance.router_id),
        listen_port=instance.listen_port,
        route_selection_options=api.RouteSelection(advertise_inactive_routes=True),
    )


# Policies.


async def _assign(
    gobgp: Gobgp, direction: PolicyDirection, names: Collection[str], *, first: str = ""
) -> None:
    await gobgp.assign(DIRECTIONS[direction], [*([first] if first else []), *sorted(names)])


async def _remove_foreign(gobgp: Gobgp, actual: SpeakerFacts) -> SpeakerFacts:
    """Remove policies and sets of other forms than ours; return the remaining state."""
    if not (actual.foreign_policies or actual.foreign_sets):
        return actual
    assigned = {}
    for direction in DIRECTIONS:
        assigned[direction] = actual.assigned[direction] & actual.rules.keys()
        await _assign(gobgp, direction, assigned[direction])
    for name in actual.foreign_policies:
        await gobgp.delete_policy(name)
    for kind, name in actual.foreign_sets:
        await gobgp.delete_set(kind, name)
    return msgspec.structs.replace(
        actual,
        assigned=assigned,
        rejects=frozenset(PolicyDirection),
        foreign_policies=frozenset(),
        foreign_sets=frozenset(),
    )


async def _add_rules(gobgp: Gobgp, actual: SpeakerFacts, wanted: SpeakerFacts) -> None:
    for name, rule in wanted.rules.items():
        before = actual.rules.get(name)
        if before is None:
            sets, policy = rule_messages(name, rule)
            for one in sets:
                await gobgp.add_to_set(one)
            await gobgp.add_policy(policy)
        elif more := rule.prefixes - before.prefixes:
            await gobgp.add_to_set(prefix_set(name, more))
    for direction in DIRECTIONS:
        names = actual.assigned[direction] | wanted.assigned[direction]
        if names != actual.assigned[direction] or direction not in actual.rejects:
            await _assign(gobgp, direction, names)


async def _remove_rules(gobgp: Gobgp, actual: SpeakerFacts, wanted: SpeakerFacts, *, first: str = "") -> None:
    """Unassign and delete rules. ``first``: an export policy to assign before the remaining ones."""
    for direction in DIRECTIONS:
        if actual.assigned[direction] - wanted.assigned[direction]:
            await _assign(
                gobgp,
                direction,
                wanted.assigned[direction],
                first=first if direction is PolicyDirection.EXPORT else "",
            )
    for name, rule in actual.rules.items():
        after = wanted.rules.get(name)
        if after is None:
            await gobgp.delete_policy(name)
            for one in rule_messages(name, rule)[0]:
                await gobgp.delete_set(api.DefinedType(one.defined_type), one.name)
        elif fewer := rule.prefixes - after.prefixes:
            await gobgp.remove_from_set(prefix_set(name, fewer))


def _routes_to_withdraw(actual: SpeakerFacts, wanted: SpeakerFacts) -> dict[IPAddress, set[IPNetwork]]:
    """Return the routes to withdraw from each peer although they stay in the RIB.

    These are routes of removed rules, and all routes of removed peers: a peer with graceful restart and
    Notifications (RFC 8538) would retain them for some time.
    """
    remaining = actual.paths.keys() & wanted.paths.keys()
    removed = actual.peers.keys() - wanted.peers.keys()
    peers = _unchanged_peers(actual, wanted) | removed
    found: dict[IPAddress, set[IPNetwork]] = {}
    for name in actual.rules:
        before, after = _exported_rule(actual, name), _exported_rule(wanted, name)
        if before is None or (before == after and not removed):
            continue
        lost = before.covered(remaining) if after is None else before.differs(after, remaining)
        for address in filter(before.is_for, peers):
            found.setdefault(address, set()).update(before.covered(remaining) if address in removed else lost)
    for address, routes in found.items():
        for name in wanted.assigned[PolicyDirection.EXPORT]:
            rule = wanted.rules[name]
            if address not in removed and rule.is_for(address):
                routes.difference_update(rule.covered(routes))
    return {address: routes for address, routes in found.items() if routes}


@asynccontextmanager
async def _withdrawing(gobgp: Gobgp, actual: SpeakerFacts, wanted: SpeakerFacts) -> AsyncIterator[str]:
    """Withdraw routes from the peers that lose them, without affecting other peers.

    Yields the name of the policy to assign first while the block removes peers and rules; empty if there is
    none.
    """
    withdrawn = _routes_to_withdraw(actual, wanted)
    if not withdrawn:
        yield ""
        return
    export = PolicyDirection.EXPORT
    sets, policy = withdrawal_policy(withdrawn)
    for one in sets:
        await gobgp.add_to_set(one)
    await gobgp.add_policy(policy)
    await _assign(gobgp, export, actual.assigned[export] | wanted.assigned[export], first=WITHDRAW)
    routes = set[IPNetwork]().union(*withdrawn.values())
    await gobgp.put_routes(route(prefix, marked=True) for prefix in routes)
    yield WITHDRAW
    await gobgp.put_routes(map(route, routes))
    await _assign(gobgp, export, wanted.assigned[export])
    await gobgp.delete_policy(WITHDRAW)
    for one in sets:
        await gobgp.delete_set(api.DefinedType(one.defined_type), one.name)


def _unchanged_peers(actual: SpeakerFacts, wanted: SpeakerFacts) -> set[IPAddress]:
    return {address for address, one in actual.peers.items() if wanted.peers.get(address) == one}


def _peers_to_refresh(actual: SpeakerFacts, wanted: SpeakerFacts) -> set[IPAddress]:
    """Return unchanged peers to which remaining routes are now exported with other attributes, or newly."""
    remaining = actual.paths.keys() & wanted.paths.keys()
    peers = _unchanged_peers(actual, wanted)
    found: set[IPAddress] = set()
    for name in actual.rules.keys() | wanted.rules.keys():
        before, after = _exported_rule(actual, name), _exported_rule(wanted, name)
        rule = after or before
        if rule is None or before == after:
            continue
        changed = before.differs(rule, remaining) if before and after else rule.covered(remaining)
        if changed:
            found.update(filter(rule.is_for, peers))
    return found


def _exported_rule(facts: SpeakerFacts, name: str) -> RuleFacts | None:
    """Return the rule if it is assigned to export."""
    return facts.rules.get(name) if name in facts.assigned[PolicyDirection.EXPORT] else None


# Peers.


async def _reconcile_peers(gobgp: Gobgp, row: WantedSpeaker, actual: SpeakerFacts) -> None:
    """Change peers, then add new ones, as Cilium does. A failure does not prevent other changes."""
    wanted, before = row.facts.peers, actual.peers
    listed: dict[IPAddress, api.ApiPeer] = {}
    if any(before[one] != wanted[one] for one in before.keys() & wanted.keys()):
        listed = {ip_address(one.conf.neighbor_address): one for one in await gobgp.peers() if one.conf}
    failures = []
    for address in sorted(wanted, key=lambda one: (one not in before, str(one))):
        if before.get(address) != wanted[address]:
            try:
                await _put_peer(gobgp, row.peers[address], before.get(address), listed.get(address))
            except GobgpError as error:
                failures.append(error)
    if failures:
        raise failures[0]


async def _remove_peers(gobgp: Gobgp, removed: Collection[IPAddress]) -> None:
    await _end_sessions(gobgp, removed)
    for address in removed:
        await gobgp.delete_peer(str(address))


async def _end_sessions(gobgp: Gobgp, addresses: Collection[IPAddress]) -> None:
    """End sessions after pending updates are sent, at most after PATIENCE seconds.

    Deleting a peer directly may discard withdrawals that are not sent yet.
    """
    for address in addresses:
        await gobgp.shut_down(str(address))
    texts, pause = set(map(str, addresses)), LEAST_PAUSE
    with anyio.move_on_after(PATIENCE):
        while texts & {
            one.state.neighbor_address
            for one in await gobgp.peers()
            if one.state is not None and one.state.session_state == api.SessionState.ESTABLISHED
        }:
            await anyio.sleep(pause)
            pause *= 2


async def _put_peer(
    gobgp: Gobgp, peer: BGPPeer, actual: PeerFacts | None, listed: api.ApiPeer | None
) -> None:
    """Add or replace a peer. If only the connect-retry time differs, the session is not ended."""
    retry = PeerFacts.of_row(peer).connect_retry
    same = actual and msgspec.structs.replace(actual, connect_retry=retry) == PeerFacts.of_row(peer)
    if same and listed is not None:
        await gobgp.update_peer(changed_peer(listed, peer))
        return
    if actual is not None:
        await gobgp.delete_peer(str(peer.address))
    await gobgp.add_peer(new_peer(peer))
