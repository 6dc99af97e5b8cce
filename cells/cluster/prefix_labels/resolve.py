"""Which labels make a prefix's identity, of all that is said of it.

For:    PrefixClaims.   Needs: nothing.   Gives: resolved(), Known.
Source: Cilium 1.17, the ipcache's resolution of labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from cells.cluster.identity import HOST, REMOTE_NODE, Scope, scope_of
from cells.cluster.prefix_labels.metadata import PrefixLabels

_WORLD: Final = frozenset({"reserved:world", "reserved:world-ipv4", "reserved:world-ipv6"})
_IN_CLUSTER: Final = frozenset({"reserved:remote-node", "reserved:health", "reserved:ingress"})
_OUTSIDE: Final = ("cidr:", "fqdn:", "cidrgroup:")
"""Sources of labels that only what is outside has, or a node whose own identity says so."""


class Known(msgspec.Struct, frozen=True):
    """What else is known of a prefix."""

    identity: int = 0
    """By the strongest claim of the ipcache that is not made of labels; 0 without one."""
    labels: tuple[str, ...] = ()
    """Those of that identity."""
    around: tuple[str, ...] = ()
    """Of the nearest prefix around it, or itself, that rules name; without those of the world."""
    world: tuple[str, ...] = ("reserved:world",)
    """Of what is outside, in the prefix's family."""


def resolved(said: Collection[PrefixLabels], known: Known) -> tuple[str, ...] | None:
    """The sorted labels of the prefix's identity; None where it has the one of its claims.

    That is so without labels, for a pod, which keeps its own, and for this node, whose identity
    gets the labels: see labels_of().
    """
    overriding = sorted(row.resource for row in said if row.override)
    if overriding:  # several contradict each other: the first by name
        return next(tuple(sorted(set(row.labels))) for row in said if row.resource == overriding[0])
    if not said or known.identity == HOST:
        return None
    labels = labels_of(said)
    scope = scope_of(known.identity)
    node = known.identity == REMOTE_NODE or scope is Scope.REMOTE_NODE
    if node or labels & _IN_CLUSTER:
        inside = {one for one in labels if one not in _WORLD and not one.startswith(_OUTSIDE)}
        return tuple(sorted(inside | set(known.labels) if node else inside))
    if known.identity and scope is not Scope.LOCAL and not _WORLD.intersection(known.labels):
        return None
    return tuple(sorted({*labels, *known.around, *known.world}))


def labels_of(said: Iterable[PrefixLabels]) -> set[str]:
    """What all of them say together."""
    return {label for row in said for label in row.labels}
