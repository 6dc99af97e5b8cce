"""Services and local redirect policies.

Needs: Described, the wire types.   Gives: OPERATIONS.
Source: Cilium 1.17, api/v1/openapi.yaml.
"""

from __future__ import annotations

from cells.api.models.redirects import LRPSpec
from cells.api.models.services import Service, ServiceRequest
from cells.api.openapi.described import Body, Described, bare, error, ok, path

ONE = "/v1/service/{id}"
SERVICE = path("id", "A service.", kind=int, example=1)
MISSING = bare(404, "There is none.")
WITHOUT_OBJECTS = error(501, "The agent has no source of objects.")
REQUEST = {
    "id": 30,
    "frontend-address": {"ip": "10.96.0.30", "port": 80, "protocol": "tcp", "scope": "external"},
    "backend-addresses": [{"ip": "10.0.1.77", "port": 80, "state": "active", "weight": 100}],
    "flags": {"type": "ClusterIP"},
}

OPERATIONS = (
    Described("GET", "/v1/service", "All services", (ok("By number.", list[Service]),)),
    Described("GET", ONE, "A service", (MISSING, ok("The service.", Service)), (SERVICE,)),
    Described(
        "PUT",
        ONE,
        "Make a service by hand, or give backends a state wherever they serve",
        (
            error(501, "A state cannot become the one asked for, or the agent has no source of objects."),
            ok("It is served as the body says, or the states are set."),
            ok("It is served, and was not before.", status=201),
            error(460, "There is no such frontend, or it has another number."),
            error(461, "There is no such backend, or no such state."),
            error(500, "It cannot be served."),
        ),
        (SERVICE,),
        Body(
            ServiceRequest,
            "The service. With updateServices, the states of its backends; the rest is not read.",
            example=REQUEST,
        ),
    ),
    Described(
        "DELETE",
        ONE,
        "Delete a service; one of an object comes back with the object's next change",
        (MISSING, ok("It is gone."), error(500, "It is still there."), WITHOUT_OBJECTS),
        (SERVICE,),
    ),
    Described("GET", "/v1/lrp", "All local redirect policies", (ok("By name.", list[LRPSpec]),)),
)
