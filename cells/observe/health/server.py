"""The probe endpoint: HTTP on the loopback address of each family, ``/healthz`` answers 200 or 503, no body.

Needs: AgentConfig, HealthServerSettings, StatusCollector, AgentReady.   Gives: HealthServer.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass

import anyio

from cells.config import AgentConfig
from cells.observe.health.status import StatusCollector
from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings, after
from lifecycle.http import SCRAPED, HttpServer, Request, Response

HOST, HOST6 = "127.0.0.1", "::1"


class HealthServerSettings(Settings, frozen=True):
    """Settings of the health cell."""

    agent_health_port: int = 9879
    """TCP port on 127.0.0.1, or ::1, that answers the kubelet's probes."""

    def validate(self) -> None:
        """Refuse what is no port; raises ValueError with one line."""
        if not 1 <= self.agent_health_port <= 65535:
            raise ValueError(f"agent-health-port={self.agent_health_port}: expected a TCP port, 1 to 65535")


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Says that everything a healthy agent does has started.

    The composition provides it from the last things to start, so that a probe succeeds only after them.
    """


@after(AgentReady)
class HealthServer:
    """Answers ``/healthz`` with any method: 200 when the agent serves, else 503; no body.

    Unlike Cilium's it goes on with 200 while only the key-value store has failed: the kubelet would kill the
    agent for it, and a restart mends nothing. The API tells.

    Without Kubernetes the header ``require-k8s-connectivity`` changes nothing, so it is not read.
    """

    def __init__(
        self,
        *,
        settings: HealthServerSettings,
        agent: AgentConfig,
        collector: StatusCollector,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._port = settings.agent_health_port
        self._hosts = [host for host, family in ((HOST, agent.ipv4), (HOST6, agent.ipv6)) if family]
        self._collector = collector
        self._log = log
        self._servers: list[HttpServer] = []
        lifecycle.append(Hook("serve health", self._start, self._stop))

    async def _start(self) -> None:
        with ExitStack() as opened:
            found = (self._listen(host) for host in self._hosts)
            listeners = [opened.enter_context(each) for each in found if each is not None]
            opened.pop_all()
        if not listeners:
            raise HiveError(
                f"agent-health-port: this node has no loopback address ({' or '.join(self._hosts)})"
            )
        # Interrupted here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            for listener in listeners:
                server = HttpServer(self._answer, grace=1.0, limits=SCRAPED, log=self._log)
                await server.serve(listener)
                self._servers.append(server)
        self._log.info("health served", addresses=", ".join(self._hosts), port=self._port)

    def _listen(self, host: str) -> socket.socket | None:
        """A listener; None where the node has no such address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, self._port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise HiveError(
                f"agent-health-port: {host}:{self._port} cannot be served ({reason}): "
                "stop what listens there, or choose another port"
            ) from error

    async def _stop(self) -> None:
        while self._servers:
            await self._servers.pop().close()

    async def _answer(self, request: Request) -> Response:
        if request.path != "/healthz":
            return Response(404)
        return Response(200 if self._collector.status().serves else 503)
