"""Security identities: a number for each set of labels, by which the datapath knows whose packets are whose.

Controller: label sets in, the table ``identities`` out.
        This node's own are kept in local_allocator_state.json.
Needs:  AgentConfig, IdentitySettings.
Gives:  Identities, Table[Identity], IdentityAllocator, LabelFilter; the reserved numbers, and labels.
Why:    a number may have to be agreed upon with other nodes, so asking for one may wait: ClusterAllocator.
        Without one this node gives the numbers.
"""

from collections.abc import Iterable

from cells.cluster.identity.allocator import (
    ClusterAllocator,
    IdentityAllocator,
    NodeAllocator,
    NoIdentityError,
)
from cells.cluster.identity.checkpoint import Checkpoint
from cells.cluster.identity.filter import DEFAULT_FILTER, LabelFilter
from cells.cluster.identity.identities import Identities, Identity, identity_table
from cells.cluster.identity.labels import (
    CIDR,
    RESERVED,
    Label,
    cidr_label,
    labels_sha256,
    parse,
    texts,
)
from cells.cluster.identity.numbers import (
    CLUSTER,
    HEALTH,
    HOST,
    INGRESS,
    INIT,
    INIT_LABELS,
    KUBE_APISERVER,
    REMOTE_NODE,
    RESERVED_IDENTITIES,
    UNKNOWN,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
    Scope,
    scope_for,
    scope_of,
)
from cells.cluster.identity.pods import pod_labels
from cells.cluster.identity.settings import IdentitySettings, configured_filter
from cells.cluster.identity.well_known import well_known_identities
from cells.config import AgentConfig
from cells.observe.metrics import Collector, Family
from lifecycle import Jobs, Lifecycle, Logger, Member, Table, config, module, provide

__all__ = [
    "CIDR",
    "CLUSTER",
    "DEFAULT_FILTER",
    "HEALTH",
    "HOST",
    "INGRESS",
    "INIT",
    "INIT_LABELS",
    "KUBE_APISERVER",
    "REMOTE_NODE",
    "RESERVED",
    "RESERVED_IDENTITIES",
    "UNKNOWN",
    "WORLD",
    "WORLD_IPV4",
    "WORLD_IPV6",
    "ClusterAllocator",
    "Identities",
    "Identity",
    "IdentityAllocator",
    "IdentitySettings",
    "Label",
    "LabelFilter",
    "NoIdentityError",
    "NodeAllocator",
    "Scope",
    "cell",
    "cidr_label",
    "identity_table",
    "labels_sha256",
    "parse",
    "pod_labels",
    "scope_for",
    "scope_of",
    "texts",
    "well_known_identities",
]


def identities(settings: IdentitySettings, agent: AgentConfig) -> Table[Identity]:
    """The table ``identities``."""
    if not settings.enable_well_known_identities:
        return identity_table()
    return identity_table(well_known_identities(agent.cluster_name, settings.k8s_namespace))


def known_identities(
    table: Table[Identity],
    cluster: IdentityAllocator,
    keep: LabelFilter,
    agent: AgentConfig,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    log: Logger,
) -> Identities:
    """The identities of this node; its own have their former numbers."""
    found = Identities(table, cluster, keep)
    Checkpoint(found, agent.state, lifecycle=lifecycle, jobs=jobs, log=log)
    return found


def allocator(cluster: ClusterAllocator | None) -> IdentityAllocator:
    """Pods' identities: the cluster's, or by the count of this node."""
    return cluster or NodeAllocator(CLUSTER)


def identity_metrics(identities: Identities) -> Member[Collector]:
    """Identities as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.cluster.identity.metrics import families

        return families(identities)

    return Collector("identity", collect)


cell = module(
    "identity",
    "Numbers for sets of labels",
    config(IdentitySettings),
    provide(identities, allocator, configured_filter, known_identities, identity_metrics),
)
