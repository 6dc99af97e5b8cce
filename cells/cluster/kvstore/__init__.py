"""The key-value store that nodes share what they know by: etcd, with the keys that Cilium documents.

Edge: a connection to etcd, with leases, locks and watches, for cells that share something through it.
Needs:  KVStoreSettings.   Gives: KVStore; PrefixWatch to follow keys, keep_keys() to have some.
Why:    a cluster needs no API server for what its nodes tell each other. While etcd is down everything
        stays as it was, health and status say so, and what this node tells is written once it is back.
"""

from collections.abc import Iterable

from cells.cluster.kvstore.access import StoreConfigError
from cells.cluster.kvstore.etcd import EtcdClient
from cells.cluster.kvstore.keys import (
    CLUSTER_CONFIG,
    HEARTBEAT,
    HEARTBEAT_INTERVAL,
    IDS,
    INIT_LOCK,
    IPS,
    LOCKS,
    NODES,
    SYNCED,
    VALUES,
)
from cells.cluster.kvstore.locks import Lock, lock
from cells.cluster.kvstore.metrics import StoreMetrics
from cells.cluster.kvstore.model import (
    CompactedError,
    Compare,
    KeyValue,
    LeaseLostError,
    StoreError,
    StoreUnavailableError,
    absent,
    delete,
    get,
    put,
)
from cells.cluster.kvstore.own_keys import OwnKey, OwnKeys, keep_keys
from cells.cluster.kvstore.settings import KVStoreSettings, StoreOptions
from cells.cluster.kvstore.store import KVStore, StoreState
from cells.cluster.kvstore.watch import PrefixWatch
from cells.observe.health import Dependency, State
from cells.observe.metrics import Collector, Family
from lifecycle import Member, config, invoke, module, provide

__all__ = [
    "CLUSTER_CONFIG",
    "HEARTBEAT",
    "HEARTBEAT_INTERVAL",
    "IDS",
    "INIT_LOCK",
    "IPS",
    "LOCKS",
    "NODES",
    "SYNCED",
    "VALUES",
    "CompactedError",
    "Compare",
    "EtcdClient",
    "KVStore",
    "KVStoreSettings",
    "KeyValue",
    "LeaseLostError",
    "Lock",
    "OwnKey",
    "OwnKeys",
    "PrefixWatch",
    "StoreConfigError",
    "StoreError",
    "StoreMetrics",
    "StoreOptions",
    "StoreState",
    "StoreUnavailableError",
    "absent",
    "cell",
    "delete",
    "get",
    "keep_keys",
    "lock",
    "put",
]


def store_metrics(metrics: StoreMetrics) -> Member[Collector]:
    """The store as metrics."""

    async def collect() -> Iterable[Family]:
        return metrics.families()

    return Collector("kvstore", collect)


def store_dependency(store: KVStore) -> Member[Dependency]:
    """The store as something that the agent needs."""

    def state() -> tuple[State, str]:
        found = store.state()
        return found.state, found.message

    return Dependency("Kvstore service", state)


cell = module(
    "kvstore",
    "The store that nodes share",
    config(KVStoreSettings),
    provide(KVStore, StoreMetrics, store_metrics, store_dependency),
    invoke(KVStore),
)
