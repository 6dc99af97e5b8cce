"""What a kvstore needs done once: its heartbeat, whose it is, the end of identities that nobody uses.

Controller: keys of the store in, deletions, the heartbeat and the cluster's configuration out.
Needs:      KVStore, GCSettings, OperatorOptions; ClusterObjects, Metrics.
Gives:      KVStoreGC, ClusterConfig, IdentityComparison.
Why:        agents know by the heartbeat that somebody writes to the store they read, and those of other
            clusters by the configuration whose it is. Numbers are few, and who took one cannot tell whether
            others use it by now.
"""

from cells.operator.kvstore.comparison import IdentityComparison
from cells.operator.kvstore.config import ClusterConfig
from cells.operator.kvstore.gc import KVStoreGC
from cells.operator.kvstore.metrics import tell
from lifecycle import invoke, module, provide

__all__ = ["ClusterConfig", "IdentityComparison", "KVStoreGC", "cell"]

cell = module(
    "kvstore-gc",
    "Heartbeat of the kvstore, the cluster's configuration, and unused identities",
    provide(KVStoreGC, ClusterConfig, IdentityComparison),
    invoke(KVStoreGC, ClusterConfig, IdentityComparison, tell),
)
