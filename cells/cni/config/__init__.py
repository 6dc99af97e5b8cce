"""Tells the container runtime that this node can have pods: writes the CNI configuration file.

Reconciler: the settings become one file, as soon as both sockets serve and not before, and it is kept so.
Needs:  AgentConfig, QueueLock, CniServer, Api.   Gives: CniConfig; it is invoked.
Why:    kubelet takes the file for readiness of the node's network, so it must be true when it appears.
"""

from collections.abc import Iterable

from cells.cni.config.settings import CniConfigSettings
from cells.cni.config.write import CniConfig
from cells.config import ChainingMode
from cells.observe.metrics import Collector, Family, one_of
from lifecycle import Member, config, group, invoke, module, provide

__all__ = ["CniConfig", "CniConfigSettings", "cell"]

_CHAINING = ("none", "aws-cni", "aws-vpc-cni", "calico", "flannel", "generic-veth")
"""Modes that Cilium's metric always tells."""


def chaining_metrics(settings: CniConfigSettings) -> Member[Collector]:
    """How our plugin works with others, as a metric."""

    async def collect() -> Iterable[Family]:
        name, text = "cilium_feature_datapath_chaining_enabled", "Chaining mode enabled on the agent"
        return [one_of(name, text, "mode", _CHAINING, settings.chaining_mode)]

    return Collector("chaining", collect)


def chaining_mode(settings: CniConfigSettings) -> Member[ChainingMode]:
    """How our plugin works with others, as the API shows it."""
    return ChainingMode(settings.chaining_mode)


cell = group(
    module(
        "chaining",
        "How the CNI plugin works with others",
        config(CniConfigSettings),
        provide(chaining_metrics, chaining_mode),
    ),
    module("cni-config", "CNI configuration file", provide(CniConfig), invoke(CniConfig)),
)
