"""What is decided elsewhere for this node and its pods: by Kubernetes, the operator, or pods' annotations.

For:    Ipam. Needs: nothing. Gives: AssignedPodCIDRs, AssignedPools, PoolState, PodPools.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from cells.ipam.addresses import Family, IPNetwork


class AssignedPodCIDRs(Protocol):
    """This node's assigned ranges; a cell that takes this starts after the wait for them."""

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        """The ranges, the primary one of each family first; nothing for a family that has none."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Comes back whenever the ranges may have changed."""
        ...


class PoolState(msgspec.Struct, frozen=True):
    """What this node's CiliumNode says of pools."""

    requested: Mapping[str, Mapping[Family, int]]
    """How many addresses are asked for, by pool."""
    allocated: Mapping[str, tuple[IPNetwork, ...]]
    """The ranges of each pool."""
    problem: str = ""
    """What the operator could not do."""


class AssignedPools(Protocol):
    """What is known of this node's pools, in IPAM mode multi-pool."""

    def pools(self) -> PoolState | None:
        """What the object says; None without one, which says nothing."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Comes back whenever that may have changed."""
        ...


class PodPools(Protocol):
    """Which pools pods ask for."""

    def pool_of(self, owner: str, family: Family) -> str:
        """The pool of ``namespace/pod``; empty for the default one.

        Raises IpamLaterError while the pod is not known, IpamError where it must have a pool and has none.
        """
        ...
