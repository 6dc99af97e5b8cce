"""The REST API's server on its unix socket."""

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


# A line in the log for every change that a person made, or a script of theirs.

BY_PLUGINS: Final = frozenset(
    {
        *(("PUT", "/v1/endpoint/{id}"), ("DELETE", "/v1/endpoint")),
        *(("POST", "/v1/ipam"), ("POST", "/v1/ipam/{ip}"), ("DELETE", "/v1/ipam/{ip}")),
    }
)
"""Changes that CNI plugins make for pods that come and go: these have no lines."""
LOOKING: Final = frozenset({("POST", "/hive/policy/trial")})
"""What changes nothing, though it is asked for with another method than GET."""
_SHOWN: Final = 1024
"""Bytes of a body, and of what was before and is now, that the log has."""


def audited(route: Route, look: Operation | None, log: Logger) -> Operation:
    """The operation of a route with a line for each change; ``look`` is that of GET at the same path.

    It shows what was before and what is now. A change that is answered with an error, as it was made in part,
    has a line too.
    """
    if route.method in READING or (route.method, route.path) in BY_PLUGINS | LOOKING:
        return route.operation

    async def handle(request: Request) -> Response:
        before, status = await _shown(look, request), 0
        try:
            response = await route.operation(request)
            status = response.status
            return response
        finally:
            with anyio.CancelScope(shield=True):  # also what a client did that has disconnected since
                now = await _shown(look, request)
            if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or before != now:
                _audit(request, status, before, now, log)

    return handle


async def _shown(look: Operation | None, request: Request) -> object:
    """What GET answers where the request goes; None where there is nothing, or nothing that shows it."""
    if look is None:
        return None
    try:
        response = await look(replace(request, method="GET", body=b""))
    except (Refusal, FrameworkError):  # nothing to look at: what it is refused for, so is the change
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
    """What of either is not in the other, members of objects and items of lists one by one."""
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
    return data[:_SHOWN].decode(errors="replace")


# The API as one handler: routes, the rule for changing calls, and errors in their documented form.


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
        self._log.info("serving the API", socket=str(self.path))

    def _routes(self) -> list[Route]:
        """All of them, some behind the gate or their limiter; those that are switched off answer so."""
        routes = [route for part in self._parts for route in part.routes]
        names = {route: operation_name(route.method, route.path) for route in routes}
        off = denied(self._access.enable_cilium_api_server_access, names.values())
        looks = {route.path: route.operation for route in routes if route.method == "GET"}
        return [
            replace(
                route,
                operation=_disabled if names[route] in off else self._in_turn(route, looks.get(route.path)),
            )
            for route in routes
        ]

    def _in_turn(self, route: Route, look: Operation | None) -> Operation:
        """The gate comes first, so that requests that wait for the daemon hold no limiter's slot."""
        logged = replace(route, operation=audited(route, look, self._log))
        return self._gate.guarded(route.path, self._limits.limited(logged))

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
