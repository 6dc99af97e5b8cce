"""The policies of a node's endpoints, updated entry by entry.

Endpoints with the same identity and the same named ports share one policy. An identity that comes or goes
costs its own entries in the policies with selectors that select it; nothing else is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from cells.policy.compute import STEP, Entry, Key, PolicyConflictError, Steps, finish
from cells.policy.compute.endpoint_policy import BY_ITSELF, DirectionPolicy, Filter, Proxies, filters_in_steps
from cells.policy.compute.map_state import ANYBODY, Entries
from cells.policy.compute.repository import Repository, RulesChanged
from cells.policy.compute.selector_cache import SelectorCache, SelectorChange
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction
from cells.policy.selectors import ALL, PeerSelector

__all__ = [
    "DIRECTIONS",
    "ChangedEntries",
    "ComputedPolicies",
    "Difference",
    "NamedPodPort",
    "SharedPolicyKey",
]


DIRECTIONS: tuple[Direction, ...] = ("ingress", "egress")


class NamedPodPort(NamedTuple):
    """A container's port by name."""

    name: str
    protocol: int
    port: int


class SharedPolicyKey(NamedTuple):
    """What decides a policy: endpoints with equal keys share one."""

    identity: int
    named_ports: frozenset[NamedPodPort] = frozenset()


ChangedEntries = dict[Key, Entry | None]
"""Entries of one direction by key, None for those that go."""
_NOTHING: Final[Entries] = {}


class Difference(msgspec.Struct, frozen=True):
    """What changed in the policy ``key`` of some endpoints; an entry of None goes.

    ``error`` is why the endpoints stay with the policy they had.
    """

    key: SharedPolicyKey
    endpoints: frozenset[int]
    entries: Mapping[Direction, ChangedEntries]
    enforced: Mapping[Direction, bool]
    revision: int
    error: str = ""


class _Shared:
    """One policy and the endpoints that have it."""

    __slots__ = ("directions", "endpoints", "enforced", "entries", "error", "key", "revision")

    def __init__(self, key: SharedPolicyKey) -> None:
        self.key = key
        self.endpoints: set[int] = set()
        self.directions: dict[Direction, DirectionPolicy] = {}
        self.enforced: Mapping[Direction, bool] = {}
        self.entries: dict[Direction, dict[int, Entries]] = {direction: {} for direction in DIRECTIONS}
        self.revision = 0
        self.error = ""

    @property
    def peers(self) -> Iterator[tuple[Direction, PeerSelector]]:
        return ((direction, peer) for direction, policy in self.directions.items() for peer in policy.peers)

    def replace(self, direction: Direction, identity: int, new: Entries, changed: ChangedEntries) -> None:
        """Make the entries of one identity these, and note what changed."""
        entries = self.entries[direction]
        held = entries.get(identity, _NOTHING)
        if new is held:
            return
        if new:
            entries[identity] = new
        elif held:
            del entries[identity]
        for ports, entry in new.items():
            if held.get(ports) != entry:
                changed[Key(identity, ports)] = entry
        for ports in held:
            if ports not in new:
                changed[Key(identity, ports)] = None

    def set(self, direction: Direction, some: Mapping[int, Entries], without: Iterable[int]) -> None:
        """Make the entries of some identities so; those ``without`` any have none."""
        entries = self.entries[direction]
        entries.update(some)
        for identity in without:
            entries.pop(identity, None)


class _Refill(msgspec.Struct, frozen=True):
    """What changes when one policy of a direction takes the place of another."""

    changed: ChangedEntries
    entries: Mapping[int, Entries]
    """All that the identities concerned have afterwards."""
    without: frozenset[int]
    """Those of them that have none."""


class ComputedPolicies:
    """The policies of endpoints, from a repository of rules and the known identities.

    Every method that changes something returns what it changed, by policy.
    """

    def __init__(
        self,
        repository: Repository,
        cache: SelectorCache,
        proxies: Proxies,
        cluster_ports: Iterable[NamedPodPort] = (),
    ) -> None:
        self._repository = repository
        self._cache = cache
        self._proxies = proxies
        self._cluster_ports = frozenset(cluster_ports)
        self._shared: dict[SharedPolicyKey, _Shared] = {}
        self._of_endpoint: dict[int, _Shared] = {}
        self._using: dict[PeerSelector, set[tuple[_Shared, Direction]]] = {}
        """Who has entries by identity for those of a selector; that for everybody has none."""
        self._alike: dict[object, DirectionPolicy] = {}
        """Directions of policies by all that decides them: pods that the same rules select share theirs."""
        self._refills: dict[tuple[DirectionPolicy, DirectionPolicy | None], _Refill] = {}
        """What the step from one of these to another changes, as long as no identity comes or goes."""
        self._filled: dict[DirectionPolicy, Mapping[int, Entries]] = {}
        """All entries of these by identity, for as long."""
        self._alike_at = -1
        """The revision of the rules that these follow."""
        self._recomputed = 0
        """How often all policies changed for another reason than rules: named ports, proxies, labels."""

    @property
    def cluster_ports(self) -> frozenset[NamedPodPort]:
        """The ports that the cluster's pods have names for."""
        return self._cluster_ports

    def entries(self, endpoint: int) -> dict[tuple[Direction, Key], Entry]:
        """The whole policy of an endpoint."""
        shared = self._of_endpoint[endpoint]
        return {
            (direction, Key(identity, ports)): entry
            for direction, identities in shared.entries.items()
            for identity, entries in identities.items()
            for ports, entry in entries.items()
        }

    def revision(self, endpoint: int) -> int:
        """The revision of the rules that an endpoint's policy was computed from."""
        return self._of_endpoint[endpoint].revision

    def key(self, endpoint: int) -> SharedPolicyKey | None:
        """Which policy an endpoint has, None for an unknown one."""
        shared = self._of_endpoint.get(endpoint)
        return shared.key if shared is not None else None

    def error(self, endpoint: int) -> str:
        """Why an endpoint keeps the policy it had; empty when its rules hold."""
        return self._of_endpoint[endpoint].error

    def enforced(self, endpoint: int) -> Mapping[Direction, bool]:
        """Which directions of an endpoint are enforced."""
        return self._of_endpoint[endpoint].enforced

    def in_force(self) -> list[tuple[int, SharedPolicyKey, int, Mapping[Direction, bool]]]:
        """The endpoints without an error: which policy each has, of what revision, and what it enforces."""
        return [
            (endpoint, shared.key, shared.revision, shared.enforced)
            for endpoint, shared in self._of_endpoint.items()
            if not shared.error
        ]

    def filters(self) -> Iterator[Filter]:
        """What the rules say in every policy that endpoints have."""
        for shared in self._shared.values():
            for policy in shared.directions.values():
                yield from policy.filters

    def direction(self, endpoint: int, direction: Direction) -> DirectionPolicy | None:
        """A direction of an endpoint's policy, None for an unknown endpoint."""
        shared = self._of_endpoint.get(endpoint)
        return shared.directions.get(direction) if shared is not None else None

    def of_key(self, key: SharedPolicyKey, direction: Direction) -> DirectionPolicy | None:
        """A direction of a policy, None for one that no endpoint has."""
        shared = self._shared.get(key)
        return shared.directions.get(direction) if shared is not None else None

    def by_identity(self, endpoint: int, direction: Direction) -> Mapping[int, Entries]:
        """A direction's entries by identity; none for an unknown endpoint."""
        shared = self._of_endpoint.get(endpoint)
        return shared.entries[direction] if shared is not None else {}

    def is_used(self, key: SharedPolicyKey) -> bool:
        """Whether some endpoint has the policy."""
        return key in self._shared

    def assign(self, endpoint: int, key: SharedPolicyKey) -> None:
        """Give an endpoint the policy of its identity, which the selector cache knows.

        A pod more of an identity costs nothing by the entry.
        """
        self.delete_endpoint(endpoint)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(key)
            self._recompute(shared)
        shared.endpoints.add(endpoint)
        self._of_endpoint[endpoint] = shared

    def delete_endpoint(self, endpoint: int) -> None:
        """Forget an endpoint, and its policy with the last that has it."""
        shared = self._of_endpoint.pop(endpoint, None)
        if shared is None:
            return
        shared.endpoints.discard(endpoint)
        if not shared.endpoints:
            del self._shared[shared.key]
            self._release(shared, list(shared.peers))

    def add_identity(self, identity: int, labels: LabelSet) -> list[Difference]:
        """Know an identity: the entries it gets; of one that had other labels also those that go.

        Endpoints of such an identity may be selected by other rules now.
        """
        self._forget_steps()
        relabelled = identity in self._cache.identities
        before = self.remove_identity(identity) if relabelled else []
        found = before + list(self._follow(self._cache.add_identity(identity, labels)))
        if relabelled:
            self._recomputed += 1
            found += [self._recompute(one) for one in self._shared.values() if one.key.identity == identity]
        return found

    def remove_identity(self, identity: int) -> list[Difference]:
        """Forget an identity: the entries that go."""
        self._forget_steps()
        return list(self._follow(self._cache.remove_identity(identity)))

    def follow_rules(self, changed: RulesChanged) -> list[Difference]:
        """Compute anew the policies that a change of rules concerns; every policy gets its revision."""
        return [one for one in self.following(changed) if one is not None]

    def following(self, changed: RulesChanged) -> Iterator[Difference | None]:
        """What follow_rules() does, in steps. Rules and identities may change meanwhile.

        A difference is to be taken in before the next step: later ones build on it.
        """
        for shared in list(self._shared.values()):
            yield None
            if shared.endpoints and self._concerned(shared, changed):
                yield (yield from self._recomputing(shared))
        self._forget_steps()

    def follow_ports(self, cluster_ports: Iterable[NamedPodPort]) -> list[Difference]:
        """The named ports of the cluster's pods are these now: compute anew what refers to ports by name."""
        ports = frozenset(cluster_ports)
        if ports == self._cluster_ports:
            return []
        self._cluster_ports = ports
        self._recomputed += 1
        self._alike.clear()
        self._forget_steps()
        return [self._recompute(shared) for shared in list(self._shared.values()) if _names_ports(shared)]

    def recompute_all(self) -> list[Difference]:
        """Compute every policy anew: proxies came or went, or to be sure."""
        self._recomputed += 1
        self._alike.clear()
        self._forget_steps()
        return [self._recompute(shared) for shared in list(self._shared.values())]

    def _concerned(self, shared: _Shared, changed: RulesChanged) -> bool:
        if shared.error or changed.concerns(self._labels(shared)):
            return True
        shared.revision = changed.revision
        return False

    def _labels(self, shared: _Shared) -> LabelSet:
        return self._cache.identities[shared.key.identity]

    def _follow(self, change: SelectorChange) -> Iterator[Difference]:
        identity = change.identity
        using: set[tuple[_Shared, Direction]] = set()
        if identity in BY_ITSELF:
            using.update(
                (shared, direction) for shared in self._shared.values() for direction in shared.directions
            )
        else:
            using.update(*(self._using.get(selector, ()) for selector in change.selectors))
        changed: dict[_Shared, dict[Direction, ChangedEntries]] = {}
        for shared, direction in using:
            found: ChangedEntries = {}
            shared.replace(direction, identity, shared.directions[direction].of(identity), found)
            if found:
                changed.setdefault(shared, {})[direction] = found
        for shared, entries in changed.items():
            endpoints = frozenset(shared.endpoints)
            yield Difference(shared.key, endpoints, entries, shared.enforced, shared.revision)

    def _recompute(self, shared: _Shared) -> Difference:
        return finish(self._recomputing(shared))

    def _recomputing(self, shared: _Shared) -> Steps[Difference]:
        changed: dict[Direction, ChangedEntries] = {}
        try:
            changed = yield from self._computing(shared)
            shared.error = ""
        except PolicyConflictError as conflict:
            shared.error = str(conflict)
        return Difference(
            shared.key, frozenset(shared.endpoints), changed, shared.enforced, shared.revision, shared.error
        )

    def _computing(self, shared: _Shared) -> Steps[dict[Direction, ChangedEntries]]:
        """Compute a policy whole; what changed. Raises PolicyConflictError; then nothing has.

        If anything it depends on changes between two steps, it begins again.
        """
        while True:
            state = self._repository.revision, self._recomputed
            try:
                directions = yield from self._directions(shared)
            except PolicyConflictError:
                if state == (self._repository.revision, self._recomputed):
                    raise
                continue
            peers = [peer for policy in directions.values() for peer in policy.peers]
            yield from self._use(peers)
            used = self._shared.get(shared.key) is shared
            if used and state == (self._repository.revision, self._recomputed):
                break
            self._stop_using(peers)
            if not used:
                return {}
        released = list(shared.peers)
        before = shared.directions
        shared.directions = directions
        shared.enforced = {direction: one.enforced for direction, one in directions.items()}
        for direction, peer in shared.peers:
            if peer != ALL:
                self._using.setdefault(peer, set()).add((shared, direction))
        changed = {one: self._refill(shared, one, before.get(one)) for one in DIRECTIONS}
        self._release(shared, released)
        shared.revision = self._repository.revision
        return changed

    def _use(self, peers: Iterable[PeerSelector]) -> Steps[None]:
        for number, peer in enumerate(peers):
            if number % STEP == STEP - 1:
                yield
            self._cache.add_selector(peer)

    def _stop_using(self, peers: Iterable[PeerSelector]) -> None:
        for peer in peers:
            self._cache.remove_selector(peer)

    def _directions(self, shared: _Shared) -> Steps[dict[Direction, DirectionPolicy]]:
        labels = self._labels(shared)
        selecting = self._repository.selecting(labels)
        options = self._repository.options
        localhost = options.always_allows_localhost and not labels.has_reserved("host")
        found: dict[Direction, DirectionPolicy] = {}
        for direction in DIRECTIONS:
            revision = self._repository.revision
            if revision != self._alike_at:
                self._alike.clear()
                self._forget_steps()
                self._alike_at = revision
            enforced, rules = self._repository.speaking(labels, direction, selecting)
            here = localhost and direction == "ingress"
            decides = direction, enforced, here, shared.key.named_ports, tuple(map(id, rules))
            policy = self._alike.get(decides)
            if policy is None:
                filters = yield from filters_in_steps(rules, direction, options)
                policy = DirectionPolicy(
                    direction,
                    (),
                    self._cache,
                    enforced=enforced,
                    named_ports=partial(self._ports, shared, direction),
                    proxies=self._proxies,
                    dual_stack=options.dual_stack,
                    localhost=here,
                )
                yield from policy.read(filters.values())
                if revision == self._repository.revision:
                    self._alike[decides] = policy
            found[direction] = policy
        return found

    def _refill(
        self, shared: _Shared, direction: Direction, previous: DirectionPolicy | None
    ) -> ChangedEntries:
        """Make the entries those of the direction's policy; what changed, the same object for all alike."""
        policy = shared.directions[direction]
        if previous is None:
            return self._fill(shared, direction)
        step = self._refills.get((policy, previous))
        if step is not None:
            shared.set(direction, step.entries, step.without)
            return step.changed
        changed: ChangedEntries = {}
        shared.replace(direction, ANYBODY, policy.anybody(), changed)
        identities = policy.identities_since(previous)
        if identities is None:
            identities = policy.identities() | (shared.entries[direction].keys() - {ANYBODY})
        for identity in identities:
            shared.replace(direction, identity, policy.of(identity), changed)
        entries = shared.entries[direction]
        touched = {key.identity for key in changed}
        there = {identity: entries[identity] for identity in touched if identity in entries}
        self._refills[policy, previous] = _Refill(changed, there, frozenset(touched - there.keys()))
        return changed

    def _fill(self, shared: _Shared, direction: Direction) -> ChangedEntries:
        """Give a policy without entries all of its direction; these are what changed.

        What changed is not stored: nearly every policy differs, and would be a thousand objects for the
        garbage collector to visit.
        """
        policy = shared.directions[direction]
        filled = self._filled.get(policy)
        if filled is None:
            found = {ANYBODY: policy.anybody()}
            found |= {identity: policy.of(identity) for identity in policy.identities()}
            filled = {identity: entries for identity, entries in found.items() if entries}
            self._filled[policy] = filled
        shared.entries[direction] = dict(filled)
        return {
            Key(identity, ports): entry
            for identity, entries in filled.items()
            for ports, entry in entries.items()
        }

    def _forget_steps(self) -> None:
        """What policies share. Held for longer, it is released at the cost of the next new identity."""
        self._refills.clear()
        self._filled.clear()

    def _release(self, shared: _Shared, peers: Iterable[tuple[Direction, PeerSelector]]) -> None:
        known_peers = set(shared.peers) if shared.key in self._shared else set()
        for direction, peer in peers:
            self._cache.remove_selector(peer)
            if (direction, peer) not in known_peers:
                using = self._using.get(peer, set())
                using.discard((shared, direction))
                if not using:
                    self._using.pop(peer, None)

    def _ports(self, shared: _Shared, direction: Direction, name: str, protocol: int) -> set[int]:
        ports = shared.key.named_ports
        if direction == "egress":
            ports = ports | self._cluster_ports
        return {one.port for one in ports if one.name == name and one.protocol == protocol}


def _names_ports(shared: _Shared) -> bool:
    return any(filter_.port.name for policy in shared.directions.values() for filter_ in policy.filters)
