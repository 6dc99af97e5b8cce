"""Deletes CiliumNodes whose Node is gone.

Needs: ClusterAPI, ClusterObjects, GCSettings.   Gives: NodeGC.
Source: Cilium 1.17: found in two passes, since a node that is being registered anew has its Node deleted and
        made again; with ownerReferences Kubernetes itself deletes it.
"""

from __future__ import annotations

from cells.kubernetes import CILIUM_NODES, NODES, api
from cells.operator.api_server import ClusterAPI
from cells.operator.gc.settings import GCSettings
from cells.operator.objects import ClusterObjects
from lifecycle import Jobs, Logger


class NodeGC:
    """Looks every nodes-gc-interval."""

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self._nodes = objects.table(NODES)
        self._cilium_nodes = objects.table(CILIUM_NODES)
        self._suspects: dict[str, str] = {}
        """Name -> uid of those that had no Node the last time."""
        if settings.nodes_gc_interval:
            jobs.timer("nodes", self.collect, settings.nodes_gc_interval)

    async def collect(self) -> None:
        """One pass. Raises KubernetesError."""
        await self._nodes.wait_initialized()
        await self._cilium_nodes.wait_initialized()
        orphans = {
            one.name: one.metadata.uid
            for one in self._cilium_nodes.all()
            if not one.metadata.owner_references and self._nodes.get(("", one.name)) is None
        }
        found_twice = orphans.items() & self._suspects.items()
        self._suspects = orphans
        for name, uid in sorted(found_twice):
            try:
                await self._server.client.delete(CILIUM_NODES, name, uid=uid)
            except api.ConflictError:
                continue  # made anew meanwhile
            self._log.info("CiliumNode without a Node deleted", node=name)
