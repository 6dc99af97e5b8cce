"""The operations on policies, and the policy of an endpoint as the API shows it.

Gives: PolicyOperations, ExplainOperations, NameOperations, EndpointPolicyModels, and their parts.
"""

from cells.api.operations.policy.directory import AgentDirectory, AgentEnds, AgentServices
from cells.api.operations.policy.endpoint import EndpointPolicyModels
from cells.api.operations.policy.explain import ExplainOperations
from cells.api.operations.policy.explain import part as explain_part
from cells.api.operations.policy.names import NameOperations, names_part
from cells.api.operations.policy.operations import PolicyOperations, part
from cells.api.operations.policy.other_nodes import OtherNodes

__all__ = [
    "AgentDirectory",
    "AgentEnds",
    "AgentServices",
    "EndpointPolicyModels",
    "ExplainOperations",
    "NameOperations",
    "OtherNodes",
    "PolicyOperations",
    "explain_part",
    "names_part",
    "part",
]
