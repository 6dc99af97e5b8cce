"""How the cell of policy maps is put together.

Needs: PolicyMaps, PolicySettings.   Gives: cell.
"""

import math
from collections.abc import Iterable

from cells.cluster.ipcache import IdentityFollower
from cells.datapath import Datapath
from cells.maps import NODE_AUDITS_POLICY, PolicyMaps
from cells.observe import metrics
from cells.policy.maps.edges import PolicyComputer, PolicyMapPool, RuleComputer
from cells.policy.maps.endpoint_policies import EndpointPolicies
from cells.policy.maps.kernel import KernelPolicyMaps
from cells.policy.maps.node_policy import NodePolicy
from cells.policy.maps.rows import EndpointPolicy, RealizedPolicy
from cells.policy.maps.settings import PolicySettings
from lifecycle import Jobs, Logger, Member, Table, config, group, module, provide


def policy_table() -> Table[EndpointPolicy]:
    """The ``endpoint-policies`` table, by endpoint id."""
    return Table("endpoint-policies", key=lambda policy: policy.endpoint_id)


def realized_table() -> Table[RealizedPolicy]:
    """The ``endpoint-policies-realized`` table, by endpoint id."""
    return Table("endpoint-policies-realized", key=lambda policy: policy.endpoint_id)


def policy_computer(policy: NodePolicy, rules: RuleComputer | None) -> PolicyComputer:
    """The rules in force, or the node's enforcement mode alone where nothing knows rules."""
    return policy if rules is None else rules


def policy_map_pool(pool: PolicyMaps) -> PolicyMapPool:
    """The policy maps in the kernel."""
    return KernelPolicyMaps(pool)


def endpoint_policies(
    table: Table[EndpointPolicy],
    realized: Table[RealizedPolicy],
    computer: PolicyComputer,
    pool: PolicyMapPool,
    *,
    settings: PolicySettings,
    jobs: Jobs,
    log: Logger,
) -> EndpointPolicies:
    """Each endpoint's policy, and its policy map."""
    policies = EndpointPolicies(
        table,
        realized,
        computer,
        pool,
        log,
        lockdown=settings.enable_endpoint_lockdown_on_policy_overflow,
    )
    jobs.timer("policy-map-full-reconciliation", policies.reconcile, settings.reconciliation_seconds)
    policies.apply_soon = jobs.timer("policy-map-sync", policies.apply, math.inf).trigger
    return policies


def identity_follower(policies: EndpointPolicies) -> Member[IdentityFollower]:
    """Policy maps, which know identities before packets carry them."""
    return policies


def policy_metrics(policies: EndpointPolicies, datapath: Datapath | None) -> Member[metrics.Collector]:
    """Policies as metrics."""

    async def collect() -> Iterable[metrics.Family]:
        from cells.policy.maps.metrics import families

        flags = datapath.notifications.flags if datapath is not None else 0
        return families(policies, audited=bool(flags & NODE_AUDITS_POLICY))

    return metrics.Collector("policy", collect)


cell = group(
    module(
        "policy-mode",
        "Whether policies are enforced on this node",
        config(PolicySettings),
        provide(NodePolicy),
    ),
    module(
        "policy",
        "What endpoints may do, in their policy maps",
        provide(policy_table, realized_table, policy_computer, policy_map_pool),
        provide(endpoint_policies, identity_follower, policy_metrics),
    ),
)
