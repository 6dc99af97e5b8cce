"""Node information in the API's answers.

Needs: nothing.   Gives: NodeStatus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cells.api.operations.node import config_mapping
from cells.api.operations.status import mapping as status_mapping
from cells.datapath import MonitorNotifications


class NodeStatus(Protocol):
    """Node information in answers, besides endpoints and addresses."""

    def node(self) -> config_mapping.NodeFacts:
        """Routers, pod CIDRs and MTU."""
        ...

    def audited(self) -> bool:
        """Whether the node's policy drops nothing and only tells what it would drop."""
        ...

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        """Have the datapath tell this of packets from now on; raises OSError."""
        ...

    def log_debug(self, on: bool) -> None:
        """Have the agent log what helps to find a fault, or no longer."""
        ...

    def settings(self) -> Mapping[str, object]:
        """The daemon's configuration, for people."""
        ...

    def version(self) -> tuple[str, str]:
        """The agent's version, and what tells two builds of it apart."""
        ...

    def status(self) -> status_mapping.StatusFacts:
        """What GET /healthz tells besides the verdict."""
        ...
