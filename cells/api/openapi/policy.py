"""What there is to say of the operations on policies.

Needs: Described, the wire types.   Gives: OPERATIONS.
Source: Cilium 1.17, api/v1/openapi.yaml.
"""

from __future__ import annotations

from cells.api.models.policy import Policy, SelectorIdentityMapping
from cells.api.openapi.described import Body, Described, bare, error, ok

LABELS = Body(list[str], "Only rules with all of these labels.", required=False, example=[])
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
)
