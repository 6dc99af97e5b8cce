"""Packets dropped and forwarded, as Cilium's metrics.

For:    Metrics. Needs: cilium_metrics. Gives: families(), counted().
Source: Cilium 1.17, cilium_drop_count_total and others, from the map cilium_metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import anyio.to_thread

from cells.base.metrics import Family, counter
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.flows import METRIC_EGRESS, METRIC_INGRESS, METRIC_SERVICE, MetricsKey, MetricsValue
from cells.observe.events.text import reason_name

_DIRECTIONS: Final = {METRIC_INGRESS: "INGRESS", METRIC_EGRESS: "EGRESS", METRIC_SERVICE: "SERVICE"}
_INVALID: Final = 2
"""The one reason below 130 for which a packet is dropped."""
_FIRST_DROP: Final = 130

Counts = Iterable[tuple[MetricsKey, MetricsValue]]


async def families(maps: Maps) -> list[Family]:
    """What the datapath has counted; the map is read in a thread."""
    return list(counted(await anyio.to_thread.run_sync(_read, maps.metrics.id)))


def _read(map_id: int) -> list[tuple[MetricsKey, MetricsValue]]:
    with map_by_id(map_id, "cilium_metrics") as table:
        return [(MetricsKey.unpack(key), MetricsValue.unpack(value)) for key, value in table.items()]


def counted(counts: Counts) -> Iterator[Family]:
    """Sums over the places in the datapath's source, and over all reasons to forward."""
    dropped: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    forwarded: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for key, value in counts:
        direction = _DIRECTIONS.get(key.direction, "UNKNOWN")
        is_drop = key.reason == _INVALID or key.reason >= _FIRST_DROP
        sums = dropped[reason_name(key.reason), direction] if is_drop else forwarded[direction,]
        sums[0] += value.packets
        sums[1] += value.octets
    for kind, sums_of, labels, text in (
        ("drop", dropped, "reason direction", "dropped, tagged by drop reason and ingress/egress direction"),
        ("forward", forwarded, "direction", "forwarded, tagged by ingress/egress direction"),
    ):
        for position, unit, what in ((0, "count", "Total packets"), (1, "bytes", "Total bytes")):
            series = {labels_of: sums[position] for labels_of, sums in sums_of.items()}
            yield counter(f"cilium_{kind}_{unit}_total", f"{what} {text}", series, labels, fixed=True)
