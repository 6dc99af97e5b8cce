"""Finds nodes that say something else than how their agent is.

Needs: NodeSettings, OperatorOptions, ClusterObjects.   Gives: NodeMark, node_marks().
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from cells.kubernetes import NODES, Node
from cells.operator.nodes.settings import NodeSettings
from cells.operator.objects import CLUSTER_PODS, ClusterObjects, ClusterPod
from cells.operator.options import OperatorOptions
from lifecycle import ReadTable

UNAVAILABLE: Final = "NetworkUnavailable"
IS_UP: Final = "CiliumIsUp"


class NodeMark(msgspec.Struct, frozen=True, gc=False):
    """What is to be changed of a Node."""

    name: str
    untaint: bool = False
    taint: bool = False
    available: bool = False


class Agents(msgspec.Struct, frozen=True, gc=False):
    """The agents' pods of a node."""

    node: str
    ready: int = 0
    waiting: int = 0


def node_marks(
    settings: NodeSettings, options: OperatorOptions, objects: ClusterObjects
) -> ReadTable[NodeMark]:
    """What Nodes do not say yet, by namespace and name; it follows nodes and the agents' pods."""
    namespace = settings.cilium_pod_namespace or options.namespace
    selector = settings.agents

    def is_agent(pod: ClusterPod) -> bool:
        return pod.namespace == namespace and bool(pod.spec.node_name) and selector.matches(pod.labels)

    agents = (
        objects.table(CLUSTER_PODS)
        .filter(is_agent, name="agent-pods")
        .aggregate(lambda pod: pod.spec.node_name, zero=Agents, add=_with, subtract=_without, name="agents")
    )
    pairs = objects.table(NODES).left_join(
        agents, lambda node, found: (node, found), on=lambda node: node.name, name="nodes-and-agents"
    )
    return pairs.flat_map(partial(_marks, settings), key=lambda mark: mark.name, name="node-marks")


def _with(agents: Agents, pod: ClusterPod) -> Agents:
    return Agents(agents.node, agents.ready + pod.ready, agents.waiting + (not pod.ready))


def _without(agents: Agents, pod: ClusterPod) -> Agents:
    return Agents(agents.node, agents.ready - pod.ready, agents.waiting - (not pod.ready))


def _marks(settings: NodeSettings, pair: tuple[Node, Agents | None]) -> Iterator[NodeMark]:
    node, agents = pair
    if agents is None:
        return
    ready = agents.ready > 0
    tainted = any(one.key == settings.agent_not_ready_taint_key for one in node.spec.taints or ())
    conditions = {one.type: one for one in node.status.conditions or ()}
    told = conditions.get(UNAVAILABLE)
    up = told is not None and told.status == "False" and told.reason == IS_UP
    mark = NodeMark(
        node.name,
        untaint=ready and tainted and settings.remove_cilium_node_taints,
        taint=not ready and not tainted and settings.set_cilium_node_taints,
        available=ready and not up and settings.set_cilium_is_up_condition,
    )
    if mark.untaint or mark.taint or mark.available:
        yield mark
