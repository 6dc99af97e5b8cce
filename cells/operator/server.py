"""Serves the operator's health and state on port 9234, and metrics for Prometheus on port 9963.

A probe queries the API server; each scrape renders the metrics anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import anyio
import msgspec

from cells.base.metrics import Histogram, MetricChoice, MetricFamily
from cells.kubernetes.client.errors import KubernetesError
from cells.observe.metrics import Exposition, ListenAddress, Metrics, MetricsProgram, listen
from cells.operator.api_server import ClusterAPI
from cells.operator.leader import Leadership
from lifecycle import (
    HealthTree,
    Hook,
    Lifecycle,
    Logger,
    Settings,
    after,
    config,
    group,
    invoke,
    module,
    provide,
    supply,
)
from lifecycle.http import SCRAPED, HttpServer, Request, Response

__all__ = ["OperatorServer", "ServerSettings", "cell"]


# HTTP of the operator for probes, ``hive operator status`` and Prometheus.
#
# Source: Cilium 1.17's operator: /healthz and /v1/healthz answer 200 ``ok`` if GET /version of the API server
#         succeeds, on leaders and others; /v1/metrics is JSON.

JSON, TEXT, PLAIN = "application/json", "text/plain; charset=utf-8", "text/plain"
LONGEST_ANSWER = 5.0
"""Timeout of the API server's answer in seconds, while a probe waits."""


OPERATIONS: Final = {
    "GetCluster": ("/v1/cluster", "/v1/cluster/"),
    "GetHealthz": ("/healthz", "/v1/healthz"),
    "GetMetrics": ("/v1/metrics", "/v1/metrics/"),
}
"""Cilium's name of each operation -> its paths."""
DISABLED: Final = "This API is administratively disabled. Contact your administrator for more details."


class ServerSettings(Settings, frozen=True):
    """Addresses and operations of the operator's servers."""

    operator_api_serve_addr: str = "localhost:9234"
    """Address that answers probes and ``hive operator status``."""

    operator_prometheus_serve_addr: str = ":9963"
    """Address that serves metrics, with enable-metrics."""

    enable_metrics: bool = False
    """Serve metrics for Prometheus."""

    enable_cilium_operator_server_access: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """Enabled operations: GetCluster, GetHealthz, GetMetrics; a name may end in ``*``."""

    @property
    def disabled(self) -> frozenset[str]:
        """The paths of disabled operations."""
        allowed = {
            name for text in self.enable_cilium_operator_server_access for name in _matching_operations(text)
        }
        return frozenset(path for name, paths in OPERATIONS.items() if name not in allowed for path in paths)

    def faults(self) -> Iterator[str]:
        for name in ("operator_api_serve_addr", "operator_prometheus_serve_addr"):
            text: str = getattr(self, name)
            try:
                ListenAddress.parse(text)
            except ValueError as error:
                yield f"{name.replace('_', '-')}={text}: {error}"
        for text in self.enable_cilium_operator_server_access:
            if not _matching_operations(text):
                known = ", ".join(OPERATIONS)
                yield f"enable-cilium-operator-server-access={text}: expected * or some of {known}"


def _matching_operations(text: str) -> set[str]:
    """Return the operations that match a name, which may end in ``*``."""
    start = text.removesuffix("*")
    return {name for name in OPERATIONS if name == text or (start != text and name.startswith(start))}


class OperatorServer:
    """Both servers; the start fails if an address cannot be bound."""

    def __init__(
        self,
        settings: ServerSettings,
        server: ClusterAPI,
        leadership: Leadership,
        metrics: Metrics,
        tree: HealthTree,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._api = server
        self._leadership = leadership
        self._metrics = metrics
        self._tree = tree
        self._log = log
        self._exposition = Exposition(metrics, log)
        self._servers: list[HttpServer] = []
        self._routes: dict[str, Callable[[], Awaitable[Response]]] = {
            "/healthz": self._healthz,
            "/v1/healthz": self._v1_healthz,
            "/v1/metrics": self._metrics_json,
            "/v1/metrics/": self._metrics_json,
            "/v1/cluster": self._clusters,
            "/v1/cluster/": self._clusters,
            "/hive/status": self._status,
        }
        lifecycle.append(Hook("serve health and metrics", self._start, self._stop))

    async def _start(self) -> None:
        settings = self._settings
        try:
            await self._serve("operator-api-serve-addr", settings.operator_api_serve_addr, self._answer)
            if settings.enable_metrics:
                where = settings.operator_prometheus_serve_addr
                await self._serve("operator-prometheus-serve-addr", where, self._exposition.answer)
        except BaseException:
            await self._stop()
            raise

    async def _serve(
        self, setting: str, where: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> None:
        listener = listen(setting, ListenAddress.parse(where))
        server = HttpServer(handler, grace=1.0, limits=SCRAPED, log=self._log)
        with anyio.CancelScope(shield=True):  # or asyncio leaves a server that listens and cannot be closed
            await server.serve(listener)
        self._servers.append(server)
        self._log.info("served", setting=setting, address=where)

    async def _stop(self) -> None:
        while self._servers:
            await self._servers.pop().close()

    async def _answer(self, request: Request) -> Response:
        path = request.path
        if path in self._settings.disabled:
            return Response(403, DISABLED.encode(), TEXT)
        route = self._routes.get(path)
        if route is None:
            body = {"code": 404, "message": f"path {request.path} was not found"}
            return Response(404, msgspec.json.encode(body), JSON)
        if path.startswith("/v1/") and request.method != "GET":
            body = {"code": 405, "message": f"method {request.method} is not allowed, but [GET] are"}
            return Response(405, msgspec.json.encode(body), JSON, {"Allow": "GET"})
        return await route()

    async def _v1_healthz(self) -> Response:
        return msgspec.structs.replace(await self._healthz(), content_type=PLAIN)

    async def _healthz(self) -> Response:
        try:
            with anyio.fail_after(LONGEST_ANSWER):
                await self._api.client.raw("GET", "/version")
        except (KubernetesError, TimeoutError) as error:
            text = str(error) or f"the API server does not answer within {LONGEST_ANSWER:g} s"
            return Response(500, text.encode(), TEXT)
        return Response(200, b"ok", TEXT)

    async def _metrics_json(self) -> Response:
        families = sorted(await self._metrics.families(), key=lambda one: one.name)
        found = [one for family in families for one in _json_rows(family)]
        return Response(200, msgspec.json.encode(found), JSON)

    async def _clusters(self) -> Response:
        """Answer with an empty list: the operator connects no clusters."""
        return Response(200, b"[]\n", JSON)

    async def _status(self) -> Response:
        leadership = self._leadership
        found = {
            "identity": leadership.identity,
            "leader": leadership.leader,
            "leads": leadership.leads,
            "server": self._api.client.server,
            "modules": self._tree.snapshot(),
        }
        return Response(200, msgspec.json.encode(found), JSON)


def _json_rows(family: MetricFamily) -> Iterator[dict[str, object]]:
    """Yield each series as in Cilium's /v1/metrics; a histogram is its count."""
    for values, value in sorted(family.series.items()):
        one: dict[str, object] = {"name": family.name}
        if family.labels:
            one["labels"] = dict(zip(family.labels, values, strict=True))
        number = value.count if isinstance(value, Histogram) else value
        yield {**one, "value": number} if number else one


def default_metrics() -> MetricChoice:
    """Return the default choice: all metrics that are on."""
    return MetricChoice()


@after(OperatorServer)
def serve() -> None:
    """Start both servers."""


cell = group(
    module(
        "metrics",
        "Metrics of the operator",
        provide(default_metrics, Metrics),
        supply(MetricsProgram("cilium_operator")),
    ),
    module(
        "server",
        "Health, state and metrics of the operator",
        config(ServerSettings),
        provide(OperatorServer),
        invoke(serve),
    ),
)
