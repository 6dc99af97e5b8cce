"""Removes the agent-not-ready taint of Nodes with a ready agent, and sets their NetworkUnavailable condition.

Table ``node-marks``: the pending changes of each Node, derived from Nodes and agents' pods. A reconciler
writes them to ``spec.taints`` and to the conditions. Pods that need the network are thus not scheduled before
it works.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from cells.kubernetes.objects.core import NODES, Node
from cells.kubernetes.objects.kind import LabelSelector, selector_of
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.objects import CLUSTER_PODS, ClusterObjects, ClusterPod
from cells.operator.options import ServedCluster
from lifecycle import (
    Jobs,
    ReadTable,
    Reconciler,
    Settings,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["NodeMark", "OperatorNodeSettings", "cell"]


# The selector of agents' pods, and which taints and conditions are written.
#
# Source: Cilium 1.17, options of the operator.


class OperatorNodeSettings(Settings, frozen=True):
    """Settings of the nodes cell."""

    remove_cilium_node_taints: bool = True
    """Remove the taint from nodes with a ready agent."""

    set_cilium_node_taints: bool = False
    """Add the taint to nodes with a scheduled agent that is not ready."""

    set_cilium_is_up_condition: bool = True
    """Set NetworkUnavailable to false on nodes with a ready agent."""

    agent_not_ready_taint_key: str = "node.cilium.io/agent-not-ready"
    """Key of the taint."""

    cilium_pod_labels: str = "k8s-app=cilium"
    """Label selector of the agents' pods."""

    cilium_pod_namespace: str = ""
    """Namespace of the agents' pods; empty: that of the operator."""

    def validate(self) -> None:
        """Reject an invalid selector, and one that selects all pods. Raises ValueError."""
        try:
            selector = self.agents
        except ValueError as error:
            raise ValueError(f"cilium-pod-labels={self.cilium_pod_labels}: {error}") from error
        if not selector.match_expressions:
            raise ValueError("cilium-pod-labels: expected the labels of the agents' pods, not none")

    @property
    def agents(self) -> LabelSelector:
        """The selector of the agents' pods."""
        return selector_of(self.cilium_pod_labels)


# Finds Nodes with a taint or condition that does not match their agent's state.

UNAVAILABLE: Final = "NetworkUnavailable"
IS_UP: Final = "CiliumIsUp"


class NodeMark(msgspec.Struct, frozen=True, gc=False):
    """The pending changes of a Node."""

    name: str
    untaint: bool = False
    taint: bool = False
    available: bool = False


class Agents(msgspec.Struct, frozen=True, gc=False):
    """The numbers of ready and of other agents' pods on a node."""

    node: str
    ready: int = 0
    waiting: int = 0


def node_marks(
    settings: OperatorNodeSettings, cluster: ServedCluster, objects: ClusterObjects
) -> ReadTable[str, NodeMark]:
    """Derive the pending changes of Nodes from Nodes and agents' pods, by name."""
    namespace = settings.cilium_pod_namespace or cluster.namespace
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


def _marks(settings: OperatorNodeSettings, pair: tuple[Node, Agents | None]) -> Iterator[NodeMark]:
    node, agents = pair
    if agents is None:
        return
    ready = agents.ready > 0
    tainted = any(one.key == settings.agent_not_ready_taint_key for one in node.spec.taints or ())
    conditions = {one.type: one for one in node.status.conditions or ()}
    unavailable = conditions.get(UNAVAILABLE)
    up = unavailable is not None and unavailable.status == "False" and unavailable.reason == IS_UP
    mark = NodeMark(
        node.name,
        untaint=ready and tainted and settings.remove_cilium_node_taints,
        taint=not ready and not tainted and settings.set_cilium_node_taints,
        available=ready and not up and settings.set_cilium_is_up_condition,
    )
    if mark.untaint or mark.taint or mark.available:
        yield mark


# Writes taints and conditions of Nodes.
#
# Source: Cilium 1.17. The JSON patch of taints has a test operation, so that concurrent changes of other
#         taints are not lost. The condition is merged by type.

MERGE = b"application/strategic-merge-patch+json"


class MarkWriter(ObjectWriter[str, NodeMark]):
    """Writes taints and conditions of Nodes."""

    def __init__(self, server: ClusterAPI, taint: str) -> None:
        super().__init__(server)
        self._taint = taint

    async def write(self, patch: NodeMark) -> None:
        """See ObjectWriter."""
        if patch.untaint or patch.taint:
            await self._change_taints(patch)
        if patch.available:
            await self._write_available(patch.name)

    async def _change_taints(self, mark: NodeMark) -> None:
        live = json.loads(await self.server.client.raw("GET", NODES.path("", mark.name)))
        old: list[dict[str, Any]] = live["spec"].get("taints") or []
        new = [one for one in old if one.get("key") != self._taint]
        if mark.taint:
            new.append({"key": self._taint, "effect": "NoSchedule"})
        if new == old:
            return
        steps: list[dict[str, Any]] = [{"op": "test", "path": "/spec/taints", "value": old}] if old else []
        steps.append({"op": "replace" if old else "add", "path": "/spec/taints", "value": new})
        await self.server.client.patch(NODES, mark.name, steps, how="json")

    async def _write_available(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": UNAVAILABLE,
            "status": "False",
            "reason": IS_UP,
            "message": "Cilium is running on this node",
            "lastTransitionTime": now,
            "lastHeartbeatTime": now,
        }
        body = json.dumps({"status": {"conditions": [condition]}}).encode()
        path = NODES.path("", name, "status")
        query = {"fieldManager": self.server.client.manager}
        await self.server.client.raw("PATCH", path, query, body, MERGE)


AGAIN: Final = minutes(1)


def write(
    server: ClusterAPI, marks: ReadTable[str, NodeMark], settings: OperatorNodeSettings, jobs: Jobs
) -> None:
    """Start the reconciler of Nodes."""
    writer = MarkWriter(server, settings.agent_not_ready_taint_key)
    jobs.observe("write", Reconciler(marks, writer, full_every=AGAIN, put_early=True))


cell = module(
    "nodes",
    "Taints and conditions of nodes",
    config(OperatorNodeSettings),
    provide(node_marks),
    invoke(write),
)
