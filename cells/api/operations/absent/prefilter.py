"""The prefilter: the driver drops nothing.

Needs: nothing.   Gives: ROUTES.
Who builds it takes this file away, and contributes a part of its own.
"""

from cells.api.operations.absent.answers import always
from cells.api.part import Route

_NO_FILTER = always(500, "Prefilter is not enabled in daemon")

ROUTES = tuple(Route(method, "/v1/prefilter", _NO_FILTER) for method in ("GET", "PATCH", "DELETE"))
