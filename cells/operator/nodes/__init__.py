"""Nodes: the taint goes and the network counts as available once a node's agent is ready.

Controller: Nodes and the agents' pods in, the table ``node-marks`` out: what a Node does not say yet.
Reconciler: that table in, ``spec.taints`` and the condition NetworkUnavailable of Nodes out.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, NodeSettings.   Gives: ReadTable[NodeMark].
Why:        pods that need a network are not to be scheduled where there is none yet.
"""

from typing import Final

from cells.operator.api_server import ClusterAPI
from cells.operator.nodes.marks import NodeMark, node_marks
from cells.operator.nodes.settings import NodeSettings
from cells.operator.nodes.writer import MarkWriter
from lifecycle import Jobs, ReadTable, Reconciler, config, invoke, minutes, module, provide

__all__ = ["NodeMark", "NodeSettings", "cell"]

AGAIN: Final = minutes(1)


def write(server: ClusterAPI, marks: ReadTable[NodeMark], settings: NodeSettings, jobs: Jobs) -> None:
    """Have marks written."""
    writer = MarkWriter(server, settings.agent_not_ready_taint_key)
    jobs.observe("write", Reconciler(marks, writer, full_every=AGAIN, put_early=True))


cell = module(
    "nodes",
    "Taints and conditions of nodes",
    config(NodeSettings),
    provide(node_marks),
    invoke(write),
)
