"""What the API says of parts of Cilium that are not built: reading finds nothing, changing is refused.

Needs: Described, the wire types.   Gives: OPERATIONS.
Source: Cilium 1.17, api/v1/openapi.yaml, of which only the answers that are given are here.
"""

from __future__ import annotations

from typing import Any, Literal

from cells.api.openapi.described import Described, bare, error, ok, path, query

NONE: Any = list[dict[str, str]]
"""Of lists whose items nothing makes yet."""
NO_FILTER = (error(500, "There is no prefilter."),)
NO_BGP = (error(501, "BGP is off."),)
RECORDER = path("id", "A recorder.", kind=int, example=1)
MISSING = (bare(404, "There is none."),)
ROUTER = query("router_asn", "Only of this router.", kind=int)


def _empty(path: str, summary: str) -> Described:
    return Described("GET", path, summary, (ok("None.", NONE),))


OPERATIONS = (
    Described("GET", "/v1/prefilter", "What is dropped at the device", NO_FILTER),
    Described("PATCH", "/v1/prefilter", "Drop more at the device", NO_FILTER),
    Described("DELETE", "/v1/prefilter", "Drop less at the device", NO_FILTER),
    _empty("/v1/recorder", "All recorders"),
    _empty("/v1/recorder/masks", "All masks of recorders"),
    Described("GET", "/v1/recorder/{id}", "A recorder", MISSING, (RECORDER,)),
    Described(
        "PUT",
        "/v1/recorder/{id}",
        "Make a recorder",
        (error(500, "Recorders are not built yet."),),
        (RECORDER,),
    ),
    Described("DELETE", "/v1/recorder/{id}", "Delete a recorder", MISSING, (RECORDER,)),
    Described("GET", "/v1/bgp/peers", "Peers of BGP", NO_BGP),
    Described(
        "GET",
        "/v1/bgp/routes",
        "Routes of BGP",
        NO_BGP,
        (
            query(
                "table_type",
                "Which table.",
                kind=Literal["loc-rib", "adj-rib-in", "adj-rib-out"],
                required=True,
            ),
            query("afi", "Address family.", required=True, example="ipv4"),
            query("safi", "Subsequent address family.", required=True, example="unicast"),
            ROUTER,
            query("neighbor", "Only of this peer."),
        ),
    ),
    Described("GET", "/v1/bgp/route-policies", "Policies of BGP", NO_BGP, (ROUTER,)),
)
