"""Says in the store whose it is: the configuration of the cluster, for agents of others that read it.

Needs: KVStore, OperatorOptions.   Gives: ClusterConfig.
Source: Cilium 1.17, the key cilium/cluster-config/NAME. It promises no canaries (cilium/synced/NAME/...): to
        a store that every agent of a cluster writes to nobody could say that all is there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cells.cluster.kvstore import CLUSTER_CONFIG, KVStore, OwnKey, keep_keys
from cells.operator.options import OperatorOptions
from lifecycle import Jobs, Table, Tables

MOST_CLUSTERS: Final = 255
"""Of a mesh, by the numbers that a cluster may have."""


class Capabilities(msgspec.Struct, frozen=True, rename="camel"):
    """What readers may count on."""

    max_connected_clusters: int = MOST_CLUSTERS
    service_exports_enabled: bool = False


class Configuration(msgspec.Struct, frozen=True):
    """The value of the key."""

    id: int | msgspec.UnsetType
    """Unset for a cluster without a number, in no mesh."""
    capabilities: Capabilities


class ClusterConfig:
    """Keeps the key under a lease, and puts right what others make of it."""

    def __init__(self, store: KVStore, options: OperatorOptions, *, jobs: Jobs, tables: Tables) -> None:
        if not store.enabled:
            return
        keys: Table[OwnKey] = Table("cluster-config-keys", key=lambda row: row.key)
        value = msgspec.json.encode(Configuration(options.cluster_id or msgspec.UNSET, Capabilities()))
        with keys.txn() as rows:
            rows.put(OwnKey(f"{CLUSTER_CONFIG}{options.cluster_name}", value.decode()))
        keep_keys(store, keys, jobs=jobs, tables=tables)
