"""The agent's configuration, without a claim on the node."""

from __future__ import annotations

import structlog

from cells.config import AgentConfig, AgentSettings
from lifecycle import Cell, Lifecycle, supply


def node() -> Cell:
    """What the agent knows of its node, without claiming it."""
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    return supply(known, type=AgentConfig)
