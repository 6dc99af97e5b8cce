"""Each endpoint's policy, in its policy map.

Controller and reconciler: a PolicyComputer says what an endpoint may do; that is its row in the table
``endpoint-policies``; its policy map is made equal by difference, and the table
``endpoint-policies-realized`` tells what the map has.
Needs:  PolicyMaps, PolicySettings.   Gives: EndpointPolicies, the tables, NodePolicy, PolicyComputer.
Why:    what is allowed may change at any time, and must be in force in every map, or told to be not.
"""

from cells.policy.maps.cell import cell
from cells.policy.maps.edges import NO_POD, KnownRules, PodKey, PolicyComputer, PolicyMapPool, RuleComputer
from cells.policy.maps.endpoint_policies import EndpointPolicies, PolicyMapError
from cells.policy.maps.node_policy import NodePolicy
from cells.policy.maps.rows import (
    ALLOW_ALL,
    ALLOW_LOCALHOST,
    EndpointPolicy,
    PolicyEntries,
    RealizedPolicy,
    enforced_directions,
)
from cells.policy.maps.settings import Enforcement, Localhost, PolicySettings

__all__ = [
    "ALLOW_ALL",
    "ALLOW_LOCALHOST",
    "NO_POD",
    "EndpointPolicies",
    "EndpointPolicy",
    "Enforcement",
    "KnownRules",
    "Localhost",
    "NodePolicy",
    "PodKey",
    "PolicyComputer",
    "PolicyEntries",
    "PolicyMapError",
    "PolicyMapPool",
    "PolicySettings",
    "RealizedPolicy",
    "RuleComputer",
    "cell",
    "enforced_directions",
]
