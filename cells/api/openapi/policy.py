"""What there is to say of the operations on policies.

Needs: Described, the wire types.   Gives: OPERATIONS.
Source: Cilium 1.17, api/v1/openapi.yaml.
"""

from __future__ import annotations

from cells.api.models.policy import DNSLookup, NameManager, Policy, SelectorIdentityMapping
from cells.api.openapi.described import Body, Described, bare, error, ok, path, query

LABELS = Body(list[str], "Only rules with all of these labels.", required=False, example=[])
PATTERN = query("matchpattern", "Only of names like this one.")
CACHED = (
    PATTERN,
    query("cidr", "Only of addresses inside."),
    query("source", "Only from there: lookup or connection."),
)
NO_PATTERN = error(400, "What is asked for cannot be understood.")
LOOKUPS = ok("What DNS has answered, and what is connected to after that has ended.", list[DNSLookup])
BY_OBJECTS = (error(500, "Rules come from the cluster's objects, or from a folder of manifests."),)

OPERATIONS = (
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
        "Forget names that pods looked up",
        (bare(200, "They are forgotten."), NO_PATTERN),
        (PATTERN,),
    ),
    Described("GET", "/v1/fqdn/names", "Names that policies speak of", (ok("The selectors.", NameManager),)),
)
