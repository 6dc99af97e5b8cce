"""The eBPF programs that forward pods' packets, in the kernel and on interfaces.

Edge: compiled C (``bpf/``, made into ``objects/`` by ``build.py``) loaded onto the node's maps with libbpf.
Needs:  AgentConfig, Maps, HostLinks.   Gives: Datapath, and Collector, which removes connections.
Why:    programs are shared by all endpoints and differ only through maps, so adding a pod loads nothing, and
        an upgrade replaces three entries of one map: small dispatchers stay attached and jump to whatever
        generation is in force. What is in the kernel forwards on while no agent runs.
"""

from cells.datapath.collector import Collected, Collector
from cells.datapath.datapath import Datapath
from cells.datapath.libbpf import LoadError
from cells.datapath.settings import AGGREGATION, DatapathSettings, Telling
from lifecycle import config, module, provide

__all__ = [
    "AGGREGATION",
    "Collected",
    "Collector",
    "Datapath",
    "DatapathSettings",
    "LoadError",
    "Telling",
    "cell",
]

cell = module("datapath", "eBPF programs of the node", config(DatapathSettings), provide(Datapath, Collector))
