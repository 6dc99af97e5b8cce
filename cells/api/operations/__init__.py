"""Types of the API's operations (Route, ApiPart), disabled operations, and subsystems that are not built.

Each cell contributes an ApiPart; ``server`` serves their routes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec

from cells.api.wire import answer, empty
from lifecycle import Member, Settings, UsageError
from lifecycle.http import Refusal, Request, Response

__all__ = [
    "ALL",
    "DISABLED",
    "AccessSettings",
    "ApiPart",
    "Operation",
    "Route",
    "absent_part",
    "always",
    "denied",
    "operation_name",
]


# Disabled operations.
#
# Source: Cilium 1.17, enable-cilium-api-server-access; the names are those of its generated server.

ALL: Final = "*"
DISABLED: Final = "This API is administratively disabled. Contact your administrator for more details."
_BASE: Final = "/v1/"
_INITIALISMS: Final = {"id": "ID", "ip": "IP", "ipam": "IPAM"}


class AccessSettings(Settings, frozen=True):
    """Settings of access to the API."""

    enable_cilium_api_server_access: list[str] = msgspec.field(default_factory=lambda: [ALL])
    """Operations that are enabled, such as GetHealthz or PutEndpointID; a name may end in ``*``."""


def operation_name(method: str, path: str) -> str:
    """Return e.g. ``PutEndpointID`` for PUT /v1/endpoint/{id}; empty for operations that Cilium lacks."""
    if not path.startswith(_BASE):
        return ""
    words = re.findall(r"[a-z]+", path.removeprefix(_BASE))
    return method.capitalize() + "".join(_INITIALISMS.get(word, word.capitalize()) for word in words)


def denied(
    wanted: Iterable[str], names: Iterable[str], option: str = "enable-cilium-api-server-access"
) -> frozenset[str]:
    """Return the names of the operations that the option disables.

    Raises UsageError if an item of the option matches no operation.
    """
    known = frozenset(filter(None, names))
    allowed: set[str] = set()
    for each in wanted:
        start = each.removesuffix(ALL)
        found = {name for name in known if name == each or (start != each and name.startswith(start))}
        if not found:
            raise UsageError(
                f"{option}={each}: no such operation; expected * or names such as"
                f" {', '.join(sorted(known)[:3])}"
            )
        allowed |= found
    return known - allowed


# Contributions of cells.

Operation = Callable[[Request], Awaitable[Response]]


class Route(msgspec.Struct, frozen=True):
    """An operation: method, path, and the form of its errors."""

    method: str
    path: str
    operation: Operation
    texts: frozenset[int] = frozenset()
    """Error statuses with a text as body."""
    bare: frozenset[int] = frozenset()
    """Error statuses without a body."""

    def refusal(self, error: Refusal) -> Response:
        """Convert a Refusal to a response; a status outside the schema becomes the nearest one in it."""
        if error.status in self.texts:
            return answer(error.status, error.text)
        if error.status in self.bare:
            return empty(error.status)
        if error.status < 500 and 404 in self.bare:
            return empty(404)
        return answer(500, error.text)


def _nothing() -> None:
    """Default of ``open`` and ``close`` for parts without streams."""


class ApiPart(msgspec.Struct, frozen=True):
    """A named group of operations."""

    name: str
    routes: Sequence[Route]
    open: Callable[[], None] = _nothing
    """Called when the server starts; it may start again after a stop."""
    close: Callable[[], None] = _nothing
    """Called when the server stops; must end endless responses."""


# Subsystems of Cilium that are not built: lists are empty and changes are refused.
#
# Source: Cilium 1.17, api/v1/openapi.yaml: the response of a subsystem that is disabled or has no objects.


def always(status: int, body: object) -> Operation:
    """Return an operation that sends the same response to every request."""

    async def handle(_request: Request) -> Response:
        return answer(status, body)

    return handle


def bare(status: int) -> Operation:
    """Return an operation that sends a response without a body to every request."""

    async def handle(_request: Request) -> Response:
        return empty(status)

    return handle


# Prefilter (XDP).

_NO_FILTER = always(500, "Prefilter is not enabled in daemon")

PREFILTER_ROUTES = tuple(Route(method, "/v1/prefilter", _NO_FILTER) for method in ("GET", "PATCH", "DELETE"))


# Packet recorder.

RECORDER_ROUTES = (
    Route("GET", "/v1/recorder", always(200, [])),
    Route("GET", "/v1/recorder/masks", always(200, [])),
    Route("GET", "/v1/recorder/{id}", bare(404)),
    Route("PUT", "/v1/recorder/{id}", always(500, "the recorder is not built yet")),
    Route("DELETE", "/v1/recorder/{id}", bare(404)),
)


def absent_part() -> Member[ApiPart]:
    """Return the operations of subsystems that are not built."""
    return ApiPart("absent", [*PREFILTER_ROUTES, *RECORDER_ROUTES])
