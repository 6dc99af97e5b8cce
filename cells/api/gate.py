"""Holds requests back that need the running daemon, until it runs.

Needs: RegeneratedEndpoints, DeleteQueue (drained), HostIPSync.   Gives: Gate, StartedDaemon.
Source: Cilium 1.17, handlers that await the daemon's promise: its endpoints, identities and health. All else
is answered from the moment the socket is there.
"""

from __future__ import annotations

from typing import Final

from cells.api.part import Operation
from cells.api.wire import answer
from cells.cni.server import DeleteQueue
from cells.endpoint.restore import RegeneratedEndpoints
from cells.node.host_ip_sync import HostIPSync
from lifecycle import HiveError, Hook, Lifecycle, Promise, after
from lifecycle.http import Request, Response

BEHIND: Final = ("healthz", "endpoint", "identity", "debuginfo", "fqdn", "ip")
"""First parts of the paths under /v1 whose operations wait."""
NOT_STARTED: Final = "the agent stopped before it had started: see its log, and ask again once it is back"


class Gate:
    """Opened once; until then operations behind it wait, and are answered 503 if it never opens."""

    def __init__(self) -> None:
        self._daemon: Promise[None] = Promise()

    def open(self) -> None:
        """Let all requests through from now on."""
        if not self._daemon.resolved:
            self._daemon.resolve(None)

    def close(self) -> None:
        """Refuse all waiting requests: the server stops."""
        if not self._daemon.resolved:
            self._daemon.fail(HiveError(NOT_STARTED))
            self._daemon = Promise()  # the server may start again

    def guarded(self, path: str, operation: Operation) -> Operation:
        """The operation at the path of a route, behind the gate if it belongs there."""
        base, version, first = path.split("/")[:3]
        if (base, version) != ("", "v1") or first not in BEHIND:
            return operation

        async def handle(request: Request) -> Response:
            if not self._daemon.resolved:
                try:
                    await self._daemon.wait()
                except HiveError as error:
                    return answer(503, str(error))
            return await operation(request)

        return handle


@after(RegeneratedEndpoints, DeleteQueue, HostIPSync)
class StartedDaemon:
    """The daemon runs once its hook has: endpoints are restored, and no delete is pending."""

    def __init__(
        self,
        gate: Gate,
        lifecycle: Lifecycle,
    ) -> None:
        self._gate = gate
        lifecycle.append(Hook("open the API's gate", self._start))

    async def _start(self) -> None:
        self._gate.open()
