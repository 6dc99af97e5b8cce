"""What a kvstore needs done once: its heartbeat, and the end of identities that no node uses any more.

Controller: keys of the store in, deletions and the heartbeat out.
Needs:      KVStore, GCSettings.   Gives: KVStoreGC.
Why:        agents know by the heartbeat that somebody writes to the store they read. Numbers are few, and who
            took one cannot tell whether others use it by now.
"""

from cells.operator.kvstore.gc import KVStoreGC
from lifecycle import invoke, module, provide

__all__ = ["KVStoreGC", "cell"]

cell = module(
    "kvstore-gc",
    "Heartbeat of the kvstore, and identities that nobody uses",
    provide(KVStoreGC),
    invoke(KVStoreGC),
)
