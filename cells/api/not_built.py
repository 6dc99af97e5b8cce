"""What the API says of parts of Cilium that are not built yet: that there is nothing of it, in its own form.

Needs: nothing.   Gives: NotBuilt.
Source: Cilium 1.17, api/v1/openapi.yaml: the documented answer where a subsystem is off, or has no objects.
Reading answers as if there were none; changing is refused with a line, never taken and forgotten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cells.api.node_models import NameManager, Policy
from cells.api.operations import Route
from cells.api.wire import answer, empty
from cells.http import Request, Response

Handler = Callable[[Request], Awaitable[Response]]

NO_POLICIES = "policies cannot be loaded yet: see enable-policy for what is enforced"
NO_SERVICES = "services are not built yet: kube-proxy goes on"


def _always(make: Callable[[], Response]) -> Handler:
    async def handle(_request: Request) -> Response:
        return make()

    return handle


def _json(status: int, body: object) -> Handler:
    return _always(lambda: answer(status, body))


def _bare(status: int) -> Handler:
    return _always(lambda: empty(status))


class NotBuilt:
    """Handlers of operations whose subsystem is not there."""

    def routes(self) -> list[Route]:
        """All of them."""
        nothing, missing, disabled = _json(200, []), _bare(404), _json(501, "BGP Control Plane disabled")
        no_filter = _json(500, "Prefilter is not enabled in daemon")
        no_recorder = _json(500, "the recorder is not built yet")
        return [
            Route("GET", "/v1/policy", _json(200, Policy())),
            Route("PUT", "/v1/policy", _json(500, NO_POLICIES)),
            Route("DELETE", "/v1/policy", _json(500, NO_POLICIES)),
            Route("GET", "/v1/policy/selectors", nothing),
            Route("GET", "/v1/service", nothing),
            Route("GET", "/v1/service/{id}", missing),
            Route("PUT", "/v1/service/{id}", _json(501, NO_SERVICES)),
            Route("DELETE", "/v1/service/{id}", missing),
            Route("GET", "/v1/lrp", nothing),
            Route("GET", "/v1/fqdn/cache", nothing),
            Route("GET", "/v1/fqdn/cache/{id}", nothing),
            Route("DELETE", "/v1/fqdn/cache", _json(400, "no DNS proxy is built yet, there is no cache")),
            Route("GET", "/v1/fqdn/names", _json(200, NameManager())),
            *(Route(method, "/v1/prefilter", no_filter) for method in ("GET", "PATCH", "DELETE")),
            Route("GET", "/v1/recorder", nothing),
            Route("GET", "/v1/recorder/masks", nothing),
            Route("GET", "/v1/recorder/{id}", missing),
            Route("PUT", "/v1/recorder/{id}", no_recorder),
            Route("DELETE", "/v1/recorder/{id}", missing),
            *(Route("GET", f"/v1/bgp/{what}", disabled) for what in ("peers", "routes", "route-policies")),
        ]

    def open(self) -> None:
        """Nothing begins."""

    def close(self) -> None:
        """Nothing goes on."""
