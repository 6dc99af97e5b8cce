"""The port that Prometheus scrapes: HTTP, ``/metrics`` and nothing else.

Needs: MetricsSettings, Metrics, AgentConfig.   Gives: MetricsServer, Exposition, listen, tell_of_cells.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import anyio

from cells.config import AgentConfig
from cells.observe.metrics.family import Collector
from cells.observe.metrics.metrics import Metrics
from cells.observe.metrics.paced import Paced
from cells.observe.metrics.settings import Address, MetricsSettings
from lifecycle import HiveError, Hook, Lifecycle, Logger, Member, after

if TYPE_CHECKING:  # who only tells metrics serves nothing
    from lifecycle.http import HttpServer, Request, Response


@after(AgentConfig)
class MetricsServer:
    """Answers ``/metrics`` where an address is set. The start fails when it cannot listen there.

    It serves as soon as the node is claimed, so that a start that hangs can be looked at.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._address = settings.address
        self._server: HttpServer | None = None
        self._exposition = Exposition(metrics, log)
        if self._address is not None:
            lifecycle.append(Hook("serve metrics", self._start, self._stop))

    async def _start(self) -> None:
        address = self._address
        assert address is not None  # noqa: S101  # there is no hook without one
        self._metrics.warn_of_settings()
        try:
            listener = listen(address)
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise HiveError(
                f"prometheus-serve-addr: {address} cannot be served ({reason}): "
                "stop what listens there, or choose another address"
            ) from error
        from lifecycle.http import SCRAPED, HttpServer

        self._server = HttpServer(self._exposition.answer, grace=1.0, limits=SCRAPED, log=self._log)
        # Interrupted here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            await self._server.serve(listener)
        self._log.info("metrics served", address=str(address))

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()


class Exposition:
    """Answers ``/metrics`` in Prometheus's text form, and 404 to everything else."""

    def __init__(self, metrics: Metrics, log: Logger) -> None:
        self._metrics = metrics
        self._log = log
        self._text = Paced(self._collect)

    async def answer(self, request: Request) -> Response:
        """A request's answer."""
        from lifecycle.http import Response

        if request.path != "/metrics":
            return Response(404)
        return await self._text.get()

    async def _collect(self) -> Response:
        from cells.observe.metrics.text import CONTENT_TYPE, InconsistentError, exposition
        from lifecycle.http import Response

        try:
            text = exposition(await self._metrics.families())
        except InconsistentError as error:
            self._log.error("metrics contradict each other", error=str(error))
            return Response(500, f"{error}\n".encode(), "text/plain; charset=utf-8")
        return Response(200, text.encode(), CONTENT_TYPE)


def listen(address: Address) -> socket.socket:
    """A listening socket; without a host for both families, where the kernel has both. Raises OSError."""
    if address.host:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server(tuple(address), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", address.port))


@after(MetricsServer)
def tell_of_cells(metrics: Metrics, collectors: list[Member[Collector]], lifecycle: Lifecycle) -> None:
    """Have the cells asked once they have started, and no more before they stop."""

    async def start() -> None:
        metrics.add(collectors)

    async def stop() -> None:
        metrics.remove(collectors)

    lifecycle.append(Hook("collect metrics of the cells", start, stop))
