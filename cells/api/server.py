"""The REST API's server on its unix socket.

Needs: a path, Operations.   Gives: Api.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from cells.api.app import application
from cells.api.operations import Operations
from cells.api.times import ApiTimes
from cells.http import HttpServer, listen
from lifecycle import Hook, Lifecycle, Logger

SHUTDOWN_SECONDS = 5.0


class Api:
    """Serves the operations at ``path`` while its hook runs; the socket file goes when it stops."""

    def __init__(
        self, path: Path, operations: Operations, times: ApiTimes, lifecycle: Lifecycle, log: Logger
    ) -> None:
        self.path = path
        self._operations = operations
        self._times = times
        self._log = log
        self._server: HttpServer | None = None
        lifecycle.append(Hook("serve the API", self._start, self._stop))

    async def _start(self) -> None:
        server = HttpServer(
            application(self._operations.routes(), may_change, self._times, self._log),
            grace=SHUTDOWN_SECONDS,
        )
        listener = listen(self.path)
        # Interrupted in the middle, asyncio would leave a server that listens and that nobody can close.
        with anyio.CancelScope(shield=True):
            await server.serve(listener)
        self._server = server
        self._log.info("API served", socket=str(self.path))

    async def _stop(self) -> None:
        if self._server is not None:
            self.path.unlink(missing_ok=True)
            self._operations.close()
            await self._server.close()
            self._server = None


def may_change(uid: int) -> bool:
    """Whether a peer may change the node: root, or whoever the agent runs as."""
    return uid in (0, os.geteuid())
