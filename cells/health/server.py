"""The probe endpoint: HTTP on 127.0.0.1, ``/healthz`` answers 200 or 503 with an empty body.

Needs: HealthServerSettings, StatusCollector, AgentReady.   Gives: HealthServer.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import anyio

from cells.health.status import StatusCollector
from cells.http import HttpServer, Request, Response
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings

HOST = "127.0.0.1"


class HealthServerSettings(Settings, frozen=True):
    """Settings of the health cell."""

    agent_health_port: int = 9879
    """TCP port on 127.0.0.1 that answers the kubelet's probes."""

    def validate(self) -> None:
        """Refuse what is no port; raises ValueError with one line."""
        if not 1 <= self.agent_health_port <= 65535:
            raise ValueError(f"agent-health-port={self.agent_health_port}: expected a TCP port, 1 to 65535")


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Says that everything a healthy agent does has started.

    The composition provides it from the last things to start, so that a probe succeeds only after them.
    """


class HealthServer:
    """Answers ``/healthz`` with any method: 200 when the agent serves, else 503; no body.

    Without Kubernetes the header ``require-k8s-connectivity`` changes nothing, so it is not read.
    """

    def __init__(
        self,
        *,
        settings: HealthServerSettings,
        collector: StatusCollector,
        _ready: AgentReady,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._port = settings.agent_health_port
        self._collector = collector
        self._log = log
        self._server = HttpServer(self._answer, grace=1.0)
        lifecycle.append(Hook("serve health", self._start, self._server.close))

    async def _start(self) -> None:
        try:
            listener = socket.create_server((HOST, self._port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise HiveError(
                f"agent-health-port: {HOST}:{self._port} cannot be served ({reason}): "
                "stop what listens there, or choose another port"
            ) from error
        # Interrupted in the middle, asyncio would leave a server that listens and that nobody can close.
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener)
        self._log.info("health served", address=f"{HOST}:{self._port}")

    async def _answer(self, request: Request) -> Response:
        if request.path != "/healthz":
            return Response(404)
        return Response(200 if self._collector.status().serves else 503)
