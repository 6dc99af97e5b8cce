"""The agent's node-wide configuration, and its claim on the node.

Source: reads the settings, gives every other cell the resolved paths and names.
Needs:  AgentSettings.   Gives: AgentConfig.
Why:    a cell that takes an AgentConfig starts after its hook, so it knows that the directories exist,
        that bpffs is mounted, that the process may use it, and that no other agent has this node.
"""

from cells.config.chaining import ChainingMode
from cells.config.kernel import version_of
from cells.config.node import AgentConfig
from cells.config.settings import AgentSettings
from lifecycle import config, module, provide

__all__ = ["AgentConfig", "AgentSettings", "ChainingMode", "cell", "version_of"]

cell = module(
    "config",
    "Configuration and the claim on the node",
    config(AgentSettings),
    provide(AgentConfig),
)
