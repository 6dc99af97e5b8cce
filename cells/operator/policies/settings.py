"""By which options policies are judged: those of the agents.

Needs: nothing.   Gives: PolicySettings.
"""

from __future__ import annotations

from lifecycle import Settings


class PolicySettings(Settings, frozen=True):
    """Settings of the policies cell. The agents' are of the same names, and to be the same."""

    validate_network_policy: bool = True
    """Whether status.conditions of Cilium's policies say if they are valid."""

    enable_l7_proxy: bool = True
    """Whether agents serve HTTP and DNS rules; if not, such policies are reported as invalid."""

    enable_icmp_rules: bool = True
    """Whether agents serve ICMP rules; if not, such policies are reported as invalid."""

    enable_node_selector_labels: bool = False
    """Whether agents serve fromNodes and toNodes; if not, such policies are reported as invalid."""
