"""Addresses and ranges of other nodes, claimed in the ipcache.

Reconciler: the table ``nodes`` in, claims in the ipcache out; ``remote-node-prefixes`` tells which.
Needs:  ReadTable[ClusterNode], Ipcache, AgentConfig.   Gives: nothing; it is invoked.
Why:    what comes from another node's own address is that node's, not the world's; and a packet to a pod that
        is not known yet can be reached on its node.
"""

from cells.cluster.remote_nodes.claims import NodeClaim, RemoteNodes, claims_of, node_claims
from lifecycle import after, invoke, module, provide, provide_private

__all__ = ["NodeClaim", "RemoteNodes", "cell", "claims_of"]


@after(RemoteNodes)
def keep() -> None:
    """They are claimed whether or not anybody asks."""


cell = module(
    "remote-nodes",
    "Other nodes in the ipcache",
    provide(RemoteNodes),
    provide_private(node_claims),
    invoke(keep),
)
