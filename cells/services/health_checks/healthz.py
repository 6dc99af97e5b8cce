"""The port that asks after the whole agent, as kube-proxy's did: ``/healthz`` with two times.

Needs: HealthCheckSettings, StatusCollector.   Gives: HealthzServer.
Source: kube-proxy's health server; Cilium 1.17, kube-proxy-replacement-healthz-bind-address.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import anyio

from cells.config import AgentConfig
from cells.observe.health import StatusCollector
from cells.services.health_checks.ports import listener
from cells.services.health_checks.settings import HealthCheckSettings
from lifecycle import Hook, Lifecycle, Logger
from lifecycle.http import SCRAPED, HttpServer, Request, Response

_NOSNIFF = {"X-Content-Type-Options": "nosniff"}


def now() -> datetime:
    """The time of day, in UTC."""
    return datetime.now(UTC)


class Healthz:
    """The answers: 200 while the agent is well, 503 with the time when it was last seen so."""

    def __init__(self, is_well: Callable[[], bool], clock: Callable[[], datetime] = now) -> None:
        self._is_well = is_well
        self._clock = clock
        self._last_well = clock()

    async def answer(self, request: Request) -> Response:
        """Any method; 404 for any other path."""
        if request.path != "/healthz":
            return Response(404, b"404 page not found\n", "text/plain; charset=utf-8", dict(_NOSNIFF))
        current, well = self._clock(), self._is_well()
        if well:
            self._last_well = current
        times = f'{{"lastUpdated": "{go_time(self._last_well)}","currentTime": "{go_time(current)}"}}'
        return Response(200 if well else 503, times.encode(), "application/json", dict(_NOSNIFF))


class HealthzServer:
    """Listens if it is asked for. Its hook raises HiveError where the address cannot be had."""

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
        assert self._address is not None  # noqa: S101  (or there is no hook)
        host, port = self._address
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener(host, port, ipv6=self._agent.ipv6))
        self._log.info("kube-proxy's healthz served", host=host or "*", port=port)


def go_time(moment: datetime) -> str:
    """As Go prints a time of UTC: fractions of a second without zeros at the end."""
    fraction = f".{moment.microsecond:06d}".rstrip("0").rstrip(".") if moment.microsecond else ""
    return f"{moment:%Y-%m-%d %H:%M:%S}{fraction} +0000 UTC"
