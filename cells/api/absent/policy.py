"""Policies: none can be loaded, and the driver drops nothing.

Needs: nothing.   Gives: ROUTES.
Who builds it takes this file away, and contributes a part of its own.
"""

from cells.api.absent.answers import always
from cells.api.models.node import Policy
from cells.api.part import Route

_REFUSED = always(500, "policies cannot be loaded yet: see enable-policy for what is enforced")
_NO_FILTER = always(500, "Prefilter is not enabled in daemon")

ROUTES = (
    Route("GET", "/v1/policy", always(200, Policy())),
    Route("PUT", "/v1/policy", _REFUSED),
    Route("DELETE", "/v1/policy", _REFUSED),
    Route("GET", "/v1/policy/selectors", always(200, [])),
    *(Route(method, "/v1/prefilter", _NO_FILTER) for method in ("GET", "PATCH", "DELETE")),
)
