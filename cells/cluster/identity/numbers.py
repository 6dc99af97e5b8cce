"""Numeric identities: which are fixed, and which ranges the others are from.

For:    Identities, and code that classifies numbers. Needs: Label. Gives: the numbers, Scope,
        scope_of(), scope_for().
Source: Cilium 1.17, numeric identities and their scopes.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from cells.cluster.identity.labels import RESERVED, parse

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
USER_RESERVED: Final = range(128, 256)
CLUSTER: Final = range(256, 65536)
"""Identities of pods, in a cluster without a number of its own."""
LOCAL: Final = range((1 << 24) + 1, 2 << 24)
"""Identities of this node alone: prefixes and names outside of the cluster."""
REMOTE_NODES: Final = range((2 << 24) + 1, 3 << 24)
"""Identities of this node alone: other nodes, where their labels count."""


class Scope(StrEnum):
    """Where a number means the same; the value is the ``type`` of Cilium's metric ``cilium_identity``."""

    RESERVED = "reserved"
    WELL_KNOWN = "well_known"
    CLUSTER = "cluster_local"
    LOCAL = "node_local"
    REMOTE_NODE = "remote_node"


FIXED: Final = frozenset({Scope.RESERVED, Scope.WELL_KNOWN})
"""Scopes whose numbers are not allocated: their identities always exist."""


def scope_of(number: int) -> Scope:
    """The scope of a number."""
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


def scope_for(labels: Iterable[str]) -> Scope:
    """The scope that an identity of these labels is allocated in.

    Labels of prefixes, names and the world are this node's own; with any other label it is the cluster's.
    """
    parsed = [parse(text) for text in labels]
    if any(label.source == RESERVED and label.key == "remote-node" for label in parsed):
        return Scope.REMOTE_NODE
    outside = {"cidr", "fqdn", "cidrgroup", RESERVED}
    return Scope.LOCAL if parsed and all(label.source in outside for label in parsed) else Scope.CLUSTER
