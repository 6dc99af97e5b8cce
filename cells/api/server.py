"""The REST API's server on its unix socket.

Needs: the cells the operations ask, and those that must have come before.   Gives: Api.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cells.api.app import application
from cells.api.node_view import NodeView
from cells.api.operations import Operations
from cells.api.unix_socket import listen
from cells.cni_server import DeleteQueue
from cells.config import AgentConfig
from cells.endpoint import Endpoints
from cells.endpoint_restore import ExposedEndpoints
from cells.health import StatusCollector, WebFramework
from cells.ipam import Ipam
from cells.maps import PolicyMaps
from lifecycle import Hook, Lifecycle, Logger

if TYPE_CHECKING:
    from aiohttp import web

SHUTDOWN_SECONDS = 5.0


class Api:
    """Serves the operations on ``cilium.sock`` while its hook runs.

    It starts after the restored endpoints are visible and the delete queue is drained, so whoever can
    connect sees the whole node. The socket file goes when it stops.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        endpoints: Endpoints,
        policies: PolicyMaps,
        ipam: Ipam,
        collector: StatusCollector,
        view: NodeView,
        _exposed: ExposedEndpoints,
        _drained: DeleteQueue,
        _framework: WebFramework,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self.path = config.api_socket
        self._operations = Operations(endpoints, policies, ipam, collector, view)
        self._log = log
        self._runner: web.AppRunner | None = None
        lifecycle.append(Hook("serve the API", self._start, self._stop))

    async def _start(self) -> None:
        from aiohttp import web

        app = application(self._operations.routes(), may_change, self._log)
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
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
            await self._runner.cleanup()
            self._runner = None


def may_change(uid: int) -> bool:
    """Whether a peer may change the node: root, or whoever the agent runs as."""
    return uid in (0, os.geteuid())
