"""Metrics of cilium_metrics: sums over source locations, drops apart from forwarded packets."""

from __future__ import annotations

from cells.maps.records.flows import METRIC_EGRESS, METRIC_INGRESS, METRIC_SERVICE, MetricsKey, MetricsValue
from cells.observe.events import counted


def test_drops_are_counted_by_reason_and_forwards_by_direction() -> None:
    series = {
        family.name: family.series
        for family in counted(
            [
                (MetricsKey(133, METRIC_INGRESS, line=1), MetricsValue(2, 200)),
                (MetricsKey(133, METRIC_INGRESS, line=7, file=3), MetricsValue(1, 50)),
                (MetricsKey(139, METRIC_EGRESS), MetricsValue(4, 400)),
                (MetricsKey(2, METRIC_EGRESS), MetricsValue(8, 800)),
                (MetricsKey(250, 0), MetricsValue(16, 1600)),
                (MetricsKey(0, METRIC_EGRESS), MetricsValue(32, 3200)),
                (MetricsKey(9, METRIC_EGRESS), MetricsValue(64, 6400)),
                (MetricsKey(3, METRIC_SERVICE), MetricsValue(128, 12800)),
            ]
        )
    }
    assert series["cilium_drop_count_total"] == {
        ("Policy denied", "INGRESS"): 3,
        ("Unsupported L3 protocol", "EGRESS"): 4,
        ("Invalid packet", "EGRESS"): 8,
        ("250, 0", "UNKNOWN"): 16,
    }
    assert series["cilium_drop_bytes_total"]["Policy denied", "INGRESS"] == 250
    assert series["cilium_forward_count_total"] == {("EGRESS",): 96, ("SERVICE",): 128}
    assert series["cilium_forward_bytes_total"] == {("EGRESS",): 9600, ("SERVICE",): 12800}
