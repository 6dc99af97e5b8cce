"""What is said of nodes whose agent is ready, and of those whose agent is not.

Needs: nothing.   Gives: NodeSettings.
Source: Cilium 1.17, options of the operator.
"""

from __future__ import annotations

from cells.kubernetes import Selector
from cells.operator.objects import selector_of
from lifecycle import Settings


class NodeSettings(Settings, frozen=True):
    """Settings of the nodes cell."""

    remove_cilium_node_taints: bool = True
    """Take the taint from nodes whose agent is ready."""

    set_cilium_node_taints: bool = False
    """Put the taint on nodes whose agent is scheduled and not ready."""

    set_cilium_is_up_condition: bool = True
    """Say that the network of a node is available once its agent is ready."""

    agent_not_ready_taint_key: str = "node.cilium.io/agent-not-ready"
    """Key of the taint."""

    cilium_pod_labels: str = "k8s-app=cilium"
    """Which pods are agents, as a label selector."""

    cilium_pod_namespace: str = ""
    """Namespace of the agents' pods; that of the operator when empty."""

    def validate(self) -> None:
        """Refuse what is no selector, or one of all pods; raises ValueError of one line."""
        try:
            selector = self.agents
        except ValueError as error:
            raise ValueError(f"cilium-pod-labels={self.cilium_pod_labels}: {error}") from error
        if not selector.match_expressions:
            raise ValueError("cilium-pod-labels: expected the labels of the agents' pods, not none")

    @property
    def agents(self) -> Selector:
        """The labels of the agents' pods."""
        return selector_of(self.cilium_pod_labels)
