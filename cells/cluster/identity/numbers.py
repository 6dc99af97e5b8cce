"""Numeric identities: reserved and well-known ones, and the ranges of allocated ones.

Source: Cilium 1.17, numeric identities and their scopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

import msgspec

from cells.base.labels import RESERVED, parse
from cells.config import AgentConfig

__all__ = [
    "CLUSTER",
    "EVERY_CLUSTER",
    "HEALTH",
    "HOST",
    "INGRESS",
    "INIT",
    "INIT_LABELS",
    "KUBE_APISERVER",
    "LOCAL",
    "REMOTE_NODE",
    "REMOTE_NODES",
    "RESERVED_IDENTITIES",
    "UNKNOWN",
    "WORLD",
    "WORLD_IPV4",
    "WORLD_IPV6",
    "ClusterNumbers",
    "Scope",
    "is_endpoint",
    "scope_for",
    "scope_of",
    "well_known_identities",
]


UNKNOWN: Final = 0
HOST: Final = 1
WORLD: Final = 2
HEALTH: Final = 4
INIT: Final = 5
REMOTE_NODE: Final = 6
KUBE_APISERVER: Final = 7
INGRESS: Final = 8
WORLD_IPV4: Final = 9
WORLD_IPV6: Final = 10

RESERVED_IDENTITIES: Final[dict[int, tuple[str, ...]]] = {
    HOST: ("reserved:host",),
    WORLD: ("reserved:world",),
    3: ("reserved:unmanaged",),
    HEALTH: ("reserved:health",),
    INIT: ("reserved:init",),
    REMOTE_NODE: ("reserved:remote-node",),
    KUBE_APISERVER: ("reserved:kube-apiserver", "reserved:remote-node"),
    INGRESS: ("reserved:ingress",),
    WORLD_IPV4: ("reserved:world-ipv4",),
    WORLD_IPV6: ("reserved:world-ipv6",),
    11: ("reserved:encrypted-overlay",),
}
INIT_LABELS: Final = RESERVED_IDENTITIES[INIT]

WELL_KNOWN: Final = range(100, 128)
CLUSTER: Final = range(256, 65536)
"""Identities of pods, in a cluster without an id."""
EVERY_CLUSTER: Final = range(CLUSTER.start, 1 << 24)
"""Identities of pods of any cluster."""
LOCAL: Final = range((1 << 24) + 1, 2 << 24)
"""Identities that this node allocates: prefixes and DNS names outside the cluster."""
REMOTE_NODES: Final = range((2 << 24) + 1, 3 << 24)
"""Identities that this node allocates for other nodes, if policies select them by labels."""


class ClusterNumbers(msgspec.Struct, frozen=True):
    """The ranges of a cluster's identities: in a mesh their high bits are the cluster's id.

    Source: Cilium 1.17, GetMinimalAllocationIdentity and GetClusterIDShift.
    """

    cluster_id: int = 0
    """0: not in a mesh."""
    most_clusters: int = 255
    """255 or 511: with 511 the id has one bit more, and the identity one bit less."""

    @classmethod
    def of_agent(cls, agent: AgentConfig) -> ClusterNumbers:
        """Return the ranges of the agent's cluster."""
        return cls(agent.cluster_id, agent.max_connected_clusters)

    def of(self, cluster_id: int) -> range:
        """Return the identities that pods of that cluster can have."""
        bits = 16 if self.most_clusters <= 255 else 15
        first = cluster_id << bits if cluster_id else CLUSTER.start
        return range(first, (cluster_id + 1) << bits)

    @property
    def own(self) -> range:
        """Return the identities that pods of this cluster can have."""
        return self.of(self.cluster_id)

    @property
    def allocatable(self) -> range:
        """Return the range for new identities of this cluster; Cilium reserves the lowest ones."""
        own = self.own
        return range(own.start + CLUSTER.start if self.cluster_id else own.start, own.stop)


class Scope(StrEnum):
    """Where a number is valid; the values are the ``type`` of Cilium's metric ``cilium_identity``."""

    RESERVED = "reserved"
    WELL_KNOWN = "well_known"
    CLUSTER = "cluster_local"
    LOCAL = "node_local"
    REMOTE_NODE = "remote_node"


FIXED: Final = frozenset({Scope.RESERVED, Scope.WELL_KNOWN})
"""Scopes without allocation: their identities always exist."""


def scope_of(number: int) -> Scope:
    """Return the scope of a number."""
    if number < WELL_KNOWN.start:
        return Scope.RESERVED
    if number in WELL_KNOWN:
        return Scope.WELL_KNOWN
    match number >> 24:
        case 1:
            return Scope.LOCAL
        case 2:
            return Scope.REMOTE_NODE
    return Scope.CLUSTER


def is_endpoint(number: int) -> bool:
    """Return whether it is an identity of endpoints, not of nodes or peers outside the cluster."""
    elsewhere = {UNKNOWN, HOST, REMOTE_NODE, KUBE_APISERVER, WORLD, WORLD_IPV4, WORLD_IPV6}
    return number not in elsewhere and scope_of(number) not in {Scope.LOCAL, Scope.REMOTE_NODE}


def scope_for(labels: Iterable[str]) -> Scope:
    """Return the scope for an identity with these labels.

    Labels of prefixes, DNS names and the world are local to this node; any other label makes the scope the
    cluster.
    """
    parsed = [parse(text) for text in labels]
    if any(label.source == RESERVED and label.key == "remote-node" for label in parsed):
        return Scope.REMOTE_NODE
    outside = {"cidr", "fqdn", "cidrgroup", RESERVED}
    return Scope.LOCAL if parsed and all(label.source in outside for label in parsed) else Scope.CLUSTER


# Identities of well-known pods: their numbers are the same in every cluster, so nodes need not agree on
# them.
#
# Source: Cilium 1.17, well-known identities: each twice, without and with the label of the namespace's name.

FIRST: Final = 100
_DNS, _CILIUM = "kube-system", ""
_EKS = "eks.amazonaws.com/component"
_OPERATOR = ("name=cilium-operator", "io.cilium/app=operator", "app.kubernetes.io/part-of=cilium")
_ETCD = "io.cilium/app=etcd-operator"
_PODS: Final = (
    (_CILIUM, "cilium-etcd-sa", (_ETCD,)),
    (_CILIUM, "default", ("app=etcd", "etcd_cluster=cilium-etcd", _ETCD)),
    (_DNS, "kube-dns", ("k8s-app=kube-dns",)),
    (_DNS, "kube-dns", ("k8s-app=kube-dns", f"{_EKS}=kube-dns")),
    (_DNS, "coredns", ("k8s-app=kube-dns",)),
    (_CILIUM, "cilium-operator", (*_OPERATOR, "app.kubernetes.io/name=cilium-operator")),
    (_DNS, "coredns", ("k8s-app=kube-dns", f"{_EKS}=coredns")),
    (
        _CILIUM,
        "cilium-etcd-operator",
        (
            "name=cilium-etcd-operator",
            _ETCD,
            "app.kubernetes.io/part-of=cilium",
            "app.kubernetes.io/name=cilium-etcd-operator",
        ),
    ),
)
"""Namespace (empty: that of Cilium), service account and labels, by number."""


def well_known_identities(cluster: str, namespace: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Return numbers and sorted labels of well-known identities.

    ``namespace`` is that of Cilium's pods, which are omitted without it.
    """
    for number, (where, account, own) in enumerate(_PODS, FIRST):
        if not (found := where or namespace):
            continue
        labels = [
            *own,
            f"io.kubernetes.pod.namespace={found}",
            f"io.cilium.k8s.policy.serviceaccount={account}",
            f"io.cilium.k8s.policy.cluster={cluster}",
        ]
        named = [*labels, f"io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name={found}"]
        yield number, tuple(sorted(f"k8s:{label}" for label in labels))
        yield number + len(_PODS), tuple(sorted(f"k8s:{label}" for label in named))
