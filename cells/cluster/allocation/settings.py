"""How nodes agree upon identities.

Needs: nothing.   Gives: AllocationSettings, AllocationMode.
"""

from enum import Enum

from lifecycle import Duration, Settings, seconds


class AllocationMode(Enum):
    """Where the numbers of identities are agreed upon."""

    KVSTORE = "kvstore"
    """By keys of the kvstore; where there is none, as crd."""
    CRD = "crd"
    """By CiliumIdentity objects, where there is an API server; else this node gives them."""


class AllocationSettings(Settings, frozen=True):
    """How nodes agree upon identities."""

    identity_allocation_mode: AllocationMode = AllocationMode.KVSTORE
    """Where numbers are agreed upon: kvstore, by keys of the kvstore, or, where none is set, as crd: by
    CiliumIdentity objects."""

    identity_change_grace_period: Duration = seconds(5)
    """How long a running pod keeps its identity once a new one was made, for other nodes to learn it."""
