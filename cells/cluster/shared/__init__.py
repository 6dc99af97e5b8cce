"""What nodes tell each other through the store: themselves, and whose their pods' addresses are.

Source and controller: keys of the store in; rows of the table ``nodes`` and claims in the ipcache out. This
        node and its endpoints in; its own keys out.
Needs:  KVStore, Table[Endpoint], Table[Pod], ReadTable[ClusterNode], Ipcache, Identities.
Gives:  SharedNodes, which the table ``nodes`` is made of; SharedTables.
Why:    without an API server, and with so many pods that it would be too much for one.
"""

from __future__ import annotations

from cells.cluster.nodes import SharedNodes
from cells.cluster.shared.claims import SharedClaims
from cells.cluster.shared.published import SharedKeys
from cells.cluster.shared.tables import SharedTables
from lifecycle import group, invoke, module, provide

__all__ = ["SharedTables", "cell"]


def shared_nodes(shared: SharedTables) -> SharedNodes:
    """Nodes from the store."""
    return shared.nodes


cell = group(
    module(
        "shared-tables", "What other nodes have written to the store", provide(SharedTables, shared_nodes)
    ),
    module(
        "shared",
        "This node in the store, and addresses of others' pods from it",
        provide(SharedKeys, SharedClaims),
        invoke(SharedKeys, SharedClaims),
    ),
)
