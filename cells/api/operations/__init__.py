"""The operations of the REST API: how a cell contributes them, which are off, those of what is not built."""

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


# Operations that the administrator has switched off.
#
# Source: Cilium 1.17, enable-cilium-api-server-access; the names are those of its generated server.

ALL: Final = "*"
DISABLED: Final = "This API is administratively disabled. Contact your administrator for more details."
_BASE: Final = "/v1/"
_INITIALISMS: Final = {"id": "ID", "ip": "IP", "ipam": "IPAM"}


class AccessSettings(Settings, frozen=True):
    """Settings of the API's access."""

    enable_cilium_api_server_access: list[str] = msgspec.field(default_factory=lambda: [ALL])
    """Operations that are enabled, such as GetHealthz or PutEndpointID; a name may end in ``*``."""


def operation_name(method: str, path: str) -> str:
    """``PutEndpointID`` for PUT /v1/endpoint/{id}; empty for what is not Cilium's."""
    if not path.startswith(_BASE):
        return ""
    words = re.findall(r"[a-z]+", path.removeprefix(_BASE))
    return method.capitalize() + "".join(_INITIALISMS.get(word, word.capitalize()) for word in words)


def denied(
    wanted: Iterable[str], names: Iterable[str], option: str = "enable-cilium-api-server-access"
) -> frozenset[str]:
    """Those of the operations that are off. Raises UsageError for an item of the option that names none."""
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


# What a cell contributes to the REST API: operations that belong together.

Operation = Callable[[Request], Awaitable[Response]]


class Route(msgspec.Struct, frozen=True):
    """One operation: where it is, and how a Refusal of it is answered."""

    method: str
    path: str
    operation: Operation
    texts: frozenset[int] = frozenset()
    """Error statuses with the text as body."""
    bare: frozenset[int] = frozenset()
    """Error statuses without a body."""

    def refusal(self, error: Refusal) -> Response:
        """The answer to an error of the cell behind; one outside the schema becomes the nearest in it."""
        if error.status in self.texts:
            return answer(error.status, error.text)
        if error.status in self.bare:
            return empty(error.status)
        if error.status < 500 and 404 in self.bare:
            return empty(404)
        return answer(500, error.text)


def _nothing() -> None:
    """For parts without streams."""


class ApiPart(msgspec.Struct, frozen=True):
    """Operations that belong together, by a name that is theirs alone."""

    name: str
    routes: Sequence[Route]
    open: Callable[[], None] = _nothing
    """Called when the server starts, perhaps again."""
    close: Callable[[], None] = _nothing
    """Called when the server stops: ends what would go on for ever."""


# Parts of Cilium that are not built: reading answers that there is nothing, changing is refused with a line.
#
# Source: Cilium 1.17, api/v1/openapi.yaml: the documented answer where a subsystem is off, or has no objects.


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


def absent_part() -> Member[ApiPart]:
    """All of them as a part of the API."""
    return ApiPart("absent", [*PREFILTER_ROUTES, *RECORDER_ROUTES])
