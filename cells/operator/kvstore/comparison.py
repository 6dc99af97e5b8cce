"""How far the two stores of identities agree, in the doublewrite modes: when the other one can be read.

Needs: OperatorOptions, KVStore, ClusterObjects, Metrics.   Gives: IdentityComparison.
Source: Cilium 1.17, the operator's metrics doublewrite_identity_*.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cells.cluster.kvstore import IDS, KVStore
from cells.observe.metrics import Collector, Family, Metrics, gauge
from cells.operator.objects import CLUSTER_IDENTITIES, ClusterObjects
from cells.operator.options import OperatorOptions
from lifecycle import Hook, Jobs, Lifecycle

INTERVAL: Final = 60.0
PREFIX: Final = "cilium_operator_doublewrite_identity"


class IdentityComparison:
    """Compares every minute, while this operator leads; what it finds are metrics."""

    def __init__(
        self,
        options: OperatorOptions,
        store: KVStore,
        objects: ClusterObjects | None,
        metrics: Metrics | None,
        *,
        jobs: Jobs,
        lifecycle: Lifecycle,
    ) -> None:
        if objects is None or metrics is None or not (store.enabled and options.compares_identities):
            return
        self._store = store
        self._objects = objects.table(CLUSTER_IDENTITIES)
        self._in_objects: set[str] = set()
        self._in_keys: set[str] = set()
        collector = Collector("doublewrite", self._collect)

        async def start() -> None:
            metrics.add([collector])

        async def stop() -> None:
            metrics.remove([collector])

        lifecycle.append(Hook("report metrics", start, stop))
        jobs.timer("compare identities", self.compare, INTERVAL).trigger()

    async def compare(self) -> None:
        """Look at both. Raises StoreError."""
        await self._objects.wait_initialized()
        keys, _ = await self._store.client.list_prefix(IDS)
        self._in_keys = {kv.key.removeprefix(IDS) for kv in keys}
        self._in_objects = {row.name for row in self._objects.all()}

    async def _collect(self) -> Iterable[Family]:
        objects, keys = self._in_objects, self._in_keys
        return [
            gauge(f"{PREFIX}_crd_total_count", "Identities that are CiliumIdentities.", len(objects)),
            gauge(f"{PREFIX}_kvstore_total_count", "Identities in the kvstore.", len(keys)),
            gauge(f"{PREFIX}_crd_only_count", "CiliumIdentities not in the kvstore.", len(objects - keys)),
            gauge(f"{PREFIX}_kvstore_only_count", "Identities in the kvstore only.", len(keys - objects)),
        ]
