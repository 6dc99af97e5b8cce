"""Speakers made equal to what is wanted of them: policies, paths and peers.

Why:    a speaker outlives the agent, so each agent lists what it has and changes only what differs: a session
        is touched by a change of its own peer alone.
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
    RETIRE,
    PeerFacts,
    RuleFacts,
    SpeakerFacts,
    changed_peer,
    listed_facts,
    new_peer,
    prefix_set,
    retiring,
    route,
    rule_messages,
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
"""Seconds that a peer gets to read what it is sent before its session ends."""
LEAST_PAUSE: Final = 0.005
"""Seconds between the first two looks whether it has."""


class SpeakerTarget:
    """Every gobgpd, as the target of a reconciler."""

    def __init__(
        self, speakers: Speakers, peers: ReadTable[tuple[str, IPAddress], BGPPeer] | None = None
    ) -> None:
        """``peers``: the wanted ones; None: every peer is to be removed."""
        self._speakers = speakers
        self._peers = peers
        self._held: dict[SpeakerName, SpeakerFacts] = {}
        """What each has, from the last list and what was written since; none after a failure."""
        self.written = anyio.Event()
        """Set each time that one was made equal, and replaced."""

    async def observe(self) -> Mapping[SpeakerName, SpeakerFacts]:
        """What every speaker that runs has; nothing of one that does not answer. Raises OSError."""
        self._held.clear()
        self._speakers.cut_logs()
        found = dict.fromkeys(self._speakers.running(), NOTHING)

        async def list_one(name: SpeakerName) -> None:
            # one that does not answer is called again by put(), which reports what it fails with
            with suppress(GobgpError):
                async with connected(self._speakers.socket(name)) as gobgp:
                    found[name] = self._held[name] = await listed_facts(gobgp)

        async with anyio.create_task_group() as tasks:
            for name in list(found):
                tasks.start_soon(list_one, name)
        return found

    def matches(self, row: WantedSpeaker, observed: SpeakerFacts) -> bool:
        """Whether a speaker has what its rows have."""
        return row.facts == observed

    async def put(self, batch: Mapping[SpeakerName, WantedSpeaker]) -> None:
        """Make speakers equal to their rows, side by side: a slow one delays no other. Raises BatchError."""
        with BatchFailures(GobgpError, SpeakerError, OSError) as failures:

            async def put_one(row: WantedSpeaker) -> None:
                with failures.of(row.name):
                    await self._make_equal(row)

            async with anyio.create_task_group() as tasks:
                for row in batch.values():
                    tasks.start_soon(put_one, row)

    async def drop(self, batch: Collection[SpeakerName]) -> None:
        """Stop speakers. Raises BatchError.

        Routes are withdrawn first: a peer that has graceful restart with Notifications (RFC 8538) keeps those
        of a session that ends. One of a peer that goes on elsewhere just ends, for graceful restart.
        """
        with BatchFailures(GobgpError, OSError) as failures:
            for name in batch:
                with failures.of(name):
                    self._held.pop(name, None)
                    if self._goes_on(name):
                        await self._speakers.end(name, abruptly=True)
                        continue
                    try:
                        async with connected(self._speakers.socket(name)) as gobgp:
                            held = await listed_facts(gobgp)
                            await gobgp.put_routes(route(prefix, withdrawn=True) for prefix in held.paths)
                            await _part(gobgp, held.peers)
                            await gobgp.stop()
                    except GobgpUnreachableError:
                        pass  # it has stopped, or is ended now
                    await self._speakers.end(name)

    def _goes_on(self, name: SpeakerName) -> bool:
        """Whether it is of one peer, which the speaker of its instance has now."""
        if self._peers is None or not name.peer:
            return False
        return self._peers.get((name.instance, ip_address(name.peer))) is not None

    async def _make_equal(self, row: WantedSpeaker) -> None:
        held = self._held.pop(row.name, None)
        if held is None:
            await self._speakers.ensure(row.name)
        async with connected(self._speakers.socket(row.name)) as gobgp:
            if held is None:
                held = await listed_facts(gobgp)
            await _make_equal(gobgp, row, held)
        self._held[row.name] = row.facts
        written, self.written = self.written, anyio.Event()
        written.set()


async def _make_equal(gobgp: Gobgp, row: WantedSpeaker, held: SpeakerFacts) -> None:
    """Policies and paths before peers, so that a peer's first routes are all there are. Raises GobgpError.

    What is new is accepted before what is old no longer is, and a route is withdrawn while policies still
    accept it: gobgpd sends no withdrawal of what they reject.
    """
    wanted = row.facts
    if held.speaker != wanted.speaker:
        if held.speaker is not None:
            await gobgp.stop()
        await gobgp.start(_global(row.instance))
        held = await listed_facts(gobgp)
    held = await _remove_strange(gobgp, held)
    removed_paths = held.paths.keys() - wanted.paths.keys()
    await _add_rules(gobgp, held, wanted)
    await gobgp.put_routes(route(prefix, withdrawn=True) for prefix in removed_paths)
    async with _retiring(gobgp, held, wanted) as first:
        await _remove_peers(gobgp, held.peers.keys() - wanted.peers.keys())
        await _remove_rules(gobgp, held, wanted, first=first)
    for address in sorted(_affected(held, wanted), key=str):
        await gobgp.send_again(str(address))
    missing = [prefix for prefix, right in wanted.paths.items() if held.paths.get(prefix) != right]
    await gobgp.put_routes(map(route, missing))
    await _make_peers(gobgp, row, held)


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


async def _remove_strange(gobgp: Gobgp, held: SpeakerFacts) -> SpeakerFacts:
    """Without what is not as we make it, and will be made anew where it is wanted."""
    if not (held.strange_policies or held.strange_sets):
        return held
    assigned = {}
    for direction in DIRECTIONS:
        assigned[direction] = held.assigned[direction] & held.rules.keys()
        await _assign(gobgp, direction, assigned[direction])
    for name in held.strange_policies:
        await gobgp.delete_policy(name)
    for kind, name in held.strange_sets:
        await gobgp.delete_set(kind, name)
    return msgspec.structs.replace(
        held,
        assigned=assigned,
        rejects=frozenset(PolicyDirection),
        strange_policies=frozenset(),
        strange_sets=frozenset(),
    )


async def _add_rules(gobgp: Gobgp, held: SpeakerFacts, wanted: SpeakerFacts) -> None:
    for name, rule in wanted.rules.items():
        before = held.rules.get(name)
        if before is None:
            sets, policy = rule_messages(name, rule)
            for one in sets:
                await gobgp.add_to_set(one)
            await gobgp.add_policy(policy)
        elif more := rule.prefixes - before.prefixes:
            await gobgp.add_to_set(prefix_set(name, more))
    for direction in DIRECTIONS:
        names = held.assigned[direction] | wanted.assigned[direction]
        if names != held.assigned[direction] or direction not in held.rejects:
            await _assign(gobgp, direction, names)


async def _remove_rules(gobgp: Gobgp, held: SpeakerFacts, wanted: SpeakerFacts, *, first: str = "") -> None:
    """``first`` is the policy that routes to peers pass before the rules."""
    for direction in DIRECTIONS:
        if held.assigned[direction] - wanted.assigned[direction]:
            await _assign(
                gobgp,
                direction,
                wanted.assigned[direction],
                first=first if direction is PolicyDirection.EXPORT else "",
            )
    for name, rule in held.rules.items():
        after = wanted.rules.get(name)
        if after is None:
            await gobgp.delete_policy(name)
            for one in rule_messages(name, rule)[0]:
                await gobgp.delete_set(api.DefinedType(one.defined_type), one.name)
        elif fewer := rule.prefixes - after.prefixes:
            await gobgp.take_from_set(prefix_set(name, fewer))


def _retired(held: SpeakerFacts, wanted: SpeakerFacts) -> dict[IPAddress, set[IPNetwork]]:
    """Routes that stay, by the peers that are to lose them: those of rules, or peers, that are removed.

    A removed peer that has graceful restart with Notifications (RFC 8538) would keep them for a while.
    """
    stays = held.paths.keys() & wanted.paths.keys()
    removed = held.peers.keys() - wanted.peers.keys()
    peers = _sessions_that_stay(held, wanted) | removed
    found: dict[IPAddress, set[IPNetwork]] = {}
    for name in held.rules:
        before, after = _in_force(held, name), _in_force(wanted, name)
        if before is None or (before == after and not removed):
            continue
        lost = before.covered(stays) if after is None else before.differs(after, stays)
        for address in filter(before.is_for, peers):
            found.setdefault(address, set()).update(before.covered(stays) if address in removed else lost)
    for address, routes in found.items():
        for name in wanted.assigned[PolicyDirection.EXPORT]:
            rule = wanted.rules[name]
            if address not in removed and rule.is_for(address):
                routes.difference_update(rule.covered(routes))
    return {address: routes for address, routes in found.items() if routes}


@asynccontextmanager
async def _retiring(gobgp: Gobgp, held: SpeakerFacts, wanted: SpeakerFacts) -> AsyncIterator[str]:
    """Withdraw routes from the peers that are to lose them, while all others keep them.

    The block removes peers and rules, with the policy that this gives before the rules, if there is one.
    """
    retired = _retired(held, wanted)
    if not retired:
        yield ""
        return
    export = PolicyDirection.EXPORT
    sets, policy = retiring(retired)
    for one in sets:
        await gobgp.add_to_set(one)
    await gobgp.add_policy(policy)
    await _assign(gobgp, export, held.assigned[export] | wanted.assigned[export], first=RETIRE)
    routes = set[IPNetwork]().union(*retired.values())
    await gobgp.put_routes(route(prefix, marked=True) for prefix in routes)
    yield RETIRE
    await gobgp.put_routes(map(route, routes))
    await _assign(gobgp, export, wanted.assigned[export])
    await gobgp.delete_policy(RETIRE)
    for one in sets:
        await gobgp.delete_set(api.DefinedType(one.defined_type), one.name)


def _sessions_that_stay(held: SpeakerFacts, wanted: SpeakerFacts) -> set[IPAddress]:
    return {address for address, one in held.peers.items() if wanted.peers.get(address) == one}


def _affected(held: SpeakerFacts, wanted: SpeakerFacts) -> set[IPAddress]:
    """Peers, with a session that stays, to which routes that stay go otherwise than before."""
    stays = held.paths.keys() & wanted.paths.keys()
    peers = _sessions_that_stay(held, wanted)
    found: set[IPAddress] = set()
    for name in held.rules.keys() | wanted.rules.keys():
        before, after = _in_force(held, name), _in_force(wanted, name)
        rule = after or before
        if rule is None or before == after:
            continue
        changed = before.differs(rule, stays) if before and after else rule.covered(stays)
        if changed:
            found.update(filter(rule.is_for, peers))
    return found


def _in_force(facts: SpeakerFacts, name: str) -> RuleFacts | None:
    """The rule, if routes to peers pass it."""
    return facts.rules.get(name) if name in facts.assigned[PolicyDirection.EXPORT] else None


# Peers.


async def _make_peers(gobgp: Gobgp, row: WantedSpeaker, held: SpeakerFacts) -> None:
    """Changes before additions, as upstream; one that fails leaves the others alone."""
    wanted, before = row.facts.peers, held.peers
    listed: dict[IPAddress, api.ApiPeer] = {}
    if any(before[one] != wanted[one] for one in before.keys() & wanted.keys()):
        listed = {ip_address(one.conf.neighbor_address): one for one in await gobgp.peers() if one.conf}
    failures = []
    for address in sorted(wanted, key=lambda one: (one not in before, str(one))):
        if before.get(address) != wanted[address]:
            try:
                await _make_peer(gobgp, row.peers[address], before.get(address), listed.get(address))
            except GobgpError as error:
                failures.append(error)
    if failures:
        raise failures[0]


async def _remove_peers(gobgp: Gobgp, removed: Collection[IPAddress]) -> None:
    await _part(gobgp, removed)
    for address in removed:
        await gobgp.delete_peer(str(address))


async def _part(gobgp: Gobgp, addresses: Collection[IPAddress]) -> None:
    """End sessions after all that is to be sent over them, at most PATIENCE seconds from now.

    What removes a peer overtakes withdrawals that are on their way to it.
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


async def _make_peer(gobgp: Gobgp, peer: BGPPeer, held: PeerFacts | None, listed: api.ApiPeer | None) -> None:
    """gobgpd changes nothing but timers of a session, and of these the next OPEN has all but one."""
    retry = PeerFacts.of_row(peer).connect_retry
    same = held and msgspec.structs.replace(held, connect_retry=retry) == PeerFacts.of_row(peer)
    if same and listed is not None:
        await gobgp.update_peer(changed_peer(listed, peer))
        return
    if held is not None:
        await gobgp.delete_peer(str(peer.address))
    await gobgp.add_peer(new_peer(peer))
