"""Identities for the addresses of DNS names and for prefixes that rules select.

Controller: reads names and addresses from DNS answers; updates EndpointPolicies, claims addresses in the
            ipcache.
Why:        ``toFQDNs`` selects addresses in DNS answers. Policy maps get the identity of an address before
            the ipcache assigns it to packets, and the client receives its answer after both.
Source:     Cilium 1.17, the name manager; labels ``fqdn:`` of local identities.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import ip_network
from typing import Final

import anyio
import msgspec

from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source, prefix_of
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import ipcache_key, ipcache_prefix
from cells.maps.target import Codec, MapTable, MapTarget
from cells.policy.compute import SelectorPolicy
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.control.computer import RulePolicy
from cells.policy.labels import (
    FQDNSelector,
    LabelSet,
    Prefix,
    PrefixSet,
    address_labels,
    canonical_name,
    dns_pattern,
    network_labels,
    prefix_labels,
)
from cells.policy.maps import EndpointPolicies
from cells.policy.rules import PolicyOptions
from cells.policy.selectors import ALL
from lifecycle import Jobs, Lifecycle, Logger, Table, Tables, minutes
from lifecycle.tables import Initializer

RESOURCE: Final = "policy//names"
"""Owner of the claims of addresses in the ipcache."""


class NamedAddresses:
    """Addresses of DNS names, and identities for those that rules select.

    Counts learn() per name and address, so each needs a forget(). Only begin(), wait_written() and
    wait_all_written() wait.
    """

    def __init__(
        self,
        identities: Identities,
        policy: RulePolicy,
        policies: EndpointPolicies,
        ipcache: Ipcache,
        options: PolicyOptions,
        *,
        jobs: Jobs,
    ) -> None:
        self._identities = identities
        self._policy = policy
        self._policies = policies
        self._ipcache = ipcache
        self._dual_stack = options.dual_stack
        self._names: dict[IPAddress, dict[str, int]] = {}
        """Number of learn() calls per name, by address."""
        self._sources = 0
        """Number of sources that have not yet restored the names of the previous run."""
        self._pending = False
        """Whether rules are read but not yet applied to the addresses."""
        self._selectors: frozenset[FQDNSelector] = frozenset()
        self._matching: dict[str, tuple[FQDNSelector, ...]] = {}
        """Selectors by name; a cache that is cleared when selectors change."""
        self._prefixes = PrefixSet()
        self._claimed: dict[IPAddress, tuple[LabelSet, Identity]] = {}
        self._stale: dict[IPAddress, None] = {}
        """Addresses with an identity that must be added, changed or removed."""
        self._changed = anyio.Event()
        self._update_soon = jobs.timer("update stale addresses", self._update_stale, math.inf).trigger

    @property
    def selectors(self) -> Collection[FQDNSelector]:
        """The FQDN selectors of the rules in force."""
        return self._selectors

    def addresses(self, name: str) -> list[IPAddress]:
        """The addresses of a name in canonical form."""
        return [address for address, names in self._names.items() if name in names]

    def names(self, address: IPAddress) -> Collection[str]:
        """The names of an address, in canonical form."""
        return self._names.get(address, {}).keys()

    def learn(self, name: str, addresses: Iterable[IPAddress]) -> None:
        """Add addresses of a name in canonical form, from a DNS answer."""
        for address in addresses:
            names = self._names.setdefault(address, {})
            known = name in names
            names[name] = names.get(name, 0) + 1
            if not known and self._selectors_of(name):
                self._stale[address] = None
        if self._stale:
            self._update_soon()

    def claims(self) -> Initializer:
        """Register an ipcache initializer, in a constructor; call done() when addresses are claimed."""
        return self._ipcache.table.initializer("addresses of names")

    def source(self) -> Callable[[], None]:
        """Register a source of restored names, in a constructor; it calls the result when it is finished."""
        self._sources += 1

        def done() -> None:
            self._sources -= 1
            self._notify()

        return done

    async def begin(self) -> None:
        """Wait, once rules are read, until all sources have restored their names; then follow_rules()."""
        self._pending = True
        while self._sources:
            await self._changed.wait()

    def stale(self, addresses: Iterable[IPAddress]) -> bool:
        """Whether the identity of one of these addresses is out of date."""
        if self._pending and any(address in self._names for address in addresses):
            return True
        return bool(self._stale) and any(address in self._stale for address in addresses)

    def forget(self, name: str, addresses: Iterable[IPAddress]) -> None:
        """Remove addresses of a name that the source added before."""
        for address in addresses:
            names = self._names.get(address, {})
            names[name] = names.get(name, 0) - 1
            if names[name] <= 0:
                del names[name]
                if address in self._claimed:
                    self._stale[address] = None
            if not names:
                self._names.pop(address, None)
        if self._stale:
            self._update_soon()

    async def wait_written(self, addresses: Collection[IPAddress]) -> None:
        """Wait until these addresses have their identities in policy maps and ipcache."""
        while self.stale(addresses):
            await self._changed.wait()

    @property
    def selectors_changed(self) -> bool:
        """Whether FQDN selectors have changed since follow_rules()."""
        return frozenset(self._policy.repository.name_selectors) != self._selectors

    async def wait_all_written(self) -> None:
        """Wait until the identities of all addresses are up to date."""
        while self._stale:
            await self._changed.wait()

    def follow_rules(self, claimed: Collection[Prefix], withdrawn: Collection[Prefix]) -> None:
        """Update addresses after a change of rules, which claimed and withdrew prefixes.

        An address that is also a selected prefix keeps the identity with the labels of both.
        """
        if self._pending:
            self._pending = False
            self._notify()
        selectors = frozenset(self._policy.repository.name_selectors)
        if selectors == self._selectors and not claimed and not withdrawn:
            return
        if selectors != self._selectors:
            self._selectors = selectors
            self._matching.clear()
        if claimed or withdrawn:
            self._prefixes = PrefixSet(self._policy.prefixes)
        again = [prefix.network_address for prefix in claimed if prefix.num_addresses == 1]
        self._ipcache.upsert(
            *(self._claim(one, self._claimed[one][1].id) for one in again if one in self._claimed)
        )
        for address in self._names.keys() | self._claimed.keys():
            if self._desired_labels(address) != (
                self._claimed[address][0] if address in self._claimed else None
            ):
                self._stale[address] = None
        if self._stale:
            self._update_soon()

    def _selectors_of(self, name: str) -> tuple[FQDNSelector, ...]:
        found = self._matching.get(name)
        if found is None:
            found = tuple(one for one in self._selectors if one.matches_name(name))
            self._matching[name] = found
        return found

    def _desired_labels(self, address: IPAddress) -> LabelSet | None:
        """Return the labels of an address, from its names; None if no rule selects them."""
        selecting = {one for name in self._names.get(address, ()) for one in self._selectors_of(name)}
        if not selecting:
            return None
        around = self._prefixes.nearest(address)
        return address_labels(
            ip_network(address), selecting, () if around is None else (around,), dual_stack=self._dual_stack
        )

    async def _update_stale(self) -> None:
        """Update the identities of stale addresses. Raises OSError, PolicyMapError; the job retries."""
        while self._stale:
            wanted = {address: self._desired_labels(address) for address in self._stale}
            acquired: dict[IPAddress, tuple[LabelSet, Identity]] = {}
            try:
                for address, labels in wanted.items():
                    if labels is not None:
                        found = await self._identities.acquire(tuple(sorted(map(str, labels))))
                        acquired[address] = labels, found
                rows = self._policy.update_identities(identity for _, identity in acquired.values())
                await self._policies.change_and_wait(rows, "addresses of names changed")
                self._ipcache.upsert(
                    *(self._claim(one, identity.id) for one, (_, identity) in acquired.items())
                )
            except BaseException:
                for _, identity in acquired.values():
                    self._identities.release(identity.id)
                raise
            removed = [one for one, labels in wanted.items() if labels is None and one in self._claimed]
            previous = [self._claimed.pop(one)[1] for one in (*removed, *acquired) if one in self._claimed]
            self._claimed |= acquired
            self._ipcache.withdraw(RESOURCE, map(prefix_of, removed))
            for identity in previous:
                self._identities.release(identity.id)
            for address, labels in wanted.items():
                if self._desired_labels(address) == labels:
                    self._stale.pop(address, None)
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    @staticmethod
    def _claim(address: IPAddress, identity: int) -> IpcacheEntry:
        return IpcacheEntry(
            prefix=prefix_of(address), identity=identity, source=Source.GENERATED, resource=RESOURCE
        )


# Prefixes that rules select, and their identities.
#
# Packets of a pod carry the pod's identity, never that of a prefix. If prefixes also select pods
# (policy-cidr-match-mode=pods), each prefix has a second identity, with the CIDR label only. The datapath
# looks it up in policy maps in addition to the pod's identity.

PREFIXES: Final = "policy//prefixes"
"""Owner of the claims of prefixes in the ipcache."""
SWEEP_INTERVAL: Final = minutes(1)
_IDENTITY_CODEC: Final = Codec[int](struct.Struct("<I").pack, lambda data: int.from_bytes(data, "little"))


class PodNetwork(msgspec.Struct, frozen=True):
    """A row of the table ``policy-prefixes`` and of its BPF map: a prefix that selects pods."""

    prefix: str
    identity: int
    """The identity with only the CIDR label of the prefix."""


class PodNetworks:
    """The prefixes that select pods; none unless ``policy-cidr-match-mode`` contains ``pods``."""

    def __init__(
        self,
        options: PolicyOptions,
        identities: Identities,
        maps: Maps | None,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._identities = identities
        self._rows: MapTable[str, PodNetwork, int] | None = None
        self._table = Table[str, PodNetwork]("policy-prefixes", key=lambda row: row.prefix)
        self._initial = self._table.initializer("policies")
        if not options.cidr_matches_pods or maps is None:
            return
        maps.use("policy_prefixes")
        target = MapTarget[str, PodNetwork, int](
            lambda: (maps.policy_prefixes,),
            Codec(ipcache_key, ipcache_prefix),
            _IDENTITY_CODEC,
            lambda row: row.identity,
        )
        self._rows = MapTable(self._table, target, log, every=SWEEP_INTERVAL)
        tables.add(self._table)
        self._rows.register("the networks of policies", lifecycle=lifecycle, jobs=jobs, tables=tables)

    @property
    def matched(self) -> bool:
        """Whether prefixes select pods."""
        return self._rows is not None

    def around(self, address: IPAddress) -> Identity | None:
        """The identity of the longest prefix that contains an address. Raises OSError, NotStartedError."""
        number = self._rows.lookup(prefix_of(address)) if self._rows is not None else None
        return self._identities.get(number) if number is not None else None

    def write(self, numbers: Mapping[Prefix, int | None]) -> None:
        """Set the identities of prefixes that select pods; None removes a prefix. Raises OSError."""
        if self._rows is not None:
            self._rows.write(
                {
                    str(prefix): PodNetwork(str(prefix), number) if number is not None else None
                    for prefix, number in numbers.items()
                }
            )

    def claimed(self) -> None:
        """Mark the initial prefixes as written, so that other entries of the map may be deleted."""
        self._initial.done()


class PolicyPrefixes:
    """The identities of prefixes that rules select, and their claims in the ipcache."""

    def __init__(
        self, identities: Identities, ipcache: Ipcache, pods: PodNetworks, options: PolicyOptions
    ) -> None:
        self._identities = identities
        self._ipcache = ipcache
        self._pods = pods
        self._dual_stack = options.dual_stack
        self._prefixes: dict[Prefix, Identity] = {}
        """Identities of prefixes outside. Prefixes of length 0 have none: their packets have the world's."""
        self._networks: dict[Prefix, Identity] = {}
        """Identities of prefixes around pods, see PodNetworks."""
        self._claimed: set[Prefix] = set()
        self._initial = ipcache.table.initializer("policies")

    def claims(self) -> Callable[[], None]:
        """Return a callable that marks all initial prefixes as claimed."""

        def done() -> None:
            self._initial.done()
            self._pods.claimed()

        return done

    def difference(self, wanted: Collection[Prefix]) -> tuple[list[Prefix], list[Prefix]]:
        """Return the wanted prefixes that are not claimed, and the claimed ones that are not wanted."""
        new = [one for one in wanted if one not in self._claimed and (one.prefixlen or self._pods.matched)]
        return new, [one for one in {**self._prefixes, **self._networks} if one not in wanted]

    async def acquire(self, prefixes: Iterable[Prefix]) -> list[Identity]:
        """Acquire the identities of prefixes, until release(). Raises NoIdentityError."""
        found = []
        for prefix in prefixes:
            if prefix.prefixlen:
                if prefix not in self._prefixes:
                    labels = prefix_labels(prefix, dual_stack=self._dual_stack)
                    self._prefixes[prefix] = await self._identities.acquire(_texts(labels))
                found.append(self._prefixes[prefix])
            if self._pods.matched:
                if prefix not in self._networks:
                    self._networks[prefix] = await self._identities.acquire(_texts(network_labels(prefix)))
                found.append(self._networks[prefix])
        return found

    def claim(self, prefixes: Collection[Prefix]) -> None:
        """Claim prefixes in the ipcache, so that packets carry their identities. Raises OSError."""
        self._ipcache.upsert(
            *(
                IpcacheEntry(
                    prefix=str(one),
                    identity=self._prefixes[one].id,
                    source=Source.GENERATED,
                    resource=PREFIXES,
                )
                for one in prefixes
                if one in self._prefixes
            )
        )
        self._pods.write({one: self._networks[one].id for one in prefixes if one in self._networks})
        self._claimed.update(prefixes)

    def withdraw(self, prefixes: Collection[Prefix]) -> None:
        """Withdraw the claims of prefixes. Raises OSError."""
        self._pods.write(dict.fromkeys(one for one in prefixes if one in self._networks))
        self._ipcache.withdraw(PREFIXES, [str(one) for one in prefixes if one in self._prefixes])

    def release(self, prefixes: Iterable[Prefix]) -> None:
        """Release the identities of withdrawn prefixes."""
        for prefix in prefixes:
            self._claimed.discard(prefix)
            for held in (self._prefixes, self._networks):
                if (identity := held.pop(prefix, None)) is not None:
                    self._identities.release(identity.id)


def _texts(labels: LabelSet) -> tuple[str, ...]:
    return tuple(sorted(map(str, labels)))


# The DNS names that an endpoint may query.
#
# Source: Cilium 1.17, DNS rules of policies by port and peer.


class NameFilter(msgspec.Struct, frozen=True):
    """DNS names that may be queried; ``patterns`` as in ``matchPattern``."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        """Whether a name in canonical form may be queried."""
        return name in self.names or any(name_matches(one, name) for one in self.patterns)


EVERYTHING: Final = NameFilter(patterns=("*",))


class NameRules:
    """The DNS filters of endpoints, cached until an endpoint's rules change."""

    def __init__(self, policy: RulePolicy) -> None:
        self._policy = policy
        self._cache: dict[int, tuple[DirectionPolicy, dict[tuple[int, int, int], NameFilter]]] = {}

    def changed(self, endpoint_id: int) -> bool:
        """Whether the endpoint's rules have changed since its last filter."""
        known, now = self._cache.get(endpoint_id), self._policy.computed.direction(endpoint_id, "egress")
        return now is not None and (known is None or known[0] is not now)

    def of(self, endpoint_id: int, identity: int, protocol: int, port: int) -> NameFilter | None:
        """Return the names that an endpoint may query at a server identity; None without a policy."""
        policy = self._policy.computed.direction(endpoint_id, "egress")
        if policy is None:
            return None
        known = self._cache.get(endpoint_id)
        if known is None or known[0] is not policy:
            known = self._cache[endpoint_id] = policy, {}
        found = known[1].get((identity, protocol, port))
        if found is None:
            found = self._filter(policy, identity, protocol, port)
            known[1][identity, protocol, port] = found
        return found

    def forget(self, endpoint_id: int) -> None:
        """Drop the filters of a removed endpoint."""
        self._cache.pop(endpoint_id, None)

    def _filter(self, policy: DirectionPolicy, identity: int, protocol: int, port: int) -> NameFilter:
        if not policy.enforced:
            return EVERYTHING
        selecting = self._policy.selector_cache.selecting(identity)
        filters = [
            selector_policy
            for filter_ in policy.filters
            if any(
                key.bits and key.protocol == protocol and (key.port ^ port) >> (16 - key.bits) == 0
                for key in policy.port_keys(filter_.port)
            )
            for peer, selector_policy in filter_.selectors.items()
            if (peer == ALL or peer in selecting) and not selector_policy.deny
        ]
        return _merged_filter(filters) if filters else NameFilter()


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern of rules matches a name in canonical form. Raises re.error if it is invalid."""
    return dns_pattern(pattern).fullmatch(name) is not None


def _merged_filter(filters: Iterable[SelectorPolicy]) -> NameFilter:
    names: set[str] = set()
    patterns: dict[str, None] = {}
    for selector_policy in filters:
        if selector_policy.rules is None or not selector_policy.rules.dns:
            return EVERYTHING
        for rule in selector_policy.rules.dns:
            if rule.match_name:
                names.add(canonical_name(rule.match_name))
            if rule.match_pattern:
                patterns[rule.match_pattern] = None
    return NameFilter(frozenset(names), tuple(patterns))
