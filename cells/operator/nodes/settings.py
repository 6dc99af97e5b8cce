"""What is said of nodes whose agent is ready, and of those whose agent is not.

Needs: nothing.   Gives: NodeSettings.
Source: Cilium 1.17, options of the operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from lifecycle import Settings, refuse

LABEL: Final = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


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
    """Labels of the agents' pods."""

    cilium_pod_namespace: str = ""
    """Namespace of the agents' pods; that of the operator when empty."""

    def validate(self) -> None:
        """Refuse labels that cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if any(not (LABEL.fullmatch(key) and equals) for key, equals, _ in self._parts()):
            yield f"cilium-pod-labels={self.cilium_pod_labels}: expected key=value,key=value"

    def _parts(self) -> list[tuple[str, str, str]]:
        return [one.strip().partition("=") for one in self.cilium_pod_labels.split(",")]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the agents' pods."""
        return {key: value.removeprefix("=") for key, _, value in self._parts()}
