"""Clients outside the node: by which of its addresses services are served to them.

Controller: the node's devices in, the table ``node-port-addresses`` out: where node ports are served.
Reconciler: the table ``node-port`` follows them; it is kept in ``hive_nodeport``, by which the programs on
        native devices know that clients outside are served, and what packets to other nodes come from.
Needs:  ServiceSettings, DatapathSettings, Table[Device], NodeAddresses, Maps.   Gives: NodePorts.
Why:    addresses come and go; a node port is served at those there are.
"""

from cells.services.outside.addresses import IPAddress, NodePortAddress
from cells.services.outside.node_ports import KernelFacts, NodePortMap, NodePorts
from lifecycle import invoke, module, provide

__all__ = ["IPAddress", "NodePortAddress", "NodePortMap", "NodePorts", "cell"]

cell = module(
    "node-ports",
    "Clients outside the node",
    provide(NodePorts, KernelFacts.provided),
    invoke(NodePorts),
)
