"""The DNS proxy: it knows no names.

Needs: nothing.   Gives: ROUTES.
Who builds it takes this file away, and contributes a part of its own.
"""

from cells.api.models.node import NameManager
from cells.api.operations.absent.answers import always
from cells.api.part import Route

ROUTES = (
    Route("GET", "/v1/fqdn/cache", always(200, [])),
    Route("GET", "/v1/fqdn/cache/{id}", always(200, [])),
    Route("DELETE", "/v1/fqdn/cache", always(400, "no DNS proxy is built yet, there is no cache")),
    Route("GET", "/v1/fqdn/names", always(200, NameManager())),
)
