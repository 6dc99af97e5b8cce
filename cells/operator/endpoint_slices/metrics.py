"""What writing slices tells of itself.

Needs: Metrics.   Gives: SliceCounts, tell().
Source: Cilium 1.17, the operator's metrics of CiliumEndpointSlices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal

from cells.observe.metrics import Collector, Family, Histogram, Metrics, counter, histogram
from lifecycle import Hook, Lifecycle

PREFIX: Final = "cilium_operator"
SIZES: Final = (1, 10, 25, 50, 100, 200, 500, 1000)
DELAYS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 300, 900, 1800, 3600)
Queue = Literal["fast", "standard"]


class SliceCounts:
    """What is counted of writes."""

    def __init__(self) -> None:
        self.sizes = Histogram(SIZES)
        """Endpoints of a slice that was written."""
        self.changes = {"cepinserted": Histogram(SIZES), "cepremoved": Histogram(SIZES)}
        """Endpoints that came into a slice with one write, or left it."""
        self.delays: dict[Queue, Histogram] = {"fast": Histogram(DELAYS), "standard": Histogram(DELAYS)}
        """Seconds that slices waited to be written."""
        self.outcomes: Counter[str] = Counter(success=0, fail=0)

    def written(self, before: frozenset[str], after: frozenset[str]) -> None:
        """A slice that held these endpoints holds those now."""
        self.sizes.observe(len(after))
        self.changes["cepinserted"].observe(len(after - before))
        self.changes["cepremoved"].observe(len(before - after))


def families(counts: SliceCounts) -> list[Family]:
    """All of it."""
    return [
        histogram(f"{PREFIX}_number_of_ceps_per_ces", "The number of CEPs batched in a CES", counts.sizes),
        histogram(
            f"{PREFIX}_number_of_cep_changes_per_ces",
            "The number of changed CEPs in each CES update",
            counts.changes,
            "opcode",
        ),
        histogram(
            f"{PREFIX}_ces_queueing_delay_seconds",
            "CiliumEndpointSlice queueing delay in seconds",
            counts.delays,
            "queue",
        ),
        counter(
            f"{PREFIX}_ces_sync_total",
            "The number of completed CES syncs by outcome",
            dict(counts.outcomes),
            "outcome",
        ),
    ]


def tell(metrics: Metrics, counts: SliceCounts, lifecycle: Lifecycle) -> None:
    """Tell it while this operator leads."""

    async def collect() -> Iterable[Family]:
        return families(counts)

    collector = Collector("endpoint-slices", collect)

    async def start() -> None:
        metrics.add([collector])

    async def stop() -> None:
        metrics.remove([collector])

    lifecycle.append(Hook("report metrics", start, stop))
