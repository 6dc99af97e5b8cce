"""Listens at the healthCheckNodePort of every service that has one.

Needs: Table[ServedFrontend].   Gives: HealthCheckPorts; the table ``health-check-ports``.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

import anyio
import msgspec

from cells.config import AgentConfig
from cells.services.control import ServedFrontend
from cells.services.health_checks.settings import HealthCheckSettings
from cells.services.model import HealthAnswer, health_answers
from lifecycle import (
    BatchError,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    minutes,
)
from lifecycle.http import SCRAPED, HttpServer, Request, Response

SWEEP: Final = minutes(1)


class HealthPort(msgspec.Struct, frozen=True):
    """A row of the table ``health-check-ports``: a port and what it answers."""

    port: int
    answer: HealthAnswer


class HealthCheckPorts:
    """Ports come and go with their services; one that somebody else has is degraded, and tried again."""

    def __init__(
        self,
        settings: HealthCheckSettings,
        agent: AgentConfig,
        served: Table[ServedFrontend],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self.ports: ReadTable[HealthPort] = served.filter(_is_checked).group(
            _port_of, _answered, name="health-check-ports"
        )
        """What is answered, by port."""
        if not settings.enable_health_check_nodeport:
            return
        self._target = HealthPortTarget(agent, log)
        reconciler: Reconciler[int, HealthPort] = Reconciler(self.ports, self._target, full_every=SWEEP)
        tables.add(self.ports, reconciler.statuses)
        lifecycle.append(Hook("stop answering load balancers", stop=self._target.close))
        jobs.observe("reconcile", reconciler)


class HealthPortTarget:
    """The listening ports, as the target of a reconciler."""

    def __init__(self, agent: AgentConfig, log: Logger) -> None:
        self._agent = agent
        self._log = log
        self._answers: dict[int, HealthPort] = {}
        self._servers: dict[int, HttpServer] = {}

    async def dump(self) -> Mapping[int, HealthPort]:
        """What is answered where."""
        return dict(self._answers)

    async def put(self, batch: Mapping[int, HealthPort]) -> None:
        """Answer so from now on. Raises BatchError."""
        failures: dict[int, Exception] = {}
        for port, row in batch.items():
            try:
                if port not in self._servers:
                    await self._listen(port)
                self._answers[port] = row
            except HiveError as error:
                failures[port] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[int]) -> None:
        """Listen there no more."""
        for port in batch:
            self._answers.pop(port, None)
            if (server := self._servers.pop(port, None)) is not None:
                await server.close()

    async def close(self) -> None:
        """Listen nowhere."""
        await self.drop(list(self._servers))

    async def _listen(self, port: int) -> None:
        server = HttpServer(partial(self._answer, port), grace=1.0, limits=SCRAPED, log=self._log)
        # Interrupted in the middle, it would listen and nobody could close it.
        with anyio.CancelScope(shield=True):
            await server.serve(listener("", port, ipv6=self._agent.ipv6))
            self._servers[port] = server

    async def _answer(self, port: int, request: Request) -> Response:
        del request  # any method, any path
        status, headers, body = self._answers[port].answer
        return Response(status, body, headers=dict(headers))


def listener(host: str, port: int, *, ipv6: bool) -> socket.socket:
    """A listening socket, without a host at every address of the node's families. Raises HiveError."""
    both = not host and ipv6 and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "; stop what listens there" if error.errno == errno.EADDRINUSE else ""
        raise HiveError(f"port {port} cannot be answered ({reason}){advice}") from error


def _is_checked(served: ServedFrontend) -> bool:
    return bool(_port_of(served))


def _port_of(served: ServedFrontend) -> int:
    return served.frontend.health_check_node_port


def _answered(port: int, served: Collection[ServedFrontend]) -> HealthPort:
    """The oldest service of a port has it."""
    ordered = sorted(served, key=lambda one: one.id)
    return HealthPort(port, health_answers(one.shown for one in ordered)[port])
