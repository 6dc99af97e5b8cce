"""The REST API's server on its unix socket.

Needs: a path, the parts that cells contribute.   Gives: Api.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
from msgspec.structs import replace

from cells.api.access import DISABLED, AccessSettings, denied, operation_name
from cells.api.app import application
from cells.api.gate import Gate
from cells.api.limiter.limited import Limits
from cells.api.part import ApiPart, Operation, Route
from cells.api.times import ApiTimes
from cells.api.wire import plain
from lifecycle import Hook, Lifecycle, Logger
from lifecycle.http import HttpServer, Request, Response, listen

SHUTDOWN_SECONDS = 5.0


class Api:
    """Serves the operations at ``path`` while its hook runs; the socket file goes when it stops."""

    def __init__(
        self,
        path: Path,
        parts: Sequence[ApiPart],
        gate: Gate,
        times: ApiTimes,
        access: AccessSettings,
        limits: Limits,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self.path = path
        self._parts = parts
        self._gate = gate
        self._access = access
        self._limits = limits
        self._times = times
        self._log = log
        self._server: HttpServer | None = None
        lifecycle.append(Hook("serve the API", self._start, self._stop))

    async def _start(self) -> None:
        server = HttpServer(
            application(self._routes(), may_change, self._times, self._log),
            grace=SHUTDOWN_SECONDS,
            log=self._log,
        )
        self._limits.open()
        for part in self._parts:
            part.open()
        listener = listen(self.path, group="cilium")
        # Interrupted here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            await server.serve(listener)
        self._server = server
        self._log.info("API served", socket=str(self.path))

    def _routes(self) -> list[Route]:
        """All of them, some behind the gate or their limiter; those that are switched off answer so."""
        routes = [route for part in self._parts for route in part.routes]
        names = {route: operation_name(route.method, route.path) for route in routes}
        off = denied(self._access, names.values())
        return [
            replace(route, operation=_disabled if names[route] in off else self._in_turn(route))
            for route in routes
        ]

    def _in_turn(self, route: Route) -> Operation:
        """The gate comes first, so that requests that wait for the daemon hold no limiter's slot."""
        return self._gate.guarded(route.path, self._limits.limited(route))

    async def _stop(self) -> None:
        if self._server is not None:
            self.path.unlink(missing_ok=True)
            self._gate.close()
            self._limits.close()
            for part in self._parts:
                part.close()
            await self._server.close()
            self._server = None


async def _disabled(_request: Request) -> Response:
    return plain(403, DISABLED)


def may_change(uid: int) -> bool:
    """Whether a peer may change the node: root, or the agent's own user."""
    return uid in (0, os.geteuid())
