"""The REST API's server on its unix socket: routing, permissions, the gate, audit log and request times.

Requests pass the gate, their limiter and the audit log, in this order, before the operation of an ApiPart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace

from cells.api.operations import DISABLED, AccessSettings, ApiPart, Operation, Route, denied, operation_name
from cells.api.rate_limits import Limits
from cells.api.wire import (
    INTERNAL_ERROR,
    READING,
    FrameworkError,
    answer,
    framework_response,
    not_found_response,
    peer_of,
    plain,
)
from cells.base.metrics import Histogram
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni import DeleteQueue
from cells.endpoint.restore import RegeneratedEndpoints
from lifecycle import HiveError, Hook, Lifecycle, Logger, Promise, after
from lifecycle.http import MAX_BODY, Handler, HttpServer, Match, Refusal, Request, Response, Routes, listen

# Request times.
#
# Source: Cilium 1.17, cilium_agent_api_process_time_seconds: the path without the part that names an object.

UNKNOWN_PATH: Final = "unknown"
"""Path label for unknown paths, so that clients cannot create series."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ApiTimes:
    """Processing times by path, method and status; time of the last request by path and method."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str, str], Histogram] = {}
        """Histograms of processing times in seconds."""
        self.last: dict[tuple[str, str], float] = {}
        """Time of the last request in seconds since 1970."""

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count a response; ``path`` is that of the route, None for an unknown path."""
        known = UNKNOWN_PATH if path is None else "/".join(path.split("/")[:3])
        method = method if method in _METHODS else "OTHER"
        if (spread := self.took.get((known, method, str(status)))) is None:
            spread = self.took[known, method, str(status)] = Histogram()
        spread.observe(seconds)
        self.last[known, method] = time.time()


# Gate for requests that need the running daemon.
#
# Source: Cilium 1.17, handlers that await the daemon's promise: its endpoints, identities and health. All
#         other requests are answered as soon as the socket exists.

GATED: Final = ("healthz", "endpoint", "identity", "debuginfo", "fqdn", "ip")
"""First path elements after /v1 of operations that wait for the daemon."""
NOT_STARTED: Final = "the agent stopped before it had started: see its log, and ask again once it is back"


class Gate:
    """Delays requests until open(); if the agent stops first, they are answered with 503."""

    def __init__(self) -> None:
        self._daemon: Promise[None] = Promise()

    def open(self) -> None:
        """Let all requests pass from now on."""
        if not self._daemon.resolved:
            self._daemon.resolve(None)

    def close(self) -> None:
        """Refuse all waiting requests, when the server stops."""
        if not self._daemon.resolved:
            self._daemon.fail(HiveError(NOT_STARTED))
            self._daemon = Promise()  # the server may be started again

    def gated(self, path: str, operation: Operation) -> Operation:
        """Wrap a route's operation with the gate if its path requires the daemon."""
        base, version, first = path.split("/")[:3]
        if (base, version) != ("", "v1") or first not in GATED:
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
    """Opens the gate after endpoints are restored and queued deletions are processed."""

    def __init__(
        self,
        gate: Gate,
        lifecycle: Lifecycle,
    ) -> None:
        self._gate = gate
        lifecycle.append(Hook("open the API's gate", self._start))

    async def _start(self) -> None:
        self._gate.open()


# Audit log of changes by users of the API.

BY_PLUGINS: Final = frozenset(
    {
        *(("PUT", "/v1/endpoint/{id}"), ("DELETE", "/v1/endpoint")),
        *(("POST", "/v1/ipam"), ("POST", "/v1/ipam/{ip}"), ("DELETE", "/v1/ipam/{ip}")),
    }
)
"""Changes that CNI plugins request for pods; they are not audited."""
READ_ONLY: Final = frozenset({("POST", "/hive/policy/trial")})
"""Operations that change nothing although their method is not GET."""
_LOGGED_BYTES: Final = 1024
"""Maximum number of logged bytes of a request body, of the old and of the new state."""


def audited(route: Route, read: Operation | None, log: Logger) -> Operation:
    """Wrap a route's operation to log each change with the state before and after it.

    ``read`` is the GET operation of the same path. A partial change that ends in an error is logged as well.
    """
    if route.method in READING or (route.method, route.path) in BY_PLUGINS | READ_ONLY:
        return route.operation

    async def handle(request: Request) -> Response:
        before, status = await _current_state(read, request), 0
        try:
            response = await route.operation(request)
            status = response.status
            return response
        finally:
            with anyio.CancelScope(shield=True):  # also if the client has disconnected
                now = await _current_state(read, request)
            if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or before != now:
                _audit(request, status, before, now, log)

    return handle


async def _current_state(read: Operation | None, request: Request) -> object:
    """Return the response of GET for the same path; None if GET is refused or does not exist."""
    if read is None:
        return None
    try:
        response = await read(replace(request, method="GET", body=b""))
    except (Refusal, FrameworkError):  # then the change is refused for the same reason
        return None
    found = response.status == HTTPStatus.OK and isinstance(response.body, bytes) and response.body
    return msgspec.json.decode(found) if found else None


def _audit(request: Request, status: int, before: object, now: object, log: Logger) -> None:
    pid, uid = peer_of(request)
    old, new = _differences(before, now)
    what = {"method": request.method, "path": request.target, "body": _cut(request.body.strip())}
    log.info(
        "changed through the API", **what, old=_text(old), new=_text(new), status=status, uid=uid, pid=pid
    )


def _differences(old: object, new: object) -> tuple[object, object]:
    """Return what only the old and what only the new value has; recurses into objects and lists."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in old | new if old.get(name) != new.get(name)]
        pairs = {name: _differences(old.get(name), new.get(name)) for name in names}
        return (
            {name: was for name, (was, _) in pairs.items() if name in old},
            {name: now for name, (_, now) in pairs.items() if name in new},
        )
    if isinstance(old, list) and isinstance(new, list):
        were, are = ({msgspec.json.encode(one): one for one in some} for some in (old, new))
        return [one for key, one in were.items() if key not in are], [
            one for key, one in are.items() if key not in were
        ]
    return old, new


def _text(value: object) -> str:
    return "" if value is None else _cut(msgspec.json.encode(value))


def _cut(data: bytes) -> str:
    return data[:_LOGGED_BYTES].decode(errors="replace")


# Request handler: routing, permissions, and errors in the form of the schema.


def application(
    routes: Iterable[Route], may_change: Callable[[int], bool], times: ApiTimes, log: Logger
) -> Handler:
    """Return the handler of all routes; ``may_change`` decides which peer uids may change state."""
    known: Routes[Route] = Routes()
    for route in routes:
        known.add(route.method, route.path, route)

    async def handle(request: Request) -> Response:
        began = time.perf_counter()
        match = known.match(request.method, request.path)
        response = await answered(request, match)
        path, took = match.handler.path if match.handler else None, time.perf_counter() - began
        times.count(path, request.method, response.status, took)
        log.debug("answered", method=request.method, path=request.path, status=response.status, seconds=took)
        return response

    async def answered(request: Request, match: Match[Route]) -> Response:
        if match.handler is None:
            return not_found_response(request, match.allowed)
        if request.too_large:
            return framework_response(413, 413, f"the request body is larger than {MAX_BODY} bytes")
        try:
            return await _operate(match.handler, replace(request, match_info=match.info), may_change)
        except FrameworkError as error:
            return framework_response(error.status, error.code, error.message)
        except Exception:  # a fault in an operation must not stop the API
            log.exception("API handler failed", method=request.method, path=request.path)
            return plain(500, INTERNAL_ERROR)

    return handle


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
    """Serves the operations on the socket ``path`` from start to stop; stop removes the socket file."""

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
        # If cancelled here, asyncio would leak the listening socket.
        with anyio.CancelScope(shield=True):
            await server.serve(listener)
        self._server = server
        self._log.info("serving the API", socket=str(self.path))

    def _routes(self) -> list[Route]:
        """Return all routes, wrapped with gate and limiters; disabled operations answer 403."""
        routes = [route for part in self._parts for route in part.routes]
        names = {route: operation_name(route.method, route.path) for route in routes}
        off = denied(self._access.enable_cilium_api_server_access, names.values())
        readers = {route.path: route.operation for route in routes if route.method == "GET"}
        return [
            replace(
                route,
                operation=_disabled if names[route] in off else self._wrapped(route, readers.get(route.path)),
            )
            for route in routes
        ]

    def _wrapped(self, route: Route, read: Operation | None) -> Operation:
        """Wrap an operation.

        The gate is outermost, so that requests that wait for it occupy no slot of a limiter.
        """
        logged = replace(route, operation=audited(route, read, self._log))
        return self._gate.gated(route.path, self._limits.limited(logged))

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
    """Whether a peer may change state: root, or the agent's own user."""
    return uid in (0, os.geteuid())
