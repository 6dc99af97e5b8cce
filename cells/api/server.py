"""The REST API's server on its unix socket.

Needs: a path, Operations.   Gives: Api.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from cells.api.app import application
from cells.api.operations import Operations
from cells.api.unix_socket import listen
from lifecycle import Hook, Lifecycle, Logger

if TYPE_CHECKING:
    from aiohttp import web

SHUTDOWN_SECONDS = 5.0


class Api:
    """Serves the operations at ``path`` while its hook runs; the socket file goes when it stops."""

    def __init__(self, path: Path, operations: Operations, lifecycle: Lifecycle, log: Logger) -> None:
        self.path = path
        self._operations = operations
        self._log = log
        self._runner: web.AppRunner | None = None
        lifecycle.append(Hook("serve the API", self._start, self._stop))

    async def _start(self) -> None:
        from aiohttp import web

        app = application(self._operations.routes(), may_change, self._log)
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        # Interrupted in the middle, asyncio would leave a server that listens and that nobody can close.
        with anyio.CancelScope(shield=True):
            await runner.setup()
            try:
                await web.SockSite(runner, listen(self.path)).start()
            except BaseException:
                await runner.cleanup()
                raise
        self._runner = runner
        self._log.info("API served", socket=str(self.path))

    async def _stop(self) -> None:
        if self._runner is not None:
            self.path.unlink(missing_ok=True)
            self._operations.close()
            await self._runner.cleanup()
            self._runner = None


def may_change(uid: int) -> bool:
    """Whether a peer may change the node: root, or whoever the agent runs as."""
    return uid in (0, os.geteuid())
