"""The REST API's server on its unix socket.

Needs: a path, the operations.   Gives: Api, Part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio

from cells.api.app import application
from cells.api.operations import Route
from cells.api.times import ApiTimes
from cells.http import HttpServer, listen
from lifecycle import Hook, Lifecycle, Logger

SHUTDOWN_SECONDS = 5.0


class Part(Protocol):
    """Operations that belong together."""

    def routes(self) -> Sequence[Route]:
        """All of them."""
        ...

    def close(self) -> None:
        """End what would go on for ever: the server stops."""
        ...


class Api:
    """Serves the operations at ``path`` while its hook runs; the socket file goes when it stops."""

    def __init__(
        self, path: Path, parts: Sequence[Part], times: ApiTimes, lifecycle: Lifecycle, log: Logger
    ) -> None:
        self.path = path
        self._parts = parts
        self._times = times
        self._log = log
        self._server: HttpServer | None = None
        lifecycle.append(Hook("serve the API", self._start, self._stop))

    async def _start(self) -> None:
        server = HttpServer(
            application(
                [route for part in self._parts for route in part.routes()], may_change, self._times, self._log
            ),
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
            for part in self._parts:
                part.close()
            await self._server.close()
            self._server = None


def may_change(uid: int) -> bool:
    """Whether a peer may change the node: root, or whoever the agent runs as."""
    return uid in (0, os.geteuid())
