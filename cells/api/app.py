"""The aiohttp application: routes, the rule for changing calls, and errors in their documented form.

Needs: Operations.   Gives: application.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cells.api.operations import Route
from cells.api.wire import (
    INTERNAL_ERROR,
    FrameworkError,
    Handler,
    framework_answer,
    peer_uid,
    plain,
    refusal,
)
from cells.endpoint import EndpointError
from cells.ipam import IpamError
from lifecycle import Logger

if TYPE_CHECKING:
    from aiohttp import web

READING = frozenset({"GET", "HEAD"})
MAX_BODY = 1 << 20


def application(routes: Iterable[Route], may_change: Callable[[int], bool], log: Logger) -> web.Application:
    """The application of these routes; ``may_change`` says which peer uids may do more than read."""
    from aiohttp import web

    @web.middleware
    async def documented_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except FrameworkError as error:
            return framework_answer(error.status, error.code, error.message)
        except web.HTTPException as error:
            return refusal(request, error)
        except Exception:  # the API answers, whatever a handler does; the log has the trace
            log.exception("API handler failed", method=request.method, path=request.path)
            return plain(500, INTERNAL_ERROR)

    app = web.Application(middlewares=[documented_errors], client_max_size=MAX_BODY)
    for route in routes:
        app.router.add_route(route.method, route.path, _handler(route, may_change))
    return app


def _handler(route: Route, may_change: Callable[[int], bool]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if route.method not in READING:
            uid = peer_uid(request)
            if not may_change(uid):
                return plain(
                    403, f"{route.method} changes the node: it needs uid 0, the caller has uid {uid}\n"
                )
        try:
            return await route.operation(request)
        except (EndpointError, IpamError) as error:
            return route.refusal(error)

    return handle
