"""Describes operations on the node, policies, services, BGP, and of subsystems that are not built.

Source: Cilium 1.17, api/v1/openapi.yaml; GET /metrics/ is of 1.16.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from cells.api import models
from cells.api.models import node as wire
from cells.api.models.node import (
    DNSLookup,
    LRPSpec,
    NameManager,
    Policy,
    SelectorIdentityMapping,
    ServiceModel,
    ServiceRequest,
)
from cells.api.openapi.described import (
    Body,
    Described,
    Parameter,
    bare,
    error,
    header,
    ok,
    path,
    problem,
    query,
)

METRICS = (ok("The metrics, as a scrape returns them.", list[models.Metric]),)
INT64: Any = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
MAP = path("name", "A map, by the name of its pin.", example="cilium_lxc")
LABELS = Body(
    list[str],
    "Only those that have all these labels, written source:key=value.",
    required=False,
    example=["reserved:host"],
)

OPERATIONS = (
    Described(
        "GET",
        "/v1/identity",
        "All identities, or those with some labels",
        (ok("The identities.", list[models.IdentityModel]), bare(404, "None has these labels.")),
        body=LABELS,
    ),
    Described(
        "GET",
        "/v1/identity/endpoints",
        "The identities that endpoints of this node have",
        (ok("The identities, and how many endpoints have each.", list[wire.IdentityEndpoints]),),
    ),
    Described(
        "GET",
        "/v1/identity/{id}",
        "An identity",
        (
            ok("The identity.", models.IdentityModel),
            bare(400, "This is not a number."),
            bare(404, "There is no such identity."),
        ),
        (path("id", "Its number.", example="1"),),
    ),
    Described(
        "GET",
        "/v1/ip",
        "The identity of every prefix",
        (
            ok("The prefixes, sorted.", list[wire.IPListEntry]),
            error(400, "This is not a prefix."),
            bare(404, "No known prefix is inside, or has these labels."),
        ),
        (query("cidr", "Only those inside this prefix.", example="10.0.0.0/8"),),
        body=replace(LABELS, example=["k8s:app=web"]),
    ),
    Described(
        "GET",
        "/v1/map",
        "Every map of the node",
        (ok("The maps, with the rows of those that only the agent writes.", wire.BPFMapList),),
    ),
    Described(
        "GET",
        "/v1/map/{name}",
        "A map",
        (ok("The map.", wire.BPFMap), bare(404, "There is no such map.")),
        (MAP,),
    ),
    Described(
        "GET",
        "/v1/map/{name}/events",
        "The agent's changes to a map",
        (
            ok("A line for each of the latest changes, then for new ones.", wire.MapEvent, lines=True),
            bare(404, "There is no such map, or the agent has no copy of it."),
        ),
        (
            MAP,
            Parameter("follow", "query", bool, "Also report new changes, without end."),
        ),
    ),
    Described(
        "GET",
        "/v1/cluster/nodes",
        "Nodes added and removed since the last request of the client",
        (
            ok("The changes; all nodes for an unknown client.", wire.ClusterNodeStatus),
            problem(422, "The client-id is not a number."),
        ),
        (header("client-id", "The client-id of the last answer; 0 or absent at first.", kind=INT64),),
    ),
    Described(
        "GET",
        "/v1/node/ids",
        "The node IDs of the datapath",
        (ok("The nodes.", list[wire.NodeID]),),
    ),
    Described(
        "GET",
        "/v1/cgroup-dump-metadata",
        "The control groups of pods",
        (ok("Empty: control groups are not read yet.", wire.CgroupDumpMetadata),),
    ),
    Described(
        "GET",
        "/v1/debuginfo",
        "Information for a bug report",
        (ok("Versions, status, endpoints, settings.", wire.DebugInfo),),
    ),
    Described("GET", "/v1/metrics/", "The agent's metrics", METRICS),
    Described("GET", "/v1/metrics", "The agent's metrics", METRICS, alias=True),
)


# Policies.
#
# Source: Cilium 1.17, api/v1/openapi.yaml.

LABELS = Body(list[str], "Only rules with all of these labels.", required=False, example=[])
PATTERN = query("matchpattern", "Only names that match this pattern.")
CACHED = (
    PATTERN,
    query("cidr", "Only addresses inside this prefix."),
    query("source", "Only from this source: lookup or connection."),
)
NO_PATTERN = error(400, "The query is invalid.")
LOOKUPS = ok("Addresses that DNS returned, and expired ones with open connections.", list[DNSLookup])
BY_OBJECTS = (error(500, "Rules come from the cluster's objects, or from a folder of manifests."),)

POLICY_OPERATIONS = (
    Described(
        "GET",
        "/v1/policy",
        "The policies in force",
        (ok("The policies, as JSON in a text.", Policy), bare(404, "No rule has these labels.")),
        body=LABELS,
    ),
    Described("PUT", "/v1/policy", "Load policies", BY_OBJECTS),
    Described("DELETE", "/v1/policy", "Unload policies", BY_OBJECTS),
    Described(
        "GET",
        "/v1/policy/selectors",
        "What policies select",
        (ok("The selectors of endpoints' policies, by their text.", list[SelectorIdentityMapping]),),
    ),
    Described("GET", "/v1/fqdn/cache", "Names that pods looked up", (LOOKUPS, NO_PATTERN), CACHED),
    Described(
        "GET",
        "/v1/fqdn/cache/{id}",
        "Names that an endpoint looked up",
        (LOOKUPS, NO_PATTERN, bare(404, "There is no such endpoint.")),
        (path("id", "An endpoint.", example="cni-attachment-id:9f86d081884c:eth0"), *CACHED),
    ),
    Described(
        "DELETE",
        "/v1/fqdn/cache",
        "Delete names that pods looked up",
        (bare(200, "The names are removed."), NO_PATTERN),
        (PATTERN,),
    ),
    Described("GET", "/v1/fqdn/names", "Names that policies select", (ok("The selectors.", NameManager),)),
)


# Services and local redirect policies.
#
# Source: Cilium 1.17, api/v1/openapi.yaml.

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

SERVICE_OPERATIONS = (
    Described("GET", "/v1/service", "All services", (ok("The services, by number.", list[ServiceModel]),)),
    Described("GET", ONE, "A service", (MISSING, ok("The service.", ServiceModel)), (SERVICE,)),
    Described(
        "PUT",
        ONE,
        "Create a service manually, or set the state of backends in all services",
        (
            error(501, "The change of state is invalid, or the agent has no source of objects."),
            ok("The service is changed, or the states are set."),
            ok("The service is created.", status=201),
            error(460, "There is no such frontend, or it has another number."),
            error(461, "There is no such backend, or no such state."),
            error(500, "The service cannot be served."),
        ),
        (SERVICE,),
        Body(
            ServiceRequest,
            "The service. With updateServices, the states of its backends; everything else is ignored.",
            example=REQUEST,
        ),
    ),
    Described(
        "DELETE",
        ONE,
        "Delete a service; one of a Service object is restored with the next change of the object",
        (MISSING, ok("It was removed."), error(500, "The service could not be removed."), WITHOUT_OBJECTS),
        (SERVICE,),
    ),
    Described(
        "GET", "/v1/lrp", "All local redirect policies", (ok("The policies, by name.", list[LRPSpec]),)
    ),
)


# Subsystems of Cilium that are not built: lists are empty and changes are refused.
#
# Source: Cilium 1.17, api/v1/openapi.yaml; only the responses that this agent gives are listed.

NONE: Any = list[dict[str, str]]
"""Type of lists that are always empty."""
NO_FILTER = (error(500, "There is no prefilter."),)
RECORDER = path("id", "A recorder.", kind=int, example=1)
NO_RECORDER = (bare(404, "There is none."),)


def _empty(path: str, summary: str) -> Described:
    return Described("GET", path, summary, (ok("None.", NONE),))


NOT_BUILT_OPERATIONS = (
    Described("GET", "/v1/prefilter", "Prefixes that the prefilter drops", NO_FILTER),
    Described("PATCH", "/v1/prefilter", "Add prefixes to the prefilter", NO_FILTER),
    Described("DELETE", "/v1/prefilter", "Remove prefixes from the prefilter", NO_FILTER),
    _empty("/v1/recorder", "All recorders"),
    _empty("/v1/recorder/masks", "All masks of recorders"),
    Described("GET", "/v1/recorder/{id}", "A recorder", NO_RECORDER, (RECORDER,)),
    Described(
        "PUT",
        "/v1/recorder/{id}",
        "Create a recorder",
        (error(500, "Recorders are not built yet."),),
        (RECORDER,),
    ),
    Described("DELETE", "/v1/recorder/{id}", "Delete a recorder", NO_RECORDER, (RECORDER,)),
)


# BGP: sessions, routes and policies of this node.

NO_BGP = error(501, "BGP is disabled.")
BGP_ANSWERS = (
    NO_BGP,
    problem(422, "A parameter is missing, or is not one of its allowed values."),
    error(500, "There is no such router or peer, or the speaker does not answer."),
)
ROUTER = query("router_asn", "Only of this router.", kind=INT64)
BGP_OPERATIONS = (
    Described(
        "GET",
        "/v1/bgp/peers",
        "Sessions of BGP",
        (NO_BGP, ok("All of them.", list[wire.BgpPeer])),
    ),
    Described(
        "GET",
        "/v1/bgp/routes",
        "Routes of BGP",
        (*BGP_ANSWERS, ok("All that match.", list[wire.BgpRoute])),
        (
            query(
                "table_type",
                "Which table.",
                kind=Literal["loc-rib", "adj-rib-in", "adj-rib-out"],
                required=True,
                example="loc-rib",
            ),
            query("afi", "Address family.", required=True, example="ipv4"),
            query("safi", "Subsequent address family.", required=True, example="unicast"),
            ROUTER,
            query("neighbor", "Only of this peer."),
        ),
    ),
    Described(
        "GET",
        "/v1/bgp/route-policies",
        "Policies of BGP",
        (*BGP_ANSWERS, ok("All that match.", list[wire.BgpRoutePolicy])),
        (ROUTER,),
    ),
)
