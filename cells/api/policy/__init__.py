"""The operations on policies, and the policy of an endpoint as the API shows it.

Gives: PolicyOperations, EndpointPolicyModels, part.
"""

from cells.api.policy.endpoint import EndpointPolicyModels
from cells.api.policy.operations import PolicyOperations, part

__all__ = ["EndpointPolicyModels", "PolicyOperations", "part"]
