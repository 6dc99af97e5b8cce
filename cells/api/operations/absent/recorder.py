"""The recorder of packets: it has no recordings.

Needs: nothing.   Gives: ROUTES.
Who builds it takes this file away, and contributes a part of its own.
"""

from cells.api.operations.absent.answers import always, bare
from cells.api.part import Route

ROUTES = (
    Route("GET", "/v1/recorder", always(200, [])),
    Route("GET", "/v1/recorder/masks", always(200, [])),
    Route("GET", "/v1/recorder/{id}", bare(404)),
    Route("PUT", "/v1/recorder/{id}", always(500, "the recorder is not built yet")),
    Route("DELETE", "/v1/recorder/{id}", bare(404)),
)
