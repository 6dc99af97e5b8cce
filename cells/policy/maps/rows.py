"""What an endpoint may do, as it is wanted and as its policy map has it.

For:    EndpointPolicies, whoever computes policies, and who shows them. Needs: the layout of policy maps.
Gives:  EndpointPolicy, RealizedPolicy, PolicyEntries; ALLOW_ALL, ALLOW_LOCALHOST.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from cells.cluster.identity import HOST
from cells.maps import PolicyEntry, PolicyKey

PolicyEntries = Mapping[PolicyKey, PolicyEntry]
"""Of both directions; a key says which it is of."""

ALLOW_ALL: Final[PolicyEntries] = {
    PolicyKey(identity=0, egress=False): PolicyEntry(),
    PolicyKey(identity=0, egress=True): PolicyEntry(),
}
"""What an endpoint may do where nothing is enforced: everything, in both directions."""

ALLOW_LOCALHOST: Final[PolicyEntries] = {PolicyKey(identity=HOST, egress=False): PolicyEntry()}
"""The node itself may reach the endpoint."""


class EndpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies``: what an endpoint may do by all that is known."""

    endpoint_id: int
    revision: int
    """Of the rules it was computed from."""
    ingress_enforced: bool
    """Whether only what ``entries`` allow may come in."""
    egress_enforced: bool
    """Whether only what ``entries`` allow may go out."""
    entries: PolicyEntries


class RealizedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``endpoint-policies-realized``: what its policy map has."""

    endpoint_id: int
    revision: int = 0
    """Of the rules that the map has and proxies have acknowledged; 0: none yet."""
    written: int = 0
    """Of the rules the map was last made right for."""
    ingress_enforced: bool = False
    egress_enforced: bool = False
    entries: int = 0
    """How many the map has."""
    error: str = ""
    """Why the map is not as wanted; empty when it is."""


def enforced_directions(policy: EndpointPolicy | RealizedPolicy, *, audited: bool = False) -> str:
    """``none``, ``ingress``, ``egress`` or ``both``, as the API and metrics have it.

    ``audit-both`` and the like where what is refused is let through.
    """
    match policy.ingress_enforced, policy.egress_enforced:
        case True, True:
            enforced = "both"
        case True, False:
            enforced = "ingress"
        case False, True:
            enforced = "egress"
        case _:
            return "none"
    return f"audit-{enforced}" if audited else enforced
