"""The policies of a node's endpoints, updated incrementally.

Endpoints with the same identity and the same named ports share one policy. Adding or removing an identity
changes only its own entries, in policies with a selector that selects it. Changes are returned as
differences, which the policy controller writes to tables and from there to policy maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from cells.policy.compute import STEP, Entry, Key, PolicyConflictError, Steps, finish
from cells.policy.compute.endpoint_policy import (
    IMPLICIT_IDENTITIES,
    DirectionPolicy,
    Filter,
    Proxies,
    filters_in_steps,
)
from cells.policy.compute.map_state import ANY_IDENTITY, Entries
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
    """A named port of a container."""

    name: str
    protocol: int
    port: int


class SharedPolicyKey(NamedTuple):
    """The key of a shared policy: endpoints with equal keys have the same policy."""

    identity: int
    named_ports: frozenset[NamedPodPort] = frozenset()


ChangedEntries = dict[Key, Entry | None]
"""Changed entries of one direction by key; None for removed entries."""
_NO_ENTRIES: Final[Entries] = {}


class Difference(msgspec.Struct, frozen=True):
    """Changed entries in a policy that ``endpoints`` share.

    If ``error`` is set, the endpoints keep their previous policy because of it.
    """

    key: SharedPolicyKey
    endpoints: frozenset[int]
    entries: Mapping[Direction, ChangedEntries]
    enforced: Mapping[Direction, bool]
    revision: int
    error: str = ""


class _Shared:
    """One policy and the endpoints that share it."""

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
        """Replace the entries of one identity, and add the differences to ``changed``."""
        entries = self.entries[direction]
        held = entries.get(identity, _NO_ENTRIES)
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

    def set(self, direction: Direction, some: Mapping[int, Entries], emptied: Iterable[int]) -> None:
        """Set the entries of some identities, and remove those of ``emptied``."""
        entries = self.entries[direction]
        entries.update(some)
        for identity in emptied:
            entries.pop(identity, None)


class _Replacement(msgspec.Struct, frozen=True):
    """The effect of replacing one policy of a direction with another."""

    changed: ChangedEntries
    entries: Mapping[int, Entries]
    """All entries of the affected identities afterwards."""
    emptied: frozenset[int]
    """The affected identities without entries afterwards."""


class ComputedPolicies:
    """The policies of endpoints, computed from the repository's rules and the known identities.

    Methods that change policies return the differences, one per policy.
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
        self._by_endpoint: dict[int, _Shared] = {}
        self._users: dict[PeerSelector, set[tuple[_Shared, Direction]]] = {}
        """Policies with entries that depend on a selector's identities; not those of the wildcard."""
        self._direction_policies: dict[object, DirectionPolicy] = {}
        """Directions of policies by their inputs: identities selected by the same rules share them."""
        self._replacements: dict[tuple[DirectionPolicy, DirectionPolicy | None], _Replacement] = {}
        """The effects of replacing one policy by another, until an identity is added or removed."""
        self._all_entries: dict[DirectionPolicy, Mapping[int, Entries]] = {}
        """All entries of a direction's policy by identity, until an identity is added or removed."""
        self._cached_revision = -1
        """The revision of the rules that ``_direction_policies`` were computed from."""
        self._invalidations = 0
        """Counts recomputations for reasons other than rules: named ports, proxies, labels of an identity."""

    @property
    def cluster_ports(self) -> frozenset[NamedPodPort]:
        """The named ports of the cluster's pods."""
        return self._cluster_ports

    def entries(self, endpoint: int) -> dict[tuple[Direction, Key], Entry]:
        """Return all entries of an endpoint's policy."""
        shared = self._by_endpoint[endpoint]
        return {
            (direction, Key(identity, ports)): entry
            for direction, identities in shared.entries.items()
            for identity, entries in identities.items()
            for ports, entry in entries.items()
        }

    def revision(self, endpoint: int) -> int:
        """Return the revision of the rules that an endpoint's policy was computed from."""
        return self._by_endpoint[endpoint].revision

    def key(self, endpoint: int) -> SharedPolicyKey | None:
        """Return the key of an endpoint's policy, or None for an unknown endpoint."""
        shared = self._by_endpoint.get(endpoint)
        return shared.key if shared is not None else None

    def error(self, endpoint: int) -> str:
        """Return the reason why an endpoint keeps its previous policy; empty if its policy is current."""
        return self._by_endpoint[endpoint].error

    def enforced(self, endpoint: int) -> Mapping[Direction, bool]:
        """Return whether policy is enforced, per direction of an endpoint."""
        return self._by_endpoint[endpoint].enforced

    def in_force(self) -> list[tuple[int, SharedPolicyKey, int, Mapping[Direction, bool]]]:
        """Return endpoint id, policy key, revision and enforcement of the endpoints without an error."""
        return [
            (endpoint, shared.key, shared.revision, shared.enforced)
            for endpoint, shared in self._by_endpoint.items()
            if not shared.error
        ]

    def filters(self) -> Iterator[Filter]:
        """Yield the filters of all policies."""
        for shared in self._shared.values():
            for policy in shared.directions.values():
                yield from policy.filters

    def direction(self, endpoint: int, direction: Direction) -> DirectionPolicy | None:
        """Return one direction of an endpoint's policy, or None for an unknown endpoint."""
        shared = self._by_endpoint.get(endpoint)
        return shared.directions.get(direction) if shared is not None else None

    def of_key(self, key: SharedPolicyKey, direction: Direction) -> DirectionPolicy | None:
        """Return one direction of a policy by its key, or None if no endpoint has it."""
        shared = self._shared.get(key)
        return shared.directions.get(direction) if shared is not None else None

    def by_identity(self, endpoint: int, direction: Direction) -> Mapping[int, Entries]:
        """Return one direction's entries by identity; empty for an unknown endpoint."""
        shared = self._by_endpoint.get(endpoint)
        return shared.entries[direction] if shared is not None else {}

    def is_used(self, key: SharedPolicyKey) -> bool:
        """Whether some endpoint has the policy."""
        return key in self._shared

    def assign(self, endpoint: int, key: SharedPolicyKey) -> None:
        """Assign an endpoint the policy of its identity, which the selector cache must contain.

        Another endpoint of an identity costs constant time.
        """
        self.delete_endpoint(endpoint)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(key)
            self._recompute(shared)
        shared.endpoints.add(endpoint)
        self._by_endpoint[endpoint] = shared

    def delete_endpoint(self, endpoint: int) -> None:
        """Remove an endpoint, and its policy with the last endpoint that shares it."""
        shared = self._by_endpoint.pop(endpoint, None)
        if shared is None:
            return
        shared.endpoints.discard(endpoint)
        if not shared.endpoints:
            del self._shared[shared.key]
            self._release(shared, list(shared.peers))

    def add_identity(self, identity: int, labels: LabelSet) -> list[Difference]:
        """Add an identity, or replace its labels; return the differences.

        If an identity's labels change, other rules may select its endpoints, so their policies are
        recomputed.
        """
        self._clear_caches()
        relabelled = identity in self._cache.identities
        before = self.remove_identity(identity) if relabelled else []
        found = before + list(self._follow(self._cache.add_identity(identity, labels)))
        if relabelled:
            self._invalidations += 1
            found += [self._recompute(one) for one in self._shared.values() if one.key.identity == identity]
        return found

    def remove_identity(self, identity: int) -> list[Difference]:
        """Remove an identity; return the differences."""
        self._clear_caches()
        return list(self._follow(self._cache.remove_identity(identity)))

    def follow_rules(self, changed: RulesChanged) -> list[Difference]:
        """Recompute the policies that changed rules affect; every other policy gets their revision."""
        return [one for one in self.following(changed) if one is not None]

    def following(self, changed: RulesChanged) -> Iterator[Difference | None]:
        """Do follow_rules() in steps. Rules and identities may change between steps.

        Apply each difference before the next step, because later differences build on it.
        """
        for shared in list(self._shared.values()):
            yield None
            if shared.endpoints and self._is_affected(shared, changed):
                yield (yield from self._recomputing(shared))
        self._clear_caches()

    def follow_ports(self, cluster_ports: Iterable[NamedPodPort]) -> list[Difference]:
        """Replace the cluster's named ports; recompute policies that name ports."""
        ports = frozenset(cluster_ports)
        if ports == self._cluster_ports:
            return []
        self._cluster_ports = ports
        self._invalidations += 1
        self._direction_policies.clear()
        self._clear_caches()
        return [self._recompute(shared) for shared in list(self._shared.values()) if _has_named_ports(shared)]

    def recompute_all(self) -> list[Difference]:
        """Recompute every policy, after a change of proxies or as a full reconciliation."""
        self._invalidations += 1
        self._direction_policies.clear()
        self._clear_caches()
        return [self._recompute(shared) for shared in list(self._shared.values())]

    def _is_affected(self, shared: _Shared, changed: RulesChanged) -> bool:
        if shared.error or changed.concerns(self._labels(shared)):
            return True
        shared.revision = changed.revision
        return False

    def _labels(self, shared: _Shared) -> LabelSet:
        return self._cache.identities[shared.key.identity]

    def _follow(self, change: SelectorChange) -> Iterator[Difference]:
        identity = change.identity
        affected: set[tuple[_Shared, Direction]] = set()
        if identity in IMPLICIT_IDENTITIES:
            affected.update(
                (shared, direction) for shared in self._shared.values() for direction in shared.directions
            )
        else:
            affected.update(*(self._users.get(selector, ()) for selector in change.selectors))
        changed: dict[_Shared, dict[Direction, ChangedEntries]] = {}
        for shared, direction in affected:
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
        """Compute a policy and return its differences.

        Raises PolicyConflictError and leaves the policy unchanged. Restarts if its inputs changed between two
        steps.
        """
        while True:
            state = self._repository.revision, self._invalidations
            try:
                directions = yield from self._directions(shared)
            except PolicyConflictError:
                if state == (self._repository.revision, self._invalidations):
                    raise
                continue
            peers = [peer for policy in directions.values() for peer in policy.peers]
            yield from self._use(peers)
            used = self._shared.get(shared.key) is shared
            if used and state == (self._repository.revision, self._invalidations):
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
                self._users.setdefault(peer, set()).add((shared, direction))
        changed = {one: self._apply_policy(shared, one, before.get(one)) for one in DIRECTIONS}
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
            if revision != self._cached_revision:
                self._direction_policies.clear()
                self._clear_caches()
                self._cached_revision = revision
            enforced, rules = self._repository.direction_rules(labels, direction, selecting)
            allows_localhost = localhost and direction == "ingress"
            inputs = direction, enforced, allows_localhost, shared.key.named_ports, tuple(map(id, rules))
            policy = self._direction_policies.get(inputs)
            if policy is None:
                filters = yield from filters_in_steps(rules, direction, options)
                policy = DirectionPolicy(
                    direction,
                    (),
                    self._cache,
                    enforced=enforced,
                    named_ports=partial(self._port_numbers, shared, direction),
                    proxies=self._proxies,
                    dual_stack=options.dual_stack,
                    localhost=allows_localhost,
                )
                yield from policy.set_filters(filters.values())
                if revision == self._repository.revision:
                    self._direction_policies[inputs] = policy
            found[direction] = policy
        return found

    def _apply_policy(
        self, shared: _Shared, direction: Direction, previous: DirectionPolicy | None
    ) -> ChangedEntries:
        """Update the entries to those of the direction's policy; return the differences.

        The same object is returned for every policy with the same replacement.
        """
        policy = shared.directions[direction]
        if previous is None:
            return self._set_all_entries(shared, direction)
        known = self._replacements.get((policy, previous))
        if known is not None:
            shared.set(direction, known.entries, known.emptied)
            return known.changed
        changed: ChangedEntries = {}
        shared.replace(direction, ANY_IDENTITY, policy.wildcard_entries(), changed)
        identities = policy.identities_since(previous)
        if identities is None:
            identities = policy.identities() | (shared.entries[direction].keys() - {ANY_IDENTITY})
        for identity in identities:
            shared.replace(direction, identity, policy.of(identity), changed)
        entries = shared.entries[direction]
        touched = {key.identity for key in changed}
        present = {identity: entries[identity] for identity in touched if identity in entries}
        self._replacements[policy, previous] = _Replacement(
            changed, present, frozenset(touched - present.keys())
        )
        return changed

    def _set_all_entries(self, shared: _Shared, direction: Direction) -> ChangedEntries:
        """Set all entries of a direction that had none; return them as differences.

        The differences are not cached: almost every policy has others, so caching would leave thousands of
        objects for the garbage collector to traverse.
        """
        policy = shared.directions[direction]
        filled = self._all_entries.get(policy)
        if filled is None:
            found = {ANY_IDENTITY: policy.wildcard_entries()}
            found |= {identity: policy.of(identity) for identity in policy.identities()}
            filled = {identity: entries for identity, entries in found.items() if entries}
            self._all_entries[policy] = filled
        shared.entries[direction] = dict(filled)
        return {
            Key(identity, ports): entry
            for identity, entries in filled.items()
            for ports, entry in entries.items()
        }

    def _clear_caches(self) -> None:
        """Clear what policies share.

        Cached for longer, the entries would be released when the next identity is added, and delay it.
        """
        self._replacements.clear()
        self._all_entries.clear()

    def _release(self, shared: _Shared, peers: Iterable[tuple[Direction, PeerSelector]]) -> None:
        known_peers = set(shared.peers) if shared.key in self._shared else set()
        for direction, peer in peers:
            self._cache.remove_selector(peer)
            if (direction, peer) not in known_peers:
                affected = self._users.get(peer, set())
                affected.discard((shared, direction))
                if not affected:
                    self._users.pop(peer, None)

    def _port_numbers(self, shared: _Shared, direction: Direction, name: str, protocol: int) -> set[int]:
        ports = shared.key.named_ports
        if direction == "egress":
            ports = ports | self._cluster_ports
        return {one.port for one in ports if one.name == name and one.protocol == protocol}


def _has_named_ports(shared: _Shared) -> bool:
    return any(filter_.port.name for policy in shared.directions.values() for filter_ in policy.filters)
