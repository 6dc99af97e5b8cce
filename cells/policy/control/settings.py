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

    enable_icmp_rules: bool = True
    """Whether rules of ICMP count; without it they are refused."""

    enable_non_default_deny_policies: bool = True
    """Whether policies with enableDefaultDeny false leave open what they do not allow; without it, every
    policy closes the directions it has rules for."""
