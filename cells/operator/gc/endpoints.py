"""Deletes CiliumEndpoints whose pod is gone or has ended.

Needs: ClusterAPI, ClusterObjects, GCSettings.   Gives: EndpointGC.
Source: Cilium 1.17, operator/endpointgc. An endpoint is asked for again before it goes: its pod may have come
        after the table of pods was read, so one pass more is waited.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cells.kubernetes import CILIUM_ENDPOINTS, CILIUM_NODES, CiliumEndpoint, Key, Meta, api
from cells.operator.api_server import ClusterAPI
from cells.operator.gc.settings import GCSettings
from cells.operator.objects import CLUSTER_PODS, ClusterObjects
from lifecycle import Jobs, Logger

PAGE: Final = 500
"""Objects of a list that are asked for at once."""


class _PageMeta(msgspec.Struct, frozen=True):
    next: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct, frozen=True):
    metadata: Meta


class _Page(msgspec.Struct, frozen=True):
    metadata: _PageMeta = _PageMeta()
    items: tuple[_Item, ...] = ()


_PAGE: Final = msgspec.json.Decoder(_Page)


class EndpointGC:
    """Looks every cilium-endpoint-gc-interval; where there are to be none, once, and deletes them all."""

    def __init__(
        self, settings: GCSettings, server: ClusterAPI, objects: ClusterObjects, *, jobs: Jobs, log: Logger
    ) -> None:
        self._server = server
        self._log = log
        self._suspects: dict[Key, str] = {}
        self.deleted = 0
        """How many were deleted."""
        self.failed = 0
        """How many could not be."""
        if not objects.endpoints:
            jobs.one_shot("clear", self.clear)
            return
        self._endpoints = objects.table(CILIUM_ENDPOINTS)
        self._pods = objects.table(CLUSTER_PODS)
        self._nodes = objects.table(CILIUM_NODES)
        jobs.timer("endpoints", self.collect, settings.cilium_endpoint_gc_interval)

    async def clear(self) -> None:
        """Delete every CiliumEndpoint: nobody writes them any more, or reads them. Raises KubernetesError."""
        client, query = self._server.client, {"limit": str(PAGE)}
        while True:
            try:
                page = _PAGE.decode(await client.page(CILIUM_ENDPOINTS, query))
            except api.NotFoundError:
                return  # the resource itself is not there
            for one in page.items:
                meta = one.metadata
                if await client.delete(CILIUM_ENDPOINTS, meta.name, meta.namespace, uid=meta.uid):
                    self.deleted += 1
            if not page.metadata.next:
                break
            query = {"limit": str(PAGE), "continue": page.metadata.next}
        if self.deleted:
            self._log.info("CiliumEndpoints deleted: there are to be none", count=self.deleted)

    async def collect(self) -> None:
        """One pass. Raises KubernetesError when some could not be deleted."""
        for table in (self._endpoints, self._pods, self._nodes):
            await table.wait_initialized()
        orphans = {one.key: one.metadata.uid for one in self._endpoints.all() if not self._needed(one)}
        found_twice = orphans.items() & self._suspects.items()
        self._suspects = orphans
        failure: api.KubernetesError | None = None
        for (namespace, name), uid in sorted(found_twice):
            try:
                await self._server.client.delete(CILIUM_ENDPOINTS, name, namespace, uid=uid)
            except api.ConflictError:
                continue  # made anew meanwhile
            except api.KubernetesError as error:
                self.failed += 1
                failure = error
                continue
            self.deleted += 1
            self._log.info("CiliumEndpoint without a pod deleted", endpoint=f"{namespace}/{name}")
        if failure is not None:
            raise failure

    def _needed(self, endpoint: CiliumEndpoint) -> bool:
        """Whether its pod, or else what owns it, is there."""
        pod = self._pods.get(endpoint.key)
        if pod is not None:
            return not pod.finished
        for owner in endpoint.metadata.owner_references or ():
            if owner.kind == "Pod":
                pod = self._pods.get((endpoint.namespace, owner.name))
                return pod is not None and not pod.finished
            if owner.kind == "CiliumNode":
                return self._nodes.get(("", owner.name)) is not None
        return False
