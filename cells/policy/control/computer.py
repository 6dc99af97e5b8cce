"""Computes endpoints' policies, as entries of policy maps, from the rules in force."""

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
from cells.policy.rules.peers import Services, TranslationContext
from cells.policy.rules.schema import HTTPRule
from lifecycle import Change, HiveError

DNS_EGRESS = "cilium-dns-egress"
"""Name of the redirects to the DNS proxy."""

NOTHING: Final = PolicyEntryMap()


class RulePolicy:
    """The rules in force, and the policies that follow from them.

    Methods that change rules or identities return the policies that change, which the caller passes to
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
        self._http_redirects = requests
        self._sources = sources
        self._pods: dict[int, PodKey] = {}
        """The pods of endpoints."""
        self._repository = Repository(TranslationContext(options, {}, services))
        self._cache = SelectorCache()
        self._computed = ComputedPolicies(self._repository, self._cache, self.redirect)
        self._entries: dict[SharedPolicyKey, PolicyEntryMap] = {}
        self._last_difference: tuple[Mapping[Direction, ChangedEntries], EntryChanges]
        self._last_difference = {}, EntryChanges({}, ())
        """The last difference, and its encoding as map entries; not with redirects to the HTTP proxy."""
        self._last_result = NOTHING, self._last_difference[1], NOTHING
        """The previous entries of a policy, its last change, and the resulting entries."""
        self._mode = node.revision
        for number, labels in RESERVED_IDENTITIES.items():
            self._cache.add_identity(number, LabelSet.parse(labels))

    @property
    def revision(self) -> int:
        """Revision of the rules and of the enforcement mode."""
        return self._repository.revision

    @property
    def missing(self) -> str:
        """The tables of rules and identities that are not read yet."""
        return "" if self._sources is None else self._sources.missing

    def acknowledged(self, endpoint_id: int) -> bool:
        """Whether the HTTP proxy has acknowledged all redirects of the endpoint's policy."""
        if self._http_redirects is None:
            return True
        key = self._computed.key(endpoint_id)
        return key is None or self._http_redirects.acknowledged(key.identity)

    @property
    def prefixes(self) -> set[Prefix]:
        """The prefixes that rules select: each needs an identity."""
        return self._repository.prefixes()

    @property
    def repository(self) -> Repository:
        """The rules in force; read only."""
        return self._repository

    @property
    def computed(self) -> ComputedPolicies:
        """The computed policies; read only."""
        return self._computed

    @property
    def http_proxy(self) -> HTTPProxyState:
        """The state of the HTTP proxy."""
        if self._http_redirects is None:
            return HTTPProxyState(runs=False, message=NO_PROXY)
        return self._http_redirects.proxy

    def http_rules(self, source: RuleSource) -> frozenset[HTTPRule]:
        """The HTTP rules in force of the object."""
        return frozenset(
            request
            for rule in self._repository.rules_of(source)
            for entry in (*rule.ingress, *rule.egress)
            for ports in entry.ports or ()
            if ports.l7 is not None and ports.l7.rules is not None
            for request in ports.l7.rules.http or ()
        )

    @property
    def selector_cache(self) -> SelectorCache:
        """The identities that selectors of rules select; read only."""
        return self._cache

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """Compute the policy of an endpoint. Raises HiveError if its rules contradict each other."""
        self._follow_mode()
        known = self._cache.identities.get(identity)
        if known is None:
            for difference in self._computed.add_identity(identity, LabelSet.of(tuple(labels))):
                self._apply_difference(difference)
        self._pods[endpoint_id] = pod
        self._assign(endpoint_id, SharedPolicyKey(identity, self._named_ports(pod)))
        error = self._computed.error(endpoint_id)
        if error:
            raise HiveError(f"the policy of endpoint {endpoint_id} is unchanged: {error}")
        return self._row(endpoint_id)

    def _named_ports(self, pod: PodKey) -> frozenset[NamedPodPort]:
        return self._ports.of(pod) if self._ports is not None and pod != NO_POD else frozenset()

    def _assign(self, endpoint_id: int, key: SharedPolicyKey) -> bool:
        """Assign the policy of a key to an endpoint. Returns whether it had another one."""
        before = self._computed.key(endpoint_id)
        if before == key:
            return False
        self._computed.assign(endpoint_id, key)
        self._drop_unused(before)
        if key not in self._entries:
            entries = self._all_map_entries(endpoint_id)
            latest = next(reversed(self._entries.values()), NOTHING)
            self._entries[key] = latest if latest == entries else entries  # often equal: share memory
        return True

    def follow_pods(self, pods: Collection[PodKey]) -> list[EndpointPolicy]:
        """Read the named ports of pods again. Returns the policies that change."""
        rows = []
        for endpoint_id, pod in self._pods.items():
            key = self._computed.key(endpoint_id) if pod in pods else None
            if key is None or not self._assign(endpoint_id, key._replace(named_ports=self._named_ports(pod))):
                continue
            if not self._computed.error(endpoint_id):
                rows.append(self._row(endpoint_id))
        return rows

    def follow_ports(self, ports: Iterable[NamedPodPort]) -> list[EndpointPolicy]:
        """Set the named ports of all pods of the cluster. Returns the policies that change."""
        rows: dict[int, EndpointPolicy] = {}
        self._collect(self._computed.follow_ports(ports), rows)
        return list(rows.values())

    def forget(self, endpoint_id: int) -> None:
        """Drop the state of a removed endpoint."""
        self._pods.pop(endpoint_id, None)
        key = self._computed.key(endpoint_id)
        self._computed.delete_endpoint(endpoint_id)
        self._drop_unused(key)

    def _drop_unused(self, key: SharedPolicyKey | None) -> None:
        """Delete the map entries of a policy that no endpoint has."""
        if key is not None and not self._computed.is_used(key):
            self._entries.pop(key, None)
            if self._http_redirects is not None:
                self._http_redirects.forget(key)

    def apply(self, object_: Mapping[str, Any]) -> list[EndpointPolicy]:
        """Add or replace a policy object. Raises PolicyError; then its previous rules stay in force."""
        return self._follow(self._repository.apply(object_))

    def put(self, object_: Mapping[str, Any]) -> RulesChanged:
        """Do apply(), but leave the computation of policies to follow(), for many objects at once."""
        return self._repository.apply(object_)

    def following_sources(self) -> list[RuleSource]:
        """The objects with rules that refer to CIDR groups or services."""
        return self._repository.followers()

    def unenforced(self, source: RuleSource) -> list[Unenforced]:
        """Return the parts of an object that are not enforced as written."""
        return [one for rule in self._repository.rules_of(source) for one in rule.unenforced]

    def delete(self, source: RuleSource) -> list[EndpointPolicy]:
        """Delete a policy object."""
        return self._follow(self._repository.delete(source))

    def remove(self, source: RuleSource) -> RulesChanged:
        """Do delete(), but leave the computation of policies to follow()."""
        return self._repository.delete(source)

    async def follow(self, changes: Sequence[RulesChanged]) -> list[EndpointPolicy]:
        """Compute all policies after changes of rules, yielding to the event loop between slices."""
        if not changes:
            return []
        async for difference in in_slices(self._computed.following(RulesChanged.combined(changes))):
            self._collect([difference], {})
        return self._rows()

    def set_groups(
        self, groups: Mapping[str, tuple[Prefix, ...] | None]
    ) -> tuple[list[EndpointPolicy], dict[RuleSource, PolicyError]]:
        """Set the prefixes of CIDR groups; None deletes a group.

        Returns the policies that change, and the objects that cannot be translated with them.
        """
        for name, prefixes in groups.items():
            if prefixes is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = prefixes
        changed, failed = self._repository.follow(self._context(), groups.keys())
        return self._follow(changed), failed

    def follow_services(self) -> tuple[list[EndpointPolicy], dict[RuleSource, PolicyError]]:
        """Read services and their backends again, for ``toServices``.

        Returns the policies that change, and the objects that cannot be translated with them.
        """
        context = self._context()
        if self._repository.is_equivalent(context):
            return [], {}
        changed, failed = self._repository.follow(context)
        return self._follow(changed), failed

    def _context(self) -> TranslationContext:
        return TranslationContext(self._repository.options, dict(self._groups), self._services)

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """Add identities, or change their labels. Returns the policies that change."""
        rows: dict[int, EndpointPolicy] = {}
        for one in identities:
            self._collect(self._update_identity(one), rows)
        return list(rows.values())

    async def follow_identities(self, changes: Sequence[Change[int, Identity]]) -> list[EndpointPolicy]:
        """Add, relabel and remove identities, yielding to the event loop between slices.

        Returns the changed policies as they are at the end: rules and other identities may change meanwhile.
        """
        changed: set[int] = set()
        async for difference in in_slices(self._following(changes)):
            self._apply_difference(difference)
            if not difference.error:
                changed |= difference.endpoints
        return self._rows(changed)

    def _following(self, changes: Sequence[Change[int, Identity]]) -> Iterator[Difference | None]:
        """Yield the differences of changed identities: additions first, then removals."""
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
        """Compute policies after a change of rules; return those of all endpoints, with the new revision."""
        self._collect(self._computed.follow_rules(changed), {})
        return self._rows()

    def _rows(self, endpoints: Collection[int] | None = None) -> list[EndpointPolicy]:
        """Return the current policies of these endpoints, or of all."""
        entries = self._entries
        return [
            _policy(endpoint, revision, enforced, entries[key])
            for endpoint, key, revision, enforced in self._computed.in_force()
            if endpoints is None or endpoint in endpoints
        ]

    def _follow_mode(self) -> None:
        """Recompute all policies if the enforcement mode of the node was changed."""
        if self._node.revision == self._mode:
            return
        self._mode = self._node.revision
        mode: Enforcement = self._node.enforcement
        options = msgspec.structs.replace(self._repository.options, enable_policy=mode.value)
        self._repository.use(options)
        for difference in self._computed.recompute_all():
            self._apply_difference(difference)

    def _collect(self, differences: Iterable[Difference], rows: dict[int, EndpointPolicy]) -> None:
        for difference in differences:
            self._apply_difference(difference)
            if not difference.error:
                entries = self._entries[difference.key]
                for endpoint in difference.endpoints:
                    rows[endpoint] = _policy(endpoint, difference.revision, difference.enforced, entries)

    def _apply_difference(self, difference: Difference) -> None:
        """Apply a difference to the map entries of its policy."""
        held = self._entries.get(difference.key, NOTHING)
        changes = self._map_changes(difference)
        if changes.new or changes.removed:
            before, previous_changes, result = self._last_result
            if before is not held or previous_changes is not changes:  # else reuse an equal policy's result
                result = held.changed(changes)
                self._last_result = held, changes, result
            self._entries[difference.key] = result
        else:
            self._entries[difference.key] = held
        redirects = changes is not self._last_difference[1]
        if self._http_redirects is not None and (redirects or self._http_redirects.serves(difference.key)):
            self._update_redirects(
                difference.key,
                (
                    (direction, key, entry)
                    for direction, one in difference.entries.items()
                    for key, entry in one.items()
                ),
            )

    def _map_changes(self, difference: Difference) -> EntryChanges:
        """Encode a difference as map entries; return the same object for policies with equal differences."""
        entries, changes = self._last_difference
        if difference.entries == entries:
            return changes
        new: dict[MapKey, PolicyEntry] = {}
        removed: list[MapKey] = []
        encoded: dict[int, PolicyEntry] = {}  # identities share Entry objects
        shared = True
        for direction, changed in difference.entries.items():
            egress = direction == "egress"
            for key, entry in changed.items():
                where = map_key(key, egress=egress)
                if entry is None:
                    removed.append(where)
                elif (known := encoded.get(id(entry))) is not None:
                    new[where] = known
                else:
                    encoded[id(entry)] = new[where] = self._map_entry(difference.key, direction, entry)
                    shared &= entry.redirect is None or entry.redirect.filter_peers is None
        changes = EntryChanges(new, removed)
        if shared:  # else an entry has a proxy port of this policy only
            self._last_difference = difference.entries, changes
        return changes

    def _map_entry(self, key: SharedPolicyKey, direction: Direction, entry: Entry) -> PolicyEntry:
        if self._http_redirects is not None and entry.redirect is not None:
            entry = self._http_redirects.with_port(
                key, self._cache.identities[key.identity], direction, entry
            )
        return map_entry(entry)

    def _update_redirects(
        self, key: SharedPolicyKey, changed: Iterable[tuple[Direction, Key, Entry | None]]
    ) -> None:
        if self._http_redirects is not None:
            policies = {one: self._computed.of_key(key, one) for one in DIRECTIONS}
            self._http_redirects.follow(key, self._cache.identities[key.identity], policies, changed)

    def _all_map_entries(self, endpoint_id: int) -> PolicyEntryMap:
        computed, policy = self._computed.entries(endpoint_id), self._computed.key(endpoint_id)
        if policy is None:
            return NOTHING
        self._update_redirects(
            policy, ((direction, key, entry) for (direction, key), entry in computed.items())
        )
        return PolicyEntryMap(
            {
                map_key(key, egress=direction == "egress"): self._map_entry(policy, direction, entry)
                for (direction, key), entry in computed.items()
            }
        )

    def redirect(self, filter_: Filter, policy: SelectorPolicy) -> Redirect | None:
        """Return the redirect to the DNS or HTTP proxy. Rules for other proxies are rejected earlier."""
        if policy.parser == "http" and self._http_redirects is not None:
            return self._http_redirects.redirect(filter_.direction)
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
