"""Describes operations outside Cilium's document: policies, events, tables, graph, settings, event loop."""

from __future__ import annotations

from typing import Any

from cells.api.models import hive as wire
from cells.api.openapi.described import Body, Described, DescribedResponse, ok, path, problem, query
from cells.api.openapi.node import INT64
from cells.policy.explain import Explained
from cells.policy.explain.trial import TrialOutcome, TrialRequest
from lifecycle.admin import TableChange, TableInfo, TableRow

OBJECT: Any = dict[str, object]
TABLE = path("table", "A table, by its name.", example="endpoints")
ROWS: Any = dict[str, list[TableRow]]
NO_TABLE = DescribedResponse(404, "There is no such table.", wire.Failure)

PORT = (
    query("port", "Destination port, a number or a name; for ICMP the type.", example="80"),
    query("protocol", "Protocol of the port; TCP by default, for a service that of its port.", example="TCP"),
)
UNKNOWN_END = DescribedResponse(400, "The source, destination, port or protocol is unknown.", wire.Failure)

OPERATIONS = (
    Described(
        "GET",
        "/hive/policy/explain",
        "Why a connection is allowed or not",
        (
            ok("The verdict of each path that the connection may take and this node decides.", Explained),
            UNKNOWN_END,
        ),
        (
            query("source", "A pod, an address, a reserved identity, or a number.", example="host"),
            query(
                "destination",
                "A pod, a service, an address, a reserved identity, or a number.",
                example="10.0.1.77",
            ),
            *PORT,
        ),
    ),
    Described(
        "GET",
        "/hive/policy/verdict",
        "Which rules decide on a packet of an endpoint",
        (
            ok("The verdict and its rules.", wire.VerdictRules),
            DescribedResponse(400, "The query is invalid.", wire.Failure),
        ),
        (
            query("endpoint", "The endpoint's number.", example="12"),
            query("direction", "ingress or egress.", example="ingress"),
            query("identity", "The peer's identity, a number.", example="2"),
            query("protocol", "The IP protocol, a number.", example="6"),
            query("port", "The destination's port; for ICMP the type.", example="80"),
            query("address", "The peer's address, as networks may select pods, too.", example="10.0.1.77"),
        ),
    ),
    Described(
        "POST",
        "/hive/policy/trial",
        "What more policies would have done with recorded flows",
        (
            ok("The outcomes, and the outcome of each flow.", TrialOutcome),
            DescribedResponse(400, "A policy is invalid, or this agent reads no policies.", wire.Failure),
        ),
        body=Body(
            TrialRequest,
            "The policies, and flows of endpoints of this node.",
            example={"objects": [], "flows": []},
        ),
    ),
    Described(
        "GET",
        "/hive/policy/matrix",
        "What policies allow between identities, on all ports",
        (
            ok("Every pair that this node decides.", wire.PolicyMatrix),
            DescribedResponse(400, "The query is invalid, or names something unknown.", wire.Failure),
        ),
        (
            query("from", "Only sources of this namespace.", example=""),
            query("to", "Only destinations of this namespace.", example=""),
            query("most", "Number of identities on each side, 60 at most.", example="40"),
        ),
    ),
    Described(
        "GET",
        "/hive/policy/reachability",
        "Which pods of a namespace on this node reach which",
        (ok("Every pair.", list[wire.Reached]), UNKNOWN_END),
        (query("namespace", "Namespace of the pods.", example="default"), *PORT),
    ),
    Described(
        "GET",
        "/hive/events",
        "Stored events of packets and requests, and new ones as they happen",
        (
            ok("A line for each event, without end.", wire.EventLine, lines=True),
            DescribedResponse(404, "The agent stores no events: Hubble is disabled.", wire.Failure),
            problem(422, "The time is not a number."),
        ),
        (
            query("since", "Only events since this time, in nanoseconds since 1970.", kind=INT64, example=0),
            query(
                "names",
                "Whether stored events show names as of their time; true by default.",
                example="false",
            ),
        ),
    ),
    Described("GET", "/statedb/tables", "All tables", (ok("The tables.", list[TableInfo]),)),
    Described("GET", "/statedb/dump", "Every row of every table", (ok("Rows by table.", ROWS),)),
    Described(
        "GET",
        "/statedb/dump/{table}",
        "Every row of a table",
        (ok("The rows, under the table's name.", ROWS), NO_TABLE),
        (TABLE,),
    ),
    Described(
        "GET",
        "/statedb/changes/{table}",
        "Every row of a table, and every change as it happens",
        (
            ok(
                "A line for each row and change, without end. A line that is a Failure is the last.",
                TableChange,
                lines=True,
            ),
            NO_TABLE,
        ),
        (TABLE,),
    ),
    Described(
        "GET",
        "/statedb/query",
        "Rows of a table that cilium-dbg shows, in Cilium's form: health, devices, routes, node-addresses …",
        (
            ok("A line for each row.", wire.CiliumRow, lines=True),
            DescribedResponse(400, "There is no such index, or the key is not base64.", wire.Failure),
            DescribedResponse(404, "There is no such table in Cilium's form.", wire.Failure),
        ),
        body=Body(
            wire.Query,
            "The requested rows.",
            example={"table": "health", "index": "identifier", "lowerbound": True},
        ),
    ),
    Described(
        "GET",
        "/hive/graph",
        "The dependency graph of the agent",
        (ok("The graph, in the form of docs/reference/graph-schema.json.", OBJECT),),
    ),
    Described(
        "GET",
        "/hive/timeline",
        "The timeline of the start",
        (ok("The start, in the form of docs/reference/timeline-schema.json.", OBJECT),),
    ),
    Described(
        "GET",
        "/hive/config",
        "Settings in force, and what a restart would change",
        (ok("The settings.", wire.Settings),),
    ),
    Described(
        "GET",
        "/hive/loop",
        "How busy the event loop was",
        (
            ok("Its time slices.", wire.LoopLoad),
            DescribedResponse(404, "The event loop is not measured.", wire.Failure),
        ),
    ),
)
