"""Node information for debugging: identities, prefixes, maps, nodes; and metrics.

Needs: Described, the wire types.   Gives: OPERATIONS.
Source: Cilium 1.17, api/v1/openapi.yaml; GET /metrics/ is of 1.16.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from cells.api.models import node as wire
from cells.api.models import v1 as models
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

METRICS = (ok("What a scrape would show.", list[models.Metric]),)
INT64: Any = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
MAP = path("name", "A map, by the name of its pin.", example="cilium_lxc")

OPERATIONS = (
    Described(
        "GET",
        "/v1/identity",
        "All identities, or those with some labels",
        (ok("The identities.", list[models.Identity]), bare(404, "None has these labels.")),
        body=Body(
            list[str],
            "Only those that have all these labels, written source:key=value.",
            required=False,
            example=["reserved:host"],
        ),
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
            ok("The identity.", models.Identity),
            bare(400, "This is no number."),
            bare(404, "There is no such identity."),
        ),
        (path("id", "Its number.", example="1"),),
    ),
    Described(
        "GET",
        "/v1/ip",
        "Whose every prefix is",
        (
            ok("The prefixes, sorted.", list[wire.IPListEntry]),
            error(400, "This is no prefix."),
            bare(404, "There is none inside."),
        ),
        (query("cidr", "Only those inside this prefix.", example="10.0.0.0/8"),),
    ),
    Described(
        "GET",
        "/v1/map",
        "Every map of the node",
        (ok("The maps; those that only the agent writes to with their rows.", wire.BPFMapList),),
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
        "What the agent changed in a map",
        (
            ok("A line for each of the latest changes, and for those to come.", wire.MapEvent, lines=True),
            bare(404, "There is no such map, or no copy of it is kept."),
        ),
        (
            MAP,
            Parameter("follow", "query", bool, "Tell also of changes to come, without end."),
        ),
    ),
    Described(
        "GET",
        "/v1/cluster/nodes",
        "The nodes that came and went since the client asked last",
        (
            ok("The changes, for a client that is not known all nodes.", wire.ClusterNodeStatus),
            problem(422, "The client-id is no number."),
        ),
        (header("client-id", "That of the last answer; 0 or none at first.", kind=INT64),),
    ),
    Described(
        "GET",
        "/v1/node/ids",
        "The numbers nodes have in the datapath",
        (ok("The nodes.", list[wire.NodeID]),),
    ),
    Described(
        "GET",
        "/v1/cgroup-dump-metadata",
        "The control groups of pods",
        (ok("None: they are not looked at yet.", wire.CgroupDumpMetadata),),
    ),
    Described(
        "GET",
        "/v1/debuginfo",
        "Everything a maintainer asks for at first",
        (ok("Versions, status, endpoints, settings.", wire.DebugInfo),),
    ),
    Described("GET", "/v1/metrics/", "The agent's metrics", METRICS),
    Described("GET", "/v1/metrics", "The agent's metrics", METRICS, alias=True),
)
