"""The REST API's server on its unix socket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import anyio
from msgspec.structs import replace

from cells.api.operations import DISABLED, AccessSettings, ApiPart, Operation, Route, denied, operation_name
from cells.api.rate_limits import Limits
from cells.api.wire import (
    INTERNAL_ERROR,
    READING,
    FrameworkError,
    answer,
    framework_answer,
    nowhere,
    peer_of,
    plain,
)
from cells.base.metrics import Histogram
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni import DeleteQueue
from cells.endpoint.restore import RegeneratedEndpoints
from lifecycle import HiveError, Hook, Lifecycle, Logger, Promise, after
from lifecycle.http import MAX_BODY, Handler, HttpServer, Match, Refusal, Request, Response, Routes, listen

# How long the API took for what it was asked, and when it was asked last.
#
# Source: Cilium 1.17, cilium_agent_api_process_time_seconds: the path without what in it stands for one
#         object.

ELSEWHERE: Final = "unknown"
"""The label for unknown paths, so that clients cannot create series."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ApiTimes:
    """Answers by path, method and status; requests by path and method."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str, str], Histogram] = {}
        """Seconds."""
        self.last: dict[tuple[str, str], float] = {}
        """When it was asked last, in seconds since the epoch."""

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count an answer; ``path`` is the route's, None where there is none."""
        known = ELSEWHERE if path is None else "/".join(path.split("/")[:3])
        method = method if method in _METHODS else "OTHER"
        if (spread := self.took.get((known, method, str(status)))) is None:
            spread = self.took[known, method, str(status)] = Histogram()
        spread.observe(seconds)
        self.last[known, method] = time.time()


# Holds requests back that need the running daemon, until it runs.
#
# Source: Cilium 1.17, handlers that await the daemon's promise: its endpoints, identities and health. All
#         else is answered from the moment the socket is there.

BEHIND: Final = ("healthz", "endpoint", "identity", "debuginfo", "fqdn", "ip")
"""First parts of the paths under /v1 with operations that wait."""
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


# The API as one handler: routes, the rule for changing calls, and errors in their documented form.

BY_PLUGINS: Final = frozenset(
    {
        *(("PUT", "/v1/endpoint/{id}"), ("PATCH", "/v1/endpoint/{id}"), ("DELETE", "/v1/endpoint")),
        *(("POST", "/v1/ipam"), ("POST", "/v1/ipam/{ip}"), ("DELETE", "/v1/ipam/{ip}")),
    }
)
"""Changes that CNI plugins make for pods that come and go."""
_SHOWN: Final = 1024
"""Bytes of a body that the log has."""


def application(
    routes: Iterable[Route], may_change: Callable[[int], bool], times: ApiTimes, log: Logger
) -> Handler:
    """The handler of these routes; ``may_change`` decides which peer uids may do more than read."""
    known: Routes[Route] = Routes()
    for route in routes:
        known.add(route.method, route.path, route)

    async def handle(request: Request) -> Response:
        began = time.perf_counter()
        match = known.match(request.method, request.path)
        response = await answered(request, match)
        path, took = match.found.path if match.found else None, time.perf_counter() - began
        times.count(path, request.method, response.status, took)
        if match.found is not None and response.status < HTTPStatus.MULTIPLE_CHOICES:
            _audit(match.found, request, log)
        log.debug("answered", method=request.method, path=request.path, status=response.status, seconds=took)
        return response

    async def answered(request: Request, match: Match[Route]) -> Response:
        if match.found is None:
            return nowhere(request, match.allowed)
        if request.too_large:
            return framework_answer(413, 413, f"the request body is larger than {MAX_BODY} bytes")
        try:
            return await _operate(match.found, replace(request, match_info=match.info), may_change)
        except FrameworkError as error:
            return framework_answer(error.status, error.code, error.message)
        except Exception:  # the API answers, whatever a handler does; the log has the trace
            log.exception("API handler failed", method=request.method, path=request.path)
            return plain(500, INTERNAL_ERROR)

    return handle


def _audit(route: Route, request: Request, log: Logger) -> None:
    """A line in the log for a change that a person or a script of theirs made."""
    if route.method in READING or (route.method, route.path) in BY_PLUGINS:
        return
    pid, uid = peer_of(request)
    body = request.body[:_SHOWN].decode(errors="replace").strip()
    changed = {"method": request.method, "path": request.path, "body": body, "uid": uid, "pid": pid}
    log.info("changed through the API", **changed)


async def _operate(route: Route, request: Request, may_change: Callable[[int], bool]) -> Response:
    if route.method not in READING:
        _, uid = peer_of(request)
        if not may_change(uid):
            return plain(403, f"{route.method} changes the node: it needs uid 0, the caller has uid {uid}\n")
    try:
        return await route.operation(request)
    except Refusal as error:
        return route.refusal(error)


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
        off = denied(self._access.enable_cilium_api_server_access, names.values())
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
