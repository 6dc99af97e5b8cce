"""The API as one handler: routes, the rule for changing calls, and errors in their documented form.

Needs: Operations, ApiTimes.   Gives: application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from cells.api.part import Route
from cells.api.times import ApiTimes
from cells.api.wire import INTERNAL_ERROR, READING, FrameworkError, framework_answer, nowhere, peer_uid, plain
from lifecycle import Logger
from lifecycle.http import MAX_BODY, Handler, Match, Refusal, Request, Response, Routes


def application(
    routes: Iterable[Route], may_change: Callable[[int], bool], times: ApiTimes, log: Logger
) -> Handler:
    """The handler of these routes; ``may_change`` says which peer uids may do more than read."""
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
        uid = peer_uid(request)
        if not may_change(uid):
            return plain(403, f"{route.method} changes the node: it needs uid 0, the caller has uid {uid}\n")
    try:
        return await route.operation(request)
    except Refusal as error:
        return route.refusal(error)
