"""GET /healthz: how the agent is.

Needs: StatusCollector, NodeStatus.   Gives: StatusOperations.
"""

from __future__ import annotations

from cells.api.operations.node.node_status import NodeStatus
from cells.api.operations.status import mapping as status_mapping
from cells.api.operations.status.metrics import MetricsList
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, parse_bool
from cells.observe.health import StatusCollector
from lifecycle import Member
from lifecycle.http import Request, Response


class StatusOperations:
    """The agent's health, and its metrics."""

    def __init__(self, collector: StatusCollector, facts: NodeStatus, metrics: MetricsList) -> None:
        self._collector = collector
        self._facts = facts
        self._metrics = metrics
        self._models = status_mapping.StatusModels()

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/v1/healthz", self.get_healthz),
            Route("GET", "/v1/metrics", self._metrics.get),
            Route("GET", "/v1/metrics/", self._metrics.get),
        ]

    async def get_healthz(self, request: Request) -> Response:
        """GET /healthz: always 200, the verdict is in the body."""
        status = self._collector.status()
        if parse_bool(request.headers.get("brief"), default=False):
            return answer(200, status_mapping.brief_response(status, *self._facts.version()))
        return answer(200, status_mapping.status_response(status, self._facts.status(), self._models))


def part(operations: StatusOperations) -> Member[ApiPart]:
    """As a part of the API."""
    return ApiPart("status", operations.routes())
