"""Writes each endpoint's policy to its policy map.

Controller and reconciler: a PolicyComputer computes the desired policies, rows of the table
``endpoint-policies``; EndpointPolicies writes the differences to policy maps; the table
``endpoint-policies-realized`` shows the contents of the maps.

Why: rules and identities may change at any time. Every map must follow, or its status shows the error.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Final

from cells.base.metrics import Collector, MetricFamily, gauge
from cells.cluster.identity.identities import Identity
from cells.cluster.ipcache import IdentityFollower
from cells.cluster.nodes.parse import HostFirewallUse
from cells.datapath.datapath import Datapath
from cells.maps.policy_map import PolicyMap
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.endpoints import NODE_AUDITS_POLICY
from cells.policy import Enforcement, Localhost, PolicyMapSettings, PolicySettings
from cells.policy.maps.policies import EndpointPolicies, PolicyMapError
from cells.policy.maps.rows import (
    ALLOW_ALL,
    ALLOW_LOCALHOST,
    NO_POD,
    EndpointPolicy,
    KnownRules,
    OutdatedPolicy,
    PodKey,
    PolicyComputer,
    PolicyEntries,
    PolicyMapPool,
    RealizedPolicy,
    RuleComputer,
    enforced_directions,
)
from lifecycle import Jobs, Logger, Member, Named, Table, config, group, module, provide

__all__ = [
    "ALLOW_ALL",
    "ALLOW_LOCALHOST",
    "NO_POD",
    "EndpointPolicies",
    "EndpointPolicy",
    "KnownRemoteClusters",
    "KnownRules",
    "NodePolicy",
    "OutdatedPolicy",
    "PodKey",
    "PolicyComputer",
    "PolicyEntries",
    "PolicyMapError",
    "PolicyMapPool",
    "RealizedPolicy",
    "RuleComputer",
    "cell",
    "enforced_directions",
]


KnownRemoteClusters = Annotated[KnownRules, Named("clustermesh")]
"""Whether identities and addresses of remote clusters are processed. Only restored endpoints wait for it."""


# The policy maps in the kernel.


class KernelPolicyMaps:
    """The :class:`~cells.policy.maps.rows.PolicyMapPool` of the kernel's policy maps."""

    def __init__(self, pool: PolicyMaps) -> None:
        self._pool = pool
        self._maps: dict[int, PolicyMap] = {}

    def acquire(self) -> int:
        """Return the id of a prepared, empty policy map."""
        return self._add_map(self._pool.acquire())

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """Open the pinned policy map of a restored endpoint; return its entries."""
        return self._maps[self._add_map(self._pool.adopt(endpoint_id))].held

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        """Write the differences to the last written entries."""
        self._maps[endpoint_id].replace(entries)

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        """Do write() for several maps."""
        maps = self._maps
        return self._pool.replace_all((maps[number], entries) for number, entries in wanted.items())

    def held(self, endpoint_id: int) -> PolicyEntries:
        """The map's entries as last written or read."""
        return self._maps[endpoint_id].held

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Compare the whole map with the entries and correct it; return the number of differences."""
        policy_map = self._maps[endpoint_id]
        present = policy_map.dump()
        differences = len(present.keys() ^ entries.keys()) + sum(
            not entry.same_verdict(present[key]) for key, entry in entries.items() if key in present
        )
        if differences:
            policy_map.reload()
            policy_map.replace(entries)
        return differences

    def release(self, endpoint_id: int) -> None:
        """Return the map to the pool."""
        policy_map = self._maps.pop(endpoint_id, None)
        if policy_map is not None:
            self._pool.release(policy_map)

    def _add_map(self, policy_map: PolicyMap) -> int:
        self._maps[policy_map.endpoint_id] = policy_map
        return policy_map.endpoint_id


# Policies by the enforcement mode alone, for hives without policy rules.
#
# Source: Cilium 1.17, policy enforcement modes and allow-localhost.


class NodePolicy:
    """The enforcement mode of the node and its revision."""

    def __init__(self, settings: PolicySettings) -> None:
        self.localhost = settings.allow_localhost
        """Whether the node may always reach its endpoints."""
        self.host_firewall = settings.enable_host_firewall
        """Whether policies are also enforced for the host endpoint."""
        self._enforcement = settings.enable_policy
        self._revision = 1

    @property
    def revision(self) -> int:
        """Incremented with every change of the mode."""
        return self._revision

    @property
    def enforcement(self) -> Enforcement:
        """The enforcement mode."""
        return self._enforcement

    def enforce(self, mode: Enforcement) -> None:
        """Change the mode. It applies when policies are next computed."""
        self._enforcement = mode
        self._revision += 1

    @property
    def missing(self) -> str:
        """Empty: the mode is set from the start."""
        return ""

    def acknowledged(self, endpoint_id: int) -> bool:
        """True: no mode redirects packets to a proxy."""
        del endpoint_id
        return True

    def compute(
        self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD
    ) -> EndpointPolicy:
        """Return the policy of an endpoint: the same for every endpoint."""
        del identity, labels, pod
        enforced = self._enforcement is Enforcement.ALWAYS
        return EndpointPolicy(
            endpoint_id=endpoint_id,
            revision=self._revision,
            ingress_enforced=enforced,
            egress_enforced=enforced,
            entries=self._entries(),
        )

    def update_identities(self, identities: Iterable[Identity]) -> list[EndpointPolicy]:
        """A no-op: the mode does not distinguish identities."""
        del identities
        return []

    def forget(self, endpoint_id: int) -> None:
        """A no-op: there is no state by endpoint."""

    def _entries(self) -> PolicyEntries:
        if self._enforcement is not Enforcement.ALWAYS:
            return ALLOW_ALL
        return ALLOW_LOCALHOST if self.localhost is Localhost.ALWAYS else {}  # auto: not without Kubernetes


# Policies as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_policy_*.

_ENFORCEMENTS: Final = ("none", "ingress", "egress", "both", "audit-ingress", "audit-egress", "audit-both")


def families(policies: EndpointPolicies, *, audited: bool) -> Iterator[MetricFamily]:
    """Number of endpoints by enforcement status, and the revision of the rules."""
    counted = Counter(enforced_directions(policy, audited=audited) for policy in policies.realized.all())
    yield gauge(
        "cilium_policy_endpoint_enforcement_status",
        "Number of endpoints labeled by policy enforcement status",
        dict.fromkeys(_ENFORCEMENTS, 0) | counted,
        "enforcement",
    )
    yield gauge(
        "cilium_policy_max_revision", "Highest policy revision number in the agent", policies.revision
    )


# The wiring of the cell.


def policy_table() -> Table[int, EndpointPolicy]:
    """The ``endpoint-policies`` table, by endpoint id."""
    return Table("endpoint-policies", key=lambda policy: policy.endpoint_id)


def realized_table() -> Table[int, RealizedPolicy]:
    """The ``endpoint-policies-realized`` table, by endpoint id."""
    return Table("endpoint-policies-realized", key=lambda policy: policy.endpoint_id)


def policy_computer(policy: NodePolicy, rules: RuleComputer | None) -> PolicyComputer:
    """Return the computer of rules, or the node's enforcement mode if there is none."""
    return policy if rules is None else rules


def policy_map_pool(pool: PolicyMaps) -> PolicyMapPool:
    """Return the pool of the kernel's policy maps."""
    return KernelPolicyMaps(pool)


def endpoint_policies(
    table: Table[int, EndpointPolicy],
    realized: Table[int, RealizedPolicy],
    computer: PolicyComputer,
    pool: PolicyMapPool,
    settings: PolicyMapSettings,
    *,
    jobs: Jobs,
    log: Logger,
) -> EndpointPolicies:
    """Return EndpointPolicies, and register the jobs that write policy maps."""

    async def apply() -> None:
        await policies.apply()

    policies = EndpointPolicies(
        table,
        realized,
        computer,
        pool,
        log,
        lockdown=settings.enable_endpoint_lockdown_on_policy_overflow,
        apply_soon=jobs.timer("policy-map-sync", apply, math.inf).trigger,
    )
    jobs.timer("policy-map-full-reconciliation", policies.reconcile, settings.reconciliation_seconds)
    return policies


def host_firewall(policy: NodePolicy) -> HostFirewallUse:
    """Return whether the host firewall is enabled, for cells that policy depends on."""
    return HostFirewallUse(policy.host_firewall)


def outdated_table(policies: EndpointPolicies) -> Table[int, OutdatedPolicy]:
    """The ``endpoint-policies-outdated`` table, by endpoint id."""
    return policies.outdated


def policy_metrics(policies: EndpointPolicies, datapath: Datapath | None) -> Member[Collector]:
    """Return the collector of endpoints' policy metrics."""

    async def collect() -> Iterable[MetricFamily]:
        flags = datapath.notifications.flags if datapath is not None else 0
        return families(policies, audited=bool(flags & NODE_AUDITS_POLICY))

    return Collector("policy", collect)


cell = group(
    module(
        "policy-mode",
        "Policy enforcement mode of the node",
        config(PolicySettings),
        provide(NodePolicy, host_firewall),
    ),
    module(
        "policy",
        "Policies of endpoints, in their policy maps",
        config(PolicyMapSettings),
        provide(policy_table, realized_table, policy_computer, policy_map_pool),
        # the ipcache updates policy maps through it before packets carry a new identity
        provide(endpoint_policies, as_=(Member[IdentityFollower],)),
        provide(outdated_table, policy_metrics),
    ),
)
