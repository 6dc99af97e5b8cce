"""Operations behind their limiters: a request waits for its turn, or is refused when that takes too long.

For:    Api. Needs: LimitSettings, Logger. Gives: Limits.
Source: Cilium 1.17. The answer is 429; its body is a JSON string, though the schema has none.
"""

from __future__ import annotations

from typing import Final

from cells.api.limiter.limiter import Limiter, Refused
from cells.api.limiter.settings import LimitSettings, limiter_name
from cells.api.part import Operation, Route
from cells.api.wire import FrameworkError, answer
from lifecycle import Logger
from lifecycle.http import Refusal, Request, Response

TOO_MANY: Final = 429


class Limits:
    """The API's limiters, by name."""

    def __init__(self, settings: LimitSettings, log: Logger) -> None:
        self.limiters = {
            name: Limiter(name, parameters, log) for name, parameters in settings.parameters().items()
        }

    def limited(self, route: Route) -> Operation:
        """The route's operation, behind the limiter it has, if it has one."""
        name = limiter_name(route.method, route.path)
        if name is None:
            return route.operation
        limiter = self.limiters[name]

        async def operate(request: Request) -> Response:
            try:
                turn = await limiter.enter(request.gone)
            except Refused as refused:
                return answer(TOO_MANY, str(refused))
            status = 500
            try:
                response = await _answered(route, request)
                status = response.status
            except FrameworkError as error:
                status = error.status
                raise
            finally:
                turn.done(status)
            return response

        return operate

    def open(self) -> None:
        """Let requests wait: the server starts."""
        for limiter in self.limiters.values():
            limiter.open()

    def close(self) -> None:
        """Let go of all who wait: the server stops."""
        for limiter in self.limiters.values():
            limiter.close()


async def _answered(route: Route, request: Request) -> Response:
    """The operation's answer, also where it is an error: the limiter counts its status."""
    try:
        return await route.operation(request)
    except Refusal as error:
        return route.refusal(error)
