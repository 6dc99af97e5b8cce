"""What of a node's objects counts, and what the agent must know of its own node before it goes on.

Needs: nothing.   Gives: NodeSettings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lifecycle import Duration, Settings, refuse, seconds


class NodeSettings(Settings, frozen=True):
    """Settings of the cluster's nodes."""

    k8s_require_ipv4_pod_cidr: bool = False
    """Wait at start until Kubernetes has assigned this node an IPv4 pod range. With an API server, or
    ipam=kubernetes, the start always waits."""

    k8s_require_ipv6_pod_cidr: bool = False
    """Wait at start until Kubernetes has assigned this node an IPv6 pod range; see the IPv4 option."""

    annotate_k8s_node: bool = False
    """Annotate this node's Node object with its ranges and addresses, and read other nodes' annotations."""

    auto_create_cilium_node_resource: bool = True
    """Write this node's CiliumNode, where there is an API server."""

    ipam_cilium_node_update_rate: Duration = seconds(15)
    """Least time between two requests for pool addresses, in ipam=multi-pool."""

    exclude_node_label_patterns: tuple[str, ...] = ()
    """Regular expressions; node labels with a matching key are left out."""

    enable_node_selector_labels: bool = False
    """Give other nodes identities by their labels, so that fromNodes and toNodes can select them."""

    policy_cidr_match_mode: tuple[str, ...] = ()
    """What networks in policies select besides addresses outside the cluster: nodes, also addresses of
    nodes."""

    @property
    def matched_by_cidr(self) -> bool:
        """Whether networks in policies select nodes."""
        return "nodes" in self.policy_cidr_match_mode

    def validate(self) -> None:
        """Refuse patterns and modes that are none; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for pattern in self.exclude_node_label_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"exclude-node-label-patterns={pattern}: expected a regular expression: {error}"

        for mode in self.policy_cidr_match_mode:
            if mode != "nodes":
                yield f"policy-cidr-match-mode={mode}: expected nodes, or nothing"

    def kept_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that no pattern matches."""
        patterns = [re.compile(pattern) for pattern in self.exclude_node_label_patterns]
        return {
            key: value
            for key, value in labels.items()
            if not any(pattern.search(key) for pattern in patterns)
        }
