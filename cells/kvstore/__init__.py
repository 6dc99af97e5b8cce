"""The key-value store that nodes share what they know by: etcd, with the keys that Cilium documents.

Edge: a connection to etcd, with leases, locks and watches, for cells that share something through it.
Why:    a cluster needs no API server for what its nodes share. While etcd is down everything
        stays as it was, health and status show it, and this node's keys are written once it is back.
"""

from collections.abc import Iterable

from cells.base.metrics import Collector, MetricFamily
from cells.config import AgentConfig
from cells.kvstore.etcd import StoreMetrics
from cells.kvstore.settings import KVStoreSettings
from cells.kvstore.store import KVStore
from cells.observe.health import Dependency, State
from lifecycle import Member, config, invoke, module, provide

__all__ = ["cell"]


def store_metrics(metrics: StoreMetrics, agent: AgentConfig | None = None) -> Member[Collector]:
    """The store as metrics of an agent; the operator collects its own."""

    async def collect() -> Iterable[MetricFamily]:
        if agent is None:
            return ()
        return (*metrics.families(agent.cluster_name), *metrics.written_families(agent.cluster_name))

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
