"""The operations on policies, and the policy of an endpoint as the API shows it.

Gives: PolicyOperations, ExplainOperations, NameOperations, EndpointPolicyModels, and their parts.
"""

from cells.api.operations.policy.endpoint import EndpointPolicyModels
from cells.api.operations.policy.explain import ExplainOperations
from cells.api.operations.policy.explain import part as explain_part
from cells.api.operations.policy.names import NameOperations, names_part
from cells.api.operations.policy.operations import PolicyOperations, part

__all__ = [
    "EndpointPolicyModels",
    "ExplainOperations",
    "NameOperations",
    "PolicyOperations",
    "explain_part",
    "names_part",
    "part",
]
