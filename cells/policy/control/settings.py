"""Which kinds of policy objects count.

Gives: PolicyRuleSettings.
"""

from lifecycle import Settings


class PolicyRuleSettings(Settings, frozen=True):
    """Which kinds of policy objects count."""

    enable_k8s_networkpolicy: bool = True
    """Whether NetworkPolicies count."""

    enable_cilium_network_policy: bool = True
    """Whether CiliumNetworkPolicies count."""

    enable_cilium_clusterwide_network_policy: bool = True
    """Whether CiliumClusterwideNetworkPolicies count."""

    enable_l7_proxy: bool = True
    """Whether the DNS proxy serves toFQDNs and rules for names; without it they are refused."""

    validate_network_policy: bool = True
    """Whether status.conditions of Cilium's policies say at the API server if they are valid."""
