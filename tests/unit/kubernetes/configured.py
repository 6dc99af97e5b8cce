"""The agent's configuration without a lock on the node."""

from __future__ import annotations

import structlog

from cells.config import AgentConfig, AgentSettings
from lifecycle import Cell, Lifecycle, supply


def node() -> Cell:
    """Return the agent's facts about its node, without a lock on it."""
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    return supply(known, type=AgentConfig)
