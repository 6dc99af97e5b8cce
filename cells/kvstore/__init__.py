"""The kvstore: an etcd client with leases, locks and prefix watches, for state that nodes share.

In:   the settings kvstore and kvstore-opt.
Out:  KVStore for the cells that share state; the agent's health, status and metrics of it.
Why:  nodes can share state without an API server. While etcd is unreachable the last known state stays in
      force; this node's keys are written again after the connection is back.
Source: Cilium 1.17, pkg/kvstore, with Cilium's keys.
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
    """Contribute the kvstore metrics of an agent; the operator collects its own."""

    async def collect() -> Iterable[MetricFamily]:
        if agent is None:
            return ()
        return (*metrics.families(agent.cluster_name), *metrics.written_families(agent.cluster_name))

    return Collector("kvstore", collect)


def store_dependency(store: KVStore) -> Member[Dependency]:
    """Contribute the kvstore to the dependencies in the agent's health."""

    def state() -> tuple[State, str]:
        found = store.state()
        return found.state, found.message

    return Dependency("Kvstore service", state)


cell = module(
    "kvstore",
    "The etcd that nodes share state through",
    config(KVStoreSettings),
    provide(KVStore, StoreMetrics, store_metrics, store_dependency),
    invoke(KVStore),
)
