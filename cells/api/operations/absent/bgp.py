"""BGP: it is off.

Needs: nothing.   Gives: ROUTES.
Who builds it takes this file away, and contributes a part of its own.
"""

from cells.api.operations.absent.answers import always
from cells.api.part import Route

_OFF = always(501, "BGP Control Plane disabled")

ROUTES = (
    Route("GET", "/v1/bgp/peers", _OFF),
    Route("GET", "/v1/bgp/routes", _OFF),
    Route("GET", "/v1/bgp/route-policies", _OFF),
)
