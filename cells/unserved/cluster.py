"""Identities and addresses that nodes share: options that are not served yet.

Needs: nothing.   Gives: UnservedCluster.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedCluster(UnservedSettings, frozen=True):
    """Identities and addresses that nodes share."""

    kvstore: str = ""
    """No kvstore is used yet."""

    cluster_id: int = 0
    """Several clusters are not connected yet."""

    labels: str = ""
    """Which labels make identities cannot be chosen yet."""

    label_prefix_file: str = ""
    """The same, from a file."""

    node_labels: str = ""
    """The node's labels are not part of identities yet."""

    enable_node_selector_labels: bool = False
    """The same, of other nodes."""

    enable_well_known_identities: bool = False
    """No identity has a number of its own but the reserved ones."""

    fixed_identity_mapping: str = ""
    """No identity has a number of its own but the reserved ones."""

    enable_high_scale_ipcache: bool = False
    """All identities of addresses are in the ipcache map."""
