"""The agent's options that change what a policy means, and what of them is served."""

from __future__ import annotations

from typing import Literal

import msgspec


class PolicyOptions(msgspec.Struct, frozen=True, gc=False):
    """Cilium's options of the same names; the defaults are the chart's."""

    cluster_name: str = "default"
    enable_ipv4: bool = True
    enable_ipv6: bool = False
    enable_policy: Literal["default", "always", "never"] = "default"
    enforces_init: bool = True
    """Whether pods in ``init`` are closed: not where nobody would ever tell their labels."""
    allow_localhost: Literal["auto", "always", "policy"] = "auto"
    enable_host_firewall: bool = False
    host_names: bool = True
    """Whether the DNS proxy serves the node itself: ``rules.dns`` and ``toFQDNs`` with a nodeSelector."""
    enable_icmp_rules: bool = True
    enable_non_default_deny_policies: bool = True
    """Whether ``enableDefaultDeny: false`` counts: without it, each rule denies what it does not allow."""
    enable_l7_proxy: bool = True
    enable_node_selector_labels: bool = False
    learns_names: bool = True
    """Whether a DNS proxy tells which addresses names have: ``toFQDNs`` selects those."""
    serves_requests: bool = True
    """Whether a proxy reads more than requests of HTTP: Kafka and others, server names, TLS, listeners."""
    authenticates: bool = True
    """Whether peers can be asked to authenticate."""

    @property
    def dual_stack(self) -> bool:
        """Whether the world is one identity per family."""
        return self.enable_ipv4 and self.enable_ipv6

    @property
    def always_allows_localhost(self) -> bool:
        """Whether the node reaches its pods whatever policy says; ``auto`` means so under Kubernetes."""
        return self.allow_localhost != "policy"


SERVED = PolicyOptions(host_names=False, serves_requests=False, authenticates=False)
"""What this agent can do of them, whatever its settings."""
