"""Tells the container runtime that this node can have pods: writes the CNI configuration file.

Reconciler: the settings become one file, as soon as both sockets serve and not before, and it is kept so.
Needs:  AgentConfig, DeleteQueue, CniServer, Api.   Gives: CniConfig; it is invoked.
Why:    kubelet takes the file for readiness of the node's network, so it must be true when it appears.
"""

from cells.cni_config.settings import CniConfigSettings
from cells.cni_config.write import CniConfig
from lifecycle import config, invoke, module, provide

__all__ = ["CniConfig", "CniConfigSettings", "cell"]

cell = module(
    "cni-config",
    "CNI configuration file",
    config(CniConfigSettings),
    provide(CniConfig),
    invoke(CniConfig),
)
