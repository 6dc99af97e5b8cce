"""Endpoints' policies by the rules in force: what the policy maps ask for, and what changed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import RESERVED_IDENTITIES
from cells.maps.policy_map import EntryChanges, PolicyEntryMap
from cells.maps.records.endpoints import PolicyEntry
from cells.maps.records.endpoints import PolicyKey as MapKey
from cells.policy import Enforcement
from cells.policy.compute import Entry, Key, Redirect, SelectorPolicy, in_slices
from cells.policy.compute.endpoint_policy import Filter
from cells.policy.compute.map_state import map_entry, map_key
from cells.policy.compute.policies import (
    DIRECTIONS,
    ChangedEntries,
    ComputedPolicies,
    Difference,
    NamedPodPort,
    SharedPolicyKey,
)
from cells.policy.compute.repository import Repository, RulesChanged
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.control.http_redirects import NO_PROXY, DNSProxyPort, HTTPProxyState, HTTPRedirects
from cells.policy.control.objects import PodPorts, RuleSources
from cells.policy.labels import LabelSet, Prefix
from cells.policy.maps import NO_POD, EndpointPolicy, NodePolicy, PodKey
from cells.policy.rules import Direction, PolicyError, PolicyOptions, RuleSource, Unenforced
from cells.policy.rules.peers import Services, World
from lifecycle import Change, HiveError

DNS_EGRESS = "cilium-dns-egress"
"""The name of the DNS proxy's redirects."""

NOTHING: Final = PolicyEntryMap()


class RulePolicy:
    """The rules in force and the policies that follow from them.

    Methods that change something return the rows that changed; the caller hands those to
    EndpointPolicies.
    """

    def __init__(
        self,
        node: NodePolicy,
        options: PolicyOptions,
        services: Services | None = None,
        ports: PodPorts | None = None,
        proxy: DNSProxyPort | None = None,
        requests: HTTPRedirects | None = None,
        sources: RuleSources | None = None,
    ) -> None:
        self._node = node
        self._groups: dict[str, tuple[Prefix, ...]] = {}
        self._services = services
        self._ports = ports
        self._proxy = proxy
        self._requests = requests
        self._sources = sources
        self._pods: dict[int, PodKey] = {}
        """The owner of the endpoints."""
        self._repository = Repository(World(options, {}, services))
        self._cache = SelectorCache()
        self._computed = ComputedPolicies(self._repository, self._cache, self.redirect)
        self._entries: dict[SharedPolicyKey, PolicyEntryMap] = {}
        self._alike: tuple[Mapping[Direction, ChangedEntries], EntryChanges] = {}, EntryChanges({}, ())
        """How a policy changed last, and what that is in any map: nothing that a proxy of its own reads."""
        self._last_changed = NOTHING, self._alike[1], NOTHING
        """The entries of a policy, how they changed last, and what they are since."""
        self._mode = node.revision
        for number, labels in RESERVED_IDENTITIES.items():
            self._cache.add_identity(number, LabelSet.parse(labels))

    @property
    def revision(self) -> int:
        """Of the rules, and of the node's mode."""
        return self._repository.revision

    @property
    def missing(self) -> str:
        """The tables of rules and identities that are not taken in yet."""
        return "" if self._sources is None else self._sources.missing

    def acknowledged(self, endpoint_id: int) -> bool:
        """Whether the proxy has acknowledged all redirects of the endpoint's policy."""
        if self._requests is None:
            return True
        key = self._computed.key(endpoint_id)
        return key is None or self._requests.acknowledged(key.identity)

    @property
    def prefixes(self) -> set[Prefix]:
        """What the rules name outside the cluster: each needs an identity."""
        return self._repository.prefixes()

    @property
    def repository(self) -> Repository:
        """The rules in force; not to be changed."""
        return self._repository

    @property
    def computed(self) -> ComputedPolicies:
        """The policies that follow; not to be changed."""
        return self._computed

    @property
    def http_proxy(self) -> HTTPProxyState:
        """Whether there is a proxy of HTTP, and it follows the rules."""
        if self._requests is None:
            return HTTPProxyState(runs=False, message=NO_PROXY)
        return self._requests.proxy

    def reads_requests(self, source: RuleSource) -> bool:
        """Whether rules in force of the object speak of requests of HTTP."""
        return any(
            ports.above is not None and ports.above.rules is not None and ports.above.rules.http
            for rule in self._repository.rules_of(source)
            for entry in (*rule.ingress, *rule.egress)
            for ports in entry.ports or ()
        )

    @property
    def selector_cache(self) -> SelectorCache:
        """The identities that their selectors select; not to be changed."""
        return self._cache

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """The policy of an endpoint. Raises HiveError where its rules cannot all hold."""
        self._follow_mode()
        known = self._cache.identities.get(identity)
        if known is None:
            for difference in self._computed.add_identity(identity, LabelSet.of(tuple(labels))):
                self._keep(difference)
        self._pods[endpoint_id] = pod
        self._assign(endpoint_id, SharedPolicyKey(identity, self._named_ports(pod)))
        error = self._computed.error(endpoint_id)
        if error:
            raise HiveError(f"the policy of endpoint {endpoint_id} stays as it was: {error}")
        return self._row(endpoint_id)

    def _named_ports(self, pod: PodKey) -> frozenset[NamedPodPort]:
        return self._ports.of(pod) if self._ports is not None and pod != NO_POD else frozenset()

    def _assign(self, endpoint_id: int, key: SharedPolicyKey) -> bool:
        """Give an endpoint the policy of this key; whether it had another."""
        before = self._computed.key(endpoint_id)
        if before == key:
            return False
        self._computed.assign(endpoint_id, key)
        self._drop_unused(before)
        if key not in self._entries:
            whole, latest = self._whole(endpoint_id), next(reversed(self._entries.values()), NOTHING)
            self._entries[key] = latest if latest == whole else whole  # pods are often alike
        return True

    def follow_pods(self, pods: Collection[PodKey]) -> list[EndpointPolicy]:
        """Pods may name other ports now: the policies of their endpoints that change by it."""
        rows = []
        for endpoint_id, pod in self._pods.items():
            key = self._computed.key(endpoint_id) if pod in pods else None
            if key is None or not self._assign(endpoint_id, key._replace(named_ports=self._named_ports(pod))):
                continue
            if not self._computed.error(endpoint_id):
                rows.append(self._row(endpoint_id))
        return rows

    def follow_ports(self, ports: Iterable[NamedPodPort]) -> list[EndpointPolicy]:
        """The cluster's pods name these ports now: the policies that change by it."""
        rows: dict[int, EndpointPolicy] = {}
        self._collect(self._computed.follow_ports(ports), rows)
        return list(rows.values())

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is removed."""
        self._pods.pop(endpoint_id, None)
        key = self._computed.key(endpoint_id)
        self._computed.delete_endpoint(endpoint_id)
        self._drop_unused(key)

    def _drop_unused(self, key: SharedPolicyKey | None) -> None:
        """Forget the map entries of a policy that no endpoint has any more."""
        if key is not None and not self._computed.is_used(key):
            self._entries.pop(key, None)
            if self._requests is not None:
                self._requests.forget(key)

    def apply(self, object_: Mapping[str, Any]) -> list[EndpointPolicy]:
        """Put a policy object in force. Raises PolicyError; then its earlier rules stay."""
        return self._follow(self._repository.apply(object_))

    def put(self, object_: Mapping[str, Any]) -> RulesChanged:
        """The same, but the policies that follow are computed by follow(), for many objects at once."""
        return self._repository.apply(object_)

    def following_sources(self) -> list[RuleSource]:
        """The objects with rules that name CIDR groups or services."""
        return self._repository.followers()

    def unenforced(self, source: RuleSource) -> list[Unenforced]:
        """What of the object is not in force as it is written."""
        return [one for rule in self._repository.rules_of(source) for one in rule.unenforced]

    def delete(self, source: RuleSource) -> list[EndpointPolicy]:
        """Take an object out of force."""
        return self._follow(self._repository.delete(source))

    def remove(self, source: RuleSource) -> RulesChanged:
        """The same, but the policies that follow are computed by follow()."""
        return self._repository.delete(source)

    async def follow(self, changes: Sequence[RulesChanged]) -> list[EndpointPolicy]:
        """The rows of all endpoints after these changes, computed with turns of the loop in between."""
        if not changes:
            return []
        async for difference in in_slices(self._computed.following(RulesChanged.all_of(changes))):
            self._collect([difference], {})
        return self._rows()

    def set_groups(
        self, groups: Mapping[str, tuple[Prefix, ...] | None]
    ) -> tuple[list[EndpointPolicy], dict[RuleSource, PolicyError]]:
        """CIDR groups have these prefixes now, None: is deleted. Returns the objects that cannot follow."""
        for name, prefixes in groups.items():
            if prefixes is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = prefixes
        changed, failed = self._repository.follow(self._world(), groups.keys())
        return self._follow(changed), failed

    def follow_services(self) -> tuple[list[EndpointPolicy], dict[RuleSource, PolicyError]]:
        """Services or their backends have changed; and the objects that cannot follow, with why."""
        world = self._world()
        if self._repository.is_equivalent(world):
            return [], {}
        changed, failed = self._repository.follow(world)
        return self._follow(changed), failed

    def _world(self) -> World:
        return World(self._repository.options, dict(self._groups), self._services)

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """Add identities, or give known ones other labels; the policies that change."""
        rows: dict[int, EndpointPolicy] = {}
        for one in identities:
            self._collect(self._update_identity(one), rows)
        return list(rows.values())

    async def follow_identities(self, changes: Sequence[Change[int, Identity]]) -> list[EndpointPolicy]:
        """Add, relabel and remove identities, with turns of the loop in between; the policies that changed.

        The rows are those in force at the end: rules and other identities may change in between.
        """
        changed: set[int] = set()
        async for difference in in_slices(self._following(changes)):
            self._keep(difference)
            if not difference.error:
                changed |= difference.endpoints
        return self._rows(changed)

    def _following(self, changes: Sequence[Change[int, Identity]]) -> Iterator[Difference | None]:
        """The differences that identities make, added before others are removed."""
        for change in changes:
            if change.row is not None:
                yield from self._update_identity(change.row)
                yield None
        for change in changes:
            if change.deleted:
                yield from self._computed.remove_identity(change.key)
                yield None

    def _update_identity(self, identity: Identity) -> list[Difference]:
        labels = LabelSet.of(identity.labels)
        if self._cache.identities.get(identity.id) == labels:
            return []
        return self._computed.add_identity(identity.id, labels)

    def _follow(self, changed: RulesChanged) -> list[EndpointPolicy]:
        """The rows of all endpoints: those with the same entries have the new revision too."""
        self._collect(self._computed.follow_rules(changed), {})
        return self._rows()

    def _rows(self, endpoints: Collection[int] | None = None) -> list[EndpointPolicy]:
        """The policies in force of these endpoints, or of all."""
        entries = self._entries
        return [
            _policy(endpoint, revision, enforced, entries[key])
            for endpoint, key, revision, enforced in self._computed.in_force()
            if endpoints is None or endpoint in endpoints
        ]

    def _follow_mode(self) -> None:
        """The node's mode may be changed while it runs: then every policy is computed anew."""
        if self._node.revision == self._mode:
            return
        self._mode = self._node.revision
        mode: Enforcement = self._node.enforcement
        options = msgspec.structs.replace(self._repository.options, enable_policy=mode.value)
        self._repository.use(options)
        for difference in self._computed.recompute_all():
            self._keep(difference)

    def _collect(self, differences: Iterable[Difference], rows: dict[int, EndpointPolicy]) -> None:
        for difference in differences:
            self._keep(difference)
            if not difference.error:
                entries = self._entries[difference.key]
                for endpoint in difference.endpoints:
                    rows[endpoint] = _policy(endpoint, difference.revision, difference.enforced, entries)

    def _keep(self, difference: Difference) -> None:
        """The map entries of a policy follow what changed in it."""
        held = self._entries.get(difference.key, NOTHING)
        changes = self._map_changes(difference)
        if changes.new or changes.removed:
            before, by, made = self._last_changed
            if before is not held or by is not changes:  # else policies that were alike, and change alike
                made = held.changed(changes)
                self._last_changed = held, changes, made
            self._entries[difference.key] = made
        else:
            self._entries[difference.key] = held
        redirects = changes is not self._alike[1]
        if self._requests is not None and (redirects or self._requests.serves(difference.key)):
            self._follow_requests(
                difference.key,
                (
                    (direction, key, entry)
                    for direction, one in difference.entries.items()
                    for key, entry in one.items()
                ),
            )

    def _map_changes(self, difference: Difference) -> EntryChanges:
        """As map entries. Policies change alike, most often: then it is the same object for all of them."""
        entries, changes = self._alike
        if difference.entries == entries:
            return changes
        new: dict[MapKey, PolicyEntry] = {}
        removed: list[MapKey] = []
        made: dict[int, PolicyEntry] = {}  # identities share entries
        shared = True
        for direction, changed in difference.entries.items():
            egress = direction == "egress"
            for key, entry in changed.items():
                where = map_key(key, egress=egress)
                if entry is None:
                    removed.append(where)
                elif (known := made.get(id(entry))) is not None:
                    new[where] = known
                else:
                    made[id(entry)] = new[where] = self._map_entry(difference.key, direction, entry)
                    shared &= entry.redirect is None or entry.redirect.filter_peers is None
        changes = EntryChanges(new, removed)
        if shared:  # else the port is one of this policy
            self._alike = difference.entries, changes
        return changes

    def _map_entry(self, key: SharedPolicyKey, direction: Direction, entry: Entry) -> PolicyEntry:
        if self._requests is not None and entry.redirect is not None:
            entry = self._requests.with_port(key, self._cache.identities[key.identity], direction, entry)
        return map_entry(entry)

    def _follow_requests(
        self, key: SharedPolicyKey, changed: Iterable[tuple[Direction, Key, Entry | None]]
    ) -> None:
        if self._requests is not None:
            policies = {one: self._computed.of_key(key, one) for one in DIRECTIONS}
            self._requests.follow(key, self._cache.identities[key.identity], policies, changed)

    def _whole(self, endpoint_id: int) -> PolicyEntryMap:
        computed, policy = self._computed.entries(endpoint_id), self._computed.key(endpoint_id)
        if policy is None:
            return NOTHING
        self._follow_requests(
            policy, ((direction, key, entry) for (direction, key), entry in computed.items())
        )
        return PolicyEntryMap(
            {
                map_key(key, egress=direction == "egress"): self._map_entry(policy, direction, entry)
                for (direction, key), entry in computed.items()
            }
        )

    def redirect(self, filter_: Filter, policy: SelectorPolicy) -> Redirect | None:
        """The DNS proxy or that of HTTP; rules that need another one are refused before they come here."""
        if policy.parser == "http" and self._requests is not None:
            return self._requests.redirect(filter_.direction)
        port = self._proxy.port if self._proxy is not None and policy.parser == "dns" else 0
        return Redirect(port, port, DNS_EGRESS) if port else None

    def _row(self, endpoint_id: int) -> EndpointPolicy:
        computed, key = self._computed, self._computed.key(endpoint_id)
        entries = self._entries[key] if key is not None else NOTHING
        return _policy(endpoint_id, computed.revision(endpoint_id), computed.enforced(endpoint_id), entries)


def _policy(
    endpoint_id: int, revision: int, enforced: Mapping[Direction, bool], entries: PolicyEntryMap
) -> EndpointPolicy:
    return EndpointPolicy(
        endpoint_id=endpoint_id,
        revision=revision,
        ingress_enforced=enforced.get("ingress", False),
        egress_enforced=enforced.get("egress", False),
        entries=entries,
    )
