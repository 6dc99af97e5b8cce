"""Identities and addresses that nodes share: options that are not served yet.

Needs: nothing.   Gives: UnservedCluster.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedCluster(UnservedSettings, frozen=True):
    """Identities and addresses that nodes share."""

    cluster_id: int = 0
    """Several clusters are not connected yet."""

    node_labels: str = ""
    """The node's labels are not part of identities yet."""

    fixed_identity_mapping: str = ""
    """Identities of one's own cannot have fixed numbers yet."""

    enable_high_scale_ipcache: bool = False
    """All identities of addresses are in the ipcache map."""
