"""The REST API of cilium-health on ``health.sock``, compatible with Cilium 1.17's clients.

It serves the last report of the health prober. ``cilium-health`` prints nodes only if its own node is among
them under the name in ``local``, and reads every node's ``host``.

Source: Cilium 1.17, api/v1/health/openapi.yaml and pkg/health/server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from cells.api.models import Model
from cells.api.models import status as wire
from cells.api.operations import DISABLED, Operation, denied
from cells.api.operations.endpoint_models import rfc3339
from cells.api.operations.status import StatusModels, StatusSummary, status_response
from cells.api.wire import answer, not_found_response, plain
from cells.config import AgentConfig
from cells.health import (
    ClusterHealth,
    ClusterReport,
    NodeReport,
    Outcome,
    ProbedPath,
    ProbeResponder,
)
from cells.observe.health import StatusCollector
from lifecycle import Duration, Hook, Lifecycle, Logger, Settings
from lifecycle.http import HttpServer, Request, Response, Routes, listen

SOCKET: Final = "health.sock"
GRACE: Final = 1.0
"""Seconds that open requests may take while the server stops."""


# Wire types of responses.


class ConnectivityStatus(Model, frozen=True):
    """One probe: the latency of its answer in nanoseconds, or in ``status`` why it failed."""

    latency: int = 0
    status: str = ""


class PathStatus(Model, frozen=True):
    """Probes of one address; a probe without a result yet is absent."""

    ip: str
    icmp: ConnectivityStatus | None = None
    http: ConnectivityStatus | None = None


class NodeAddressesStatus(Model, frozen=True):
    """Probes of a node's own addresses, or of those of its health endpoint."""

    primary_address: PathStatus
    secondary_addresses: list[PathStatus]


class NodeConnectivity(Model, frozen=True):
    """Probes of one node.

    ``since`` is the time of its last change of reachability; Cilium has no such field.
    """

    name: str
    host: NodeAddressesStatus | None = None
    health_endpoint: NodeAddressesStatus | None = None
    endpoint: PathStatus | None = None
    """Deprecated: the primary address of the health endpoint."""
    since: str = ""


class OwnNode(Model, frozen=True):
    """The node that answers the request."""

    name: str


class HealthStatusResponse(Model, frozen=True):
    """The answer to GET /status: the last report."""

    local: OwnNode
    nodes: list[NodeConnectivity] | None
    timestamp: str


class LoadAverages(Model, frozen=True):
    """The node's load averages, from /proc/loadavg."""

    last1min: str
    last5min: str
    last15min: str


class HealthResponse(Model, frozen=True):
    """The answer to GET /healthz: the agent's status, the uptime of health.sock, the node's load."""

    cilium: wire.StatusResponse
    uptime: str
    system_load: LoadAverages


def connectivity(own: str, report: ClusterReport) -> HealthStatusResponse:
    """Convert a report of the prober to its wire type."""
    nodes = None if report.nodes is None else [node_connectivity(node) for node in report.nodes]
    local = OwnNode(name="" if nodes is None else own)
    return HealthStatusResponse(local=local, nodes=nodes, timestamp=rfc3339(report.started))


def node_connectivity(node: NodeReport) -> NodeConnectivity:
    """Convert the report of one node to its wire type."""
    endpoint = _addresses(node.endpoint)
    return NodeConnectivity(
        name=node.name,
        host=_addresses(node.host),
        health_endpoint=endpoint,
        endpoint=endpoint.primary_address if endpoint is not None else None,
        since=rfc3339(node.since),
    )


def _addresses(paths: Sequence[ProbedPath]) -> NodeAddressesStatus | None:
    if not paths:
        return None
    primary, *secondary = map(_path, paths)
    return NodeAddressesStatus(primary_address=primary, secondary_addresses=secondary)


def _path(path: ProbedPath) -> PathStatus:
    return PathStatus(ip=path.ip, icmp=_outcome(path.icmp), http=_outcome(path.http))


def _outcome(outcome: Outcome | None) -> ConnectivityStatus | None:
    if outcome is None:
        return None
    return ConnectivityStatus(latency=outcome.latency, status=outcome.failure)


def health_state(responder: ProbeResponder | None) -> wire.Status:
    """Return the state of the health probes, ``ciliumHealth`` in the agent's status."""
    if responder is None or not responder.enabled:
        return wire.Status(state="Disabled")
    if responder.failure:
        return wire.Status(state="Warning", msg=responder.failure)
    return wire.Status(state="Ok")


# Server.


class HealthApiSettings(Settings, frozen=True):
    """Settings of ``health.sock``."""

    enable_cilium_health_api_server_access: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """Operations of health.sock that are enabled: GetHealthz, GetStatus, PutStatusProbe; a name may end
    in ``*``."""


class HealthApi:
    """Serves the last report on ``health.sock`` if enable-health-checking is true."""

    def __init__(
        self,
        agent: AgentConfig,
        collector: StatusCollector,
        facts: StatusSummary,
        settings: HealthApiSettings,
        health: ClusterHealth | None = None,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self.path = agent.state_dir / SOCKET
        self._settings = settings
        self._health = health
        self._collector = collector
        self._facts = facts
        self._models = StatusModels()
        self._log = log
        self._began = 0.0
        self._routes: Routes[Operation] = Routes()
        self._server = HttpServer(self._answer, grace=GRACE, log=log)
        if health is not None and health.enabled:
            lifecycle.append(Hook("serve cilium-health's API", self._start, self._stop))

    async def _start(self) -> None:
        """Start the server.

        Raises UsageError if the setting names an unknown operation, HiveError if the socket is in use.
        """
        operations: dict[str, tuple[str, str, Operation]] = {
            "GetHealthz": ("GET", "/v1beta/healthz", self._healthz),
            "GetStatus": ("GET", "/v1beta/status", self._status),
            "PutStatusProbe": ("PUT", "/v1beta/status/probe", self._status),
        }
        allowed = self._settings.enable_cilium_health_api_server_access
        off = denied(allowed, operations, "enable-cilium-health-api-server-access")
        self._routes = Routes()
        for name, (method, path, operation) in operations.items():
            self._routes.add(method, path, _forbidden if name in off else operation)
        self._server = HttpServer(self._answer, grace=GRACE, log=self._log)
        self._began = time.monotonic()
        listener = listen(self.path, group="cilium")
        # If cancelled here, asyncio would leak the listening socket.
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener)

    async def _stop(self) -> None:
        self.path.unlink(missing_ok=True)
        await self._server.close()

    async def _answer(self, request: Request) -> Response:
        match = self._routes.match(request.method, request.path)
        return (
            not_found_response(request, match.allowed)
            if match.handler is None
            else await match.handler(request)
        )

    async def _status(self, _request: Request) -> Response:
        """GET /status and PUT /status/probe: return the last report; no probe is started."""
        if self._health is None:
            return answer(500, "nodes are not probed")
        return answer(200, connectivity(self._health.own, self._health.report))

    async def _healthz(self, _request: Request) -> Response:
        """GET /healthz: return the agent's status, uptime and the node's load."""
        status = status_response(self._collector.status(), self._facts.status(), self._models)
        one, five, fifteen = (f"{load:.2f}" for load in os.getloadavg())
        load = LoadAverages(last1min=one, last5min=five, last15min=fifteen)
        uptime = str(Duration(round(time.monotonic() - self._began, 3)))
        return answer(200, HealthResponse(cilium=status, uptime=uptime, system_load=load))


async def _forbidden(_request: Request) -> Response:
    return plain(403, DISABLED)
