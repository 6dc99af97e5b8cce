"""Ranges that somebody else has decided for this node: Kubernetes, or the operator.

For:    Ipam. Needs: nothing. Gives: AssignedPodCIDRs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from cells.ipam.addresses import Family, IPNetwork


class AssignedPodCIDRs(Protocol):
    """What is known of this node's ranges; whoever takes one starts after the wait for them."""

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        """The ranges, the primary one of each family first; nothing for a family that has none."""
        ...

    def changes(self) -> AsyncIterator[object]:
        """Comes back whenever the ranges may have changed."""
        ...
