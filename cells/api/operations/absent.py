"""What the API says of parts of Cilium that are not built yet: that there is nothing of it, in its own form.

Source: Cilium 1.17, api/v1/openapi.yaml: the documented answer where a subsystem is off, or has no objects.
        Reading answers as if there were none; changing is refused with a line, never taken and forgotten.
"""

from __future__ import annotations

from cells.api.operations import ApiPart, Operation, Route
from cells.api.wire import answer, empty
from lifecycle import Member
from lifecycle.http import Request, Response

__all__ = ["part"]


# Answers of operations whose subsystem is not there.


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


# The prefilter: the driver drops nothing.

_NO_FILTER = always(500, "Prefilter is not enabled in daemon")

PREFILTER_ROUTES = tuple(Route(method, "/v1/prefilter", _NO_FILTER) for method in ("GET", "PATCH", "DELETE"))


# The recorder of packets: it has no recordings.

RECORDER_ROUTES = (
    Route("GET", "/v1/recorder", always(200, [])),
    Route("GET", "/v1/recorder/masks", always(200, [])),
    Route("GET", "/v1/recorder/{id}", bare(404)),
    Route("PUT", "/v1/recorder/{id}", always(500, "the recorder is not built yet")),
    Route("DELETE", "/v1/recorder/{id}", bare(404)),
)


def part() -> Member[ApiPart]:
    """All of them as a part of the API."""
    return ApiPart("absent", [*PREFILTER_ROUTES, *RECORDER_ROUTES])
