"""What the store costs, as Cilium's metrics.

For:    Metrics. Needs: nothing. Gives: StoreMetrics.
Source: Cilium 1.17, cilium_kvstore_*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cells.observe.metrics import Family, Histogram, counter, gauge, histogram


class StoreMetrics:
    """Counts and measures requests, and what of the store is known."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str, str, str], Histogram] = {}
        self._quorum: Counter[str] = Counter()
        self._read: dict[tuple[str, str, str], int] = {}

    def asked(self, kind: str, took: float, *, failed: bool) -> None:
        """A request was answered, or failed, after so many seconds."""
        key = ("store", kind, "request", "fail" if failed else "success")
        self._times.setdefault(key, Histogram()).observe(took)

    def no_quorum(self, why: str) -> None:
        """The store did not agree upon anything."""
        self._quorum[why] += 1

    def synchronised(self, scope: str, *, done: bool) -> None:
        """Whether all keys of a scope have been read once."""
        self._read[(scope, "local", "read")] = int(done)

    def families(self) -> Iterator[Family]:
        """All of them; without series where there is no store."""
        yield histogram(
            "cilium_kvstore_operations_duration_seconds",
            "Duration in seconds of kvstore operations",
            self._times,
            "scope kind action outcome",
        )
        yield counter(
            "cilium_kvstore_quorum_errors_total", "Number of quorum errors", dict(self._quorum), "error"
        )
        yield gauge(
            "cilium_kvstore_initial_sync_completed",
            "Whether the initial synchronization from/to the kvstore has completed",
            self._read,
            "scope source_cluster action",
        )
