"""Probes and metrics over HTTP: ``/healthz``, ``/readyz``, ``/metrics``.

Source: Kubernetes, liveness and readiness probes; Prometheus's text exposition format.

It serves from the beginning of the start to the end of the stop, so a start that hangs can be examined.
"""

import importlib.util
import os
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import anyio

from lifecycle.errors import HiveError
from lifecycle.hints import Member
from lifecycle.hooks import Hook, Lifecycle
from lifecycle.hooks.phase import Phase
from lifecycle.injection import Cell, Profile, after, config, invoke, module, provide
from lifecycle.jobs import JobMetrics
from lifecycle.process import (
    CONTENT_TYPE,
    Collector,
    Family,
    HealthTree,
    InconsistentError,
    Logger,
    exposition,
)
from lifecycle.settings import Settings
from lifecycle.tables import Tables

if TYPE_CHECKING:
    from lifecycle.http import HttpServer, Request, Response

__all__ = ["ProbeServer", "ProbeSettings", "Probes", "Readiness", "probes"]

PLAIN = "text/plain; charset=utf-8"


class ProbeSettings(Settings, frozen=True):
    """Settings of the probes."""

    probe_address: str = "127.0.0.1:8086"
    """HOST:PORT that answers /healthz, /readyz and /metrics; nothing for none. [::]:8086 is every address."""

    def validate(self) -> None:
        """Refuse an invalid address. Raises ValueError with one line."""
        if self.probe_address:
            self.endpoint()

    def endpoint(self) -> tuple[str, int]:
        """Host and port. Raises ValueError with one line."""
        host, _, port = self.probe_address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdecimal()) or not 0 <= int(port) <= 65535:
            raise ValueError(f"probe-address={self.probe_address}: expected HOST:PORT, as 127.0.0.1:8086")
        return host, int(port)


class Readiness:
    """Whether a part is ready: contribute it as ``Member[Readiness]``.

    `why_not` returns a line if it is not.
    """

    __slots__ = ("name", "why_not")

    def __init__(self, name: str, why_not: Callable[[], str]) -> None:
        self.name = name
        self.why_not = why_not


class Probes:
    """The answers. Cells are called from the end of their start until their stop."""

    def __init__(
        self,
        phase: Phase,
        health: HealthTree,
        jobs: JobMetrics,
        profile: Profile,
        tables: Tables,
        log: Logger,
    ) -> None:
        async def framework() -> Iterable[Family]:
            from lifecycle.production.facts import hive_families

            return hive_families(health, jobs, profile, tables)

        self._phase = phase
        self._health = health
        self._log = log
        self.readiness: list[Readiness] = []
        self.collectors = [Collector("hive", framework)]

    async def answer(self, request: "Request") -> "Response":
        """Return the answer to a request."""
        from lifecycle.http import Response

        if request.method not in {"GET", "HEAD"}:
            return Response(405, headers={"Allow": "GET, HEAD"})
        if request.path == "/healthz":
            return Response(200, self._healthy().encode(), PLAIN)
        if request.path == "/readyz":
            reasons = self.why_not_ready()
            return Response(503 if reasons else 200, "\n".join([*(reasons or ["ok"]), ""]).encode(), PLAIN)
        if request.path == "/metrics":
            try:
                return Response(200, exposition(await self._families()).encode(), CONTENT_TYPE)
            except InconsistentError as error:
                self._log.error("metrics contradict each other", error=str(error))
                return Response(500, f"{error}\n".encode(), PLAIN)
        return Response(404, b"expected /healthz, /readyz or /metrics\n", PLAIN)

    def why_not_ready(self) -> list[str]:
        """Return one line for each reason; empty if the hive runs and every part is ready."""
        if self._phase.stage != "running":
            progress = self._phase.look()
            busy = f": {', '.join(progress.busy)}" if progress.busy else ""
            return [f"{self._phase.stage}{busy}"]
        reasons = []
        for part in self.readiness:
            try:
                if why := part.why_not():
                    reasons.append(f"{part.name}: {why}")
            except Exception as error:  # noqa: BLE001  # when its check fails, the part is not ready
                reasons.append(f"{part.name}: its check has failed: {error!r}")
        return reasons

    def _healthy(self) -> str:
        """The loop answers, so a restart would not help; degraded health is for operators."""
        degraded = [status for status in self._health.snapshot() if status.level == "degraded"]
        return "\n".join(["ok", *(f"degraded: {status.module}: {status.message}" for status in degraded), ""])

    async def _families(self) -> list[Family]:
        families: list[Family] = []
        for collector in list(self.collectors):
            try:
                families += await collector.collect()
            except Exception as error:  # noqa: BLE001  # one cell's failure must not hide the others' metrics
                if collector in self.collectors:  # otherwise it has stopped
                    self._log.error("metrics could not be collected", of=collector.name, exc_info=error)
            await anyio.lowlevel.checkpoint()  # yield to the loop
        return families


class ProbeServer:
    """The port. The start fails if it cannot listen there."""

    def __init__(self, settings: ProbeSettings, probes: Probes, lifecycle: Lifecycle, log: Logger) -> None:
        self._settings = settings
        self._probes = probes
        self._log = log
        self._server: HttpServer | None = None
        self.address: tuple[str, int] | None = None
        """The address at which it listens, with the chosen port if the setting is 0."""
        if settings.probe_address:
            lifecycle.append(Hook("serve probes", self._start, self._stop))

    async def _start(self) -> None:
        from lifecycle.http import SCRAPED, HttpServer

        host, port = self._settings.endpoint()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            both = host == "::" and socket.has_dualstack_ipv6()
            listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise HiveError(
                f"probe-address: {self._settings.probe_address} cannot be served ({reason}): "
                "stop what listens there, or choose another address"
            ) from error
        self.address = listener.getsockname()[:2]
        self._server = HttpServer(self._probes.answer, grace=1.0, limits=SCRAPED, log=self._log)
        with anyio.CancelScope(shield=True):  # a cancellation here would leave a listening server
            await self._server.serve(listener)
        host, port = self.address
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        self._log.info("probes served", at=f"http://{shown}:{port}")

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()


@after(ProbeServer)
def register_collectors(
    probes: Probes,
    collectors: list[Member[Collector]],
    readiness: list[Member[Readiness]],
    lifecycle: Lifecycle,
) -> None:
    """Collect from the cells after their start, and until they stop."""

    async def start() -> None:
        probes.collectors += collectors
        probes.readiness += readiness

    async def stop() -> None:
        for collector in collectors:
            probes.collectors.remove(collector)
        for part in readiness:
            probes.readiness.remove(part)

    lifecycle.append(Hook("register collectors and readiness", start, stop))


def probes() -> Cell:
    """Return the module ``probes``: /healthz, /readyz and /metrics.

    Raises HiveError if h11 is not installed.
    """
    if importlib.util.find_spec("h11") is None:
        raise HiveError("probes() needs h11: pip install 'hive-lifecycle[http]'")
    return module(
        "probes",
        "Probes and metrics over HTTP",
        config(ProbeSettings),
        provide(Probes, ProbeServer),
        invoke(register_collectors),
    )
