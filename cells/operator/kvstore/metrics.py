"""What the store costs the operator, under its own names.

For:    the operator's metrics. Needs: KVStore, Metrics.   Gives: tell().
Source: Cilium 1.17: metrics of the store as the agent's, which begin with cilium_operator_.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from cells.cluster.kvstore import KVStore
from cells.observe.metrics import Collector, Family, Metrics
from lifecycle import Hook, Lifecycle


def tell(store: KVStore, metrics: Metrics | None, lifecycle: Lifecycle) -> None:
    """Tell it while this operator leads, where there is a store."""
    if metrics is None or not store.enabled:
        return
    told = metrics

    async def collect() -> Iterable[Family]:
        return [
            replace(one, name=one.name.replace("cilium_", "cilium_operator_", 1))
            for one in store.metrics.families()
        ]

    collector = Collector("kvstore", collect)

    async def start() -> None:
        told.add([collector])

    async def stop() -> None:
        told.remove([collector])

    lifecycle.append(Hook("report metrics", start, stop))
