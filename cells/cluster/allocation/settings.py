"""How nodes agree upon identities.

Needs: nothing.   Gives: AllocationSettings, AllocationMode.
"""

from enum import Enum

from lifecycle import Duration, Settings, seconds


class AllocationMode(Enum):
    """Where the numbers of identities are agreed upon."""

    CRD = "crd"
    """By CiliumIdentity objects, where there is an API server; else this node gives them."""


class AllocationSettings(Settings, frozen=True):
    """How nodes agree upon identities."""

    identity_allocation_mode: AllocationMode = AllocationMode.CRD
    """Where numbers are agreed upon: crd, by CiliumIdentity objects. No kvstore is used."""

    identity_change_grace_period: Duration = seconds(5)
    """How long a running pod keeps its identity once a new one was made, for other nodes to learn it."""
