"""Health checks of load balancers: whether this node has endpoints of a service, and whether it is healthy.

Reconciler: healthCheckNodePorts of the table ``services`` in, listening ports out; and a port for the health
of the agent, in place of kube-proxy's.

Source: core/v1 ServiceSpec.healthCheckNodePort; kube-proxy's service health server.

Settings: enable-health-check-nodeport, kube-proxy-replacement-healthz-bind-address.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

import anyio
import msgspec

from cells.config import AgentConfig
from cells.observe.health import StatusCollector
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from cells.services.model.backends import HealthAnswer, health_answers
from lifecycle import (
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    ReadTable,
    Reconciler,
    Settings,
    Table,
    Tables,
    Target,
    config,
    invoke,
    minutes,
    module,
    provide,
)
from lifecycle.http import SCRAPED, HttpServer, Request, Response
from lifecycle.tables import BatchFailures

__all__ = ["HealthCheckPorts", "HealthCheckSettings", "HealthzServer", "cell"]


# Settings of health checks.


class HealthCheckSettings(Settings, frozen=True):
    """Health checks that this node answers."""

    enable_health_check_nodeport: bool = True
    """Answer on services' healthCheckNodePort whether this node has endpoints of theirs."""

    kube_proxy_replacement_healthz_bind_address: str = ""
    """Address and port that answers /healthz as kube-proxy does, such as 0.0.0.0:10256; unset: none."""

    @property
    def healthz(self) -> tuple[str, int] | None:
        """Host and port; None if unset. Raises ValueError with one line."""
        text = self.kube_proxy_replacement_healthz_bind_address
        if not text:
            return None
        host, separator, port = text.rpartition(":")
        if not separator or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"kube-proxy-replacement-healthz-bind-address={text}: expected an address and a port such as"
                " 0.0.0.0:10256 or [::]:10256"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)

    def validate(self) -> None:
        """Raise ValueError with one line for an invalid address or port."""
        _ = self.healthz


# Listens on the healthCheckNodePort of every service with one.

SWEEP: Final = minutes(1)


class HealthPort(msgspec.Struct, frozen=True):
    """A row of the table ``health-check-ports``: a port and its response."""

    port: int
    answer: HealthAnswer


class HealthCheckPorts:
    """Opens and closes the ports of services; a port in use degrades health and is retried."""

    def __init__(
        self,
        settings: HealthCheckSettings,
        agent: AgentConfig,
        served: Table[FrontendKey, ServedFrontend],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self.ports: ReadTable[int, HealthPort] = served.filter(_is_checked).group(
            _port_of, _answered, name="health-check-ports"
        )
        """The responses by port."""
        if not settings.enable_health_check_nodeport:
            return
        self._target = HealthPortTarget(agent, log)
        reconciler: Reconciler[int, HealthPort] = Reconciler(self.ports, self._target, full_every=SWEEP)
        tables.add(self.ports, reconciler.statuses)
        lifecycle.append(Hook("stop answering load balancers", stop=self._target.close))
        jobs.observe("reconcile", reconciler)


class HealthPortTarget(Target[int, HealthPort, HealthPort]):
    """The target of the reconciler: HTTP servers by port."""

    def __init__(self, agent: AgentConfig, log: Logger) -> None:
        self._agent = agent
        self._log = log
        self._answers: dict[int, HealthPort] = {}
        self._servers: dict[int, HttpServer] = {}

    async def observe(self) -> Mapping[int, HealthPort]:
        """Return the current responses by port."""
        return dict(self._answers)

    async def put(self, batch: Mapping[int, HealthPort]) -> None:
        """Open ports, or change their responses. Raises BatchError."""
        with BatchFailures(HiveError) as failures:
            for port, row in batch.items():
                with failures.of(port):
                    if port not in self._servers:
                        await self._listen(port)
                    self._answers[port] = row

    async def drop(self, batch: Collection[int]) -> None:
        """Close ports."""
        for port in batch:
            self._answers.pop(port, None)
            if (server := self._servers.pop(port, None)) is not None:
                await server.close()

    async def close(self) -> None:
        """Close all ports."""
        await self.drop(list(self._servers))

    async def _listen(self, port: int) -> None:
        server = HttpServer(partial(self._answer, port), grace=1.0, limits=SCRAPED, log=self._log)
        # If this were cancelled half-way, the server would listen, but drop() would not close it.
        with anyio.CancelScope(shield=True):
            await server.serve(listener("", port, ipv6=self._agent.ipv6))
            self._servers[port] = server

    async def _answer(self, port: int, request: Request) -> Response:
        del request  # any method, any path
        status, headers, body = self._answers[port].answer
        return Response(status, body, headers=dict(headers))


def listener(host: str, port: int, *, ipv6: bool) -> socket.socket:
    """Return a listening socket; without a host, on every address in the node's families.

    Raises HiveError.
    """
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
    return served.frontend.answered_port


def _answered(port: int, served: Collection[ServedFrontend]) -> HealthPort:
    """Return the response of the service with the lowest ID, if several have the port."""
    ordered = sorted(served, key=lambda one: one.id)
    return HealthPort(port, health_answers(one.in_maps for one in ordered)[port])


# The port for the health of the agent, as in kube-proxy: ``/healthz`` with two times.
#
# Source: kube-proxy's health server; Cilium 1.17, kube-proxy-replacement-healthz-bind-address.

_NOSNIFF = {"X-Content-Type-Options": "nosniff"}


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class Healthz:
    """Responds with 200 while the agent is healthy, otherwise 503 with the last healthy time."""

    def __init__(self, is_well: Callable[[], bool], clock: Callable[[], datetime] = now) -> None:
        self._is_well = is_well
        self._clock = clock
        self._last_well = clock()

    async def answer(self, request: Request) -> Response:
        """Respond to any method; 404 for any other path."""
        if request.path != "/healthz":
            return Response(404, b"404 page not found\n", "text/plain; charset=utf-8", dict(_NOSNIFF))
        current, well = self._clock(), self._is_well()
        if well:
            self._last_well = current
        times = f'{{"lastUpdated": "{go_time(self._last_well)}","currentTime": "{go_time(current)}"}}'
        return Response(200 if well else 503, times.encode(), "application/json", dict(_NOSNIFF))


class HealthzServer:
    """Listens if the address is set; its start hook raises HiveError if it cannot."""

    def __init__(
        self,
        settings: HealthCheckSettings,
        agent: AgentConfig,
        status: StatusCollector,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._address = settings.healthz
        self._agent = agent
        self._log = log
        answers = Healthz(lambda: status.status().serves)
        self._server = HttpServer(answers.answer, grace=1.0, limits=SCRAPED, log=log)
        if self._address is not None:
            lifecycle.append(Hook("serve kube-proxy's healthz", self._start, self._server.close))

    async def _start(self) -> None:
        assert self._address is not None  # noqa: S101  (the hook needs it)
        host, port = self._address
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener(host, port, ipv6=self._agent.ipv6))
        self._log.info("kube-proxy's healthz served", host=host or "*", port=port)


def go_time(moment: datetime) -> str:
    """Format a UTC time as Go does: fractions of a second without trailing zeros."""
    fraction = f".{moment.microsecond:06d}".rstrip("0").rstrip(".") if moment.microsecond else ""
    return f"{moment:%Y-%m-%d %H:%M:%S}{fraction} +0000 UTC"


cell = module(
    "service-health-checks",
    "Health checks of load balancers",
    config(HealthCheckSettings),
    provide(HealthCheckPorts, HealthzServer),
    invoke(HealthCheckPorts, HealthzServer),
)
