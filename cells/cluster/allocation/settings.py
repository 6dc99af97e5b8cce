"""How nodes agree on identities.

Needs: nothing.   Gives: AllocationSettings, AllocationMode.
"""

from collections.abc import Iterator
from enum import Enum

from cells.cluster.identity import CLUSTER
from lifecycle import Duration, Settings, refuse, seconds


class AllocationMode(Enum):
    """Where the numbers of identities are agreed upon."""

    KVSTORE = "kvstore"
    """By keys of the kvstore; where there is none, as crd."""
    CRD = "crd"
    """By CiliumIdentity objects, where there is an API server; else this node gives them."""
    DOUBLEWRITE_READKVSTORE = "doublewrite-readkvstore"
    """By keys of the kvstore; objects are written as well."""
    DOUBLEWRITE_READCRD = "doublewrite-readcrd"
    """By objects; keys are written as well."""

    @property
    def reads_keys(self) -> bool:
        """Whether the kvstore is where numbers are agreed upon; else objects are."""
        return self in {AllocationMode.KVSTORE, AllocationMode.DOUBLEWRITE_READKVSTORE}

    @property
    def writes_both(self) -> bool:
        """Whether identities are written to both stores, so that a cluster can move from one to the other."""
        return self in {AllocationMode.DOUBLEWRITE_READKVSTORE, AllocationMode.DOUBLEWRITE_READCRD}


class AllocationSettings(Settings, frozen=True):
    """How nodes agree on identities."""

    identity_allocation_mode: AllocationMode = AllocationMode.KVSTORE
    """Where nodes agree on identities: crd, in CiliumIdentity objects; kvstore, in keys of the kvstore, or as
    crd when none is set. doublewrite-readkvstore and doublewrite-readcrd write both, and read one."""

    identity_change_grace_period: Duration = seconds(5)
    """How long a running pod keeps its old identity, so that other nodes can learn a new one."""

    first_identity: int = 256
    """First number that a node without API server and kvstore gives to pods' labels, 256 to 65535. The next
    ones count up, and go on at 256 after 65535."""

    def validate(self) -> None:
        """Refuse a number that no pod can have; raises ValueError with one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.first_identity not in CLUSTER:
            yield f"first-identity={self.first_identity}: expected {CLUSTER.start} to {CLUSTER.stop - 1}"
