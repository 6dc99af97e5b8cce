"""Answers of operations whose subsystem is not there.

Needs: nothing.   Gives: always, bare.
"""

from __future__ import annotations

from cells.api.part import Operation
from cells.api.wire import answer, empty
from lifecycle.http import Request, Response


def always(status: int, body: object) -> Operation:
    """The same answer whatever is asked."""

    async def handle(_request: Request) -> Response:
        return answer(status, body)

    return handle


def bare(status: int) -> Operation:
    """The same, without a body."""

    async def handle(_request: Request) -> Response:
        return empty(status)

    return handle
