"""The agent's metrics as JSON: ``cilium-dbg metrics list`` asks for them, up to 1.16.

Needs: Metrics.   Gives: MetricsList.
Source: Cilium's OpenAPI document, GET /metrics/; a histogram has one value, the sum of what it has seen.
"""

from __future__ import annotations

from cells.api.models.v1 import Metric
from cells.api.wire import answer
from cells.observe.metrics import Family, Histogram, Metrics
from lifecycle.http import Request, Response


class MetricsList:
    """Answers with what a scrape would show; also where no port serves it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def get(self, _request: Request) -> Response:
        """GET /metrics and /metrics/."""
        families = sorted(await self._metrics.families(), key=lambda family: family.name)
        return answer(200, [metric for family in families for metric in _metrics(family)])


def _metrics(family: Family) -> list[Metric]:
    return [
        Metric(
            name=family.name,
            value=value.sum if isinstance(value, Histogram) else float(value),
            labels=dict(zip(family.labels, labels, strict=True)),
        )
        for labels, value in sorted(family.series.items())
    ]
