"""Keeps the CiliumEndpoint objects of this node's pods up to date.

Reconciler: Table[PodEndpoint] in, objects of an API server out.
Needs:  KubernetesAPI, Resources, EndpointObjects, Table[PodEndpoint], ReadTable[ClusterNode].
Gives:  CiliumEndpointSync.
Source: Cilium 1.17, sync-to-k8s-ciliumendpoint: updates test the UID, lest another object is changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final

from cells.cluster.endpoints import EndpointObjects
from cells.cluster.nodes import ClusterNode
from cells.endpoint.ciliumendpoint.model import PodEndpoint, body, of_object, owners, status
from cells.endpoint.ciliumendpoint.published import PodEndpoints
from cells.kubernetes import (
    CILIUM_ENDPOINTS,
    KNOWN_ENDPOINTS,
    NODE_NAME,
    CiliumEndpointStatus,
    ForgottenObject,
    Key,
    KnownEndpoint,
    KubernetesAPI,
    KubernetesSettings,
    Resources,
)
from lifecycle import (
    Backoff,
    BatchError,
    Change,
    Jobs,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    after,
    minutes,
)

SWEEP: Final = minutes(5)
BATCH: Final = 16
"""Objects written before others are looked at again."""


class CiliumEndpointObjects:
    """The reconciler's target: the objects of pods on this node."""

    def __init__(
        self,
        api: KubernetesAPI,
        wanted: Table[PodEndpoint],
        table: Table[KnownEndpoint],
        nodes: ReadTable[ClusterNode],
        forgotten: Table[ForgottenObject],
    ) -> None:
        self._wanted = wanted
        self._forgotten = forgotten
        self._api = api
        self._table = table
        self._nodes = nodes

    async def dump(self) -> Mapping[Key, PodEndpoint]:
        """What the objects that say they are of this node say."""
        own = self._own_addresses()
        lost = {
            (one.namespace, one.name) for one in self._forgotten.by("kind").get(CILIUM_ENDPOINTS.qualified)
        }
        found = [row for row in self._table.all() if row.node in own and row.key not in lost]
        return {row.key: self._shown(row) for row in found}

    def _shown(self, row: KnownEndpoint) -> PodEndpoint:
        """What is wanted, where the object says that; else something that is not."""
        wanted = self._wanted.get(row.key)
        if wanted is not None and wanted.said == row.said:
            return wanted
        nothing = CiliumEndpointStatus()
        return PodEndpoint(
            namespace=row.namespace,
            name=row.name,
            pod="",
            pod_uid="",
            node_name="",
            labels={},
            status=nothing,
        )

    def _own_addresses(self) -> set[str]:
        return {str(each.ip) for node in self._nodes.all() if node.local for each in node.addresses}

    async def put(self, batch: Mapping[Key, PodEndpoint]) -> None:
        """Create objects, or change their status. Raises BatchError."""
        await self._each(batch, batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Delete them; only the object that was seen. Raises BatchError."""
        await self._each(batch, {})

    async def _each(self, keys: Collection[Key], wanted: Mapping[Key, PodEndpoint]) -> None:
        from cells.kubernetes import api  # loaded where there is a server

        failures: dict[Key, Exception] = {}
        for key in keys:
            await self._api.reachable()
            try:
                if (one := wanted.get(key)) is not None:
                    await self._write(one)
                else:
                    await self._drop(key)
            except api.KubernetesError as error:
                failures[key] = error
        if failures:
            raise BatchError(failures)

    async def _write(self, wanted: PodEndpoint) -> None:
        from cells.kubernetes import api

        client = self._api.client
        if wanted.key not in self._table:
            try:
                await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            except api.ConflictError:  # the watch is late, or a former pod of the name left it
                pass
            else:
                return
        try:
            there = await client.get(CILIUM_ENDPOINTS, wanted.name, wanted.namespace)
        except api.NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        held = of_object(there)
        if held == wanted:
            return
        if held.pod_uid and held.pod_uid != wanted.pod_uid:
            await self._delete(wanted.key, there.metadata.uid)
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        changes: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": there.metadata.uid},
            {"op": "add", "path": "/status", "value": status(wanted)},
        ]
        if held.node_name != wanted.node_name:
            marked = {**there.annotations, NODE_NAME: wanted.node_name}
            changes.append({"op": "add", "path": "/metadata/annotations", "value": marked})
        if (held.labels, held.pod_uid) != (wanted.labels, wanted.pod_uid):
            changes += [
                {"op": "add", "path": "/metadata/labels", "value": dict(wanted.labels)},
                {"op": "add", "path": "/metadata/ownerReferences", "value": owners(wanted)},
            ]
        try:
            await client.patch(CILIUM_ENDPOINTS, wanted.name, changes, wanted.namespace, how="json")
        except api.NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)

    async def _drop(self, key: Key) -> None:
        """Delete the object, if it still says that it is of this node."""
        from cells.kubernetes import api

        try:
            there = await self._api.client.get(CILIUM_ENDPOINTS, key[1], key[0])
        except api.NotFoundError:
            return
        networking = there.status.networking
        if networking is not None and networking.node in self._own_addresses():
            await self._delete(key, there.metadata.uid)

    async def _delete(self, key: Key, uid: str) -> None:
        from cells.kubernetes import api

        try:
            await self._api.client.delete(CILIUM_ENDPOINTS, key[1], key[0], uid=uid)
        except api.ConflictError:  # another one has the name by now: nothing of ours
            return


@after(PodEndpoints)
class CiliumEndpointSync:
    """Has objects follow, where there is an API server; nothing is deleted before all of them are known."""

    def __init__(
        self,
        settings: KubernetesSettings,
        api: KubernetesAPI,
        wanted: Table[PodEndpoint],
        resources: Resources,
        nodes: ReadTable[ClusterNode],
        forgotten: Table[ForgottenObject],
        told: EndpointObjects | None,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._wanted = wanted
        if told is not None and not told.served:
            return
        self._table: Table[KnownEndpoint] = resources.table(KNOWN_ENDPOINTS)
        if not settings.asks_api_server:
            return
        objects = CiliumEndpointObjects(api, wanted, self._table, nodes, forgotten)
        backoff = Backoff(first=1.0, maximum=60.0)
        self._reconciler: Reconciler[Key, PodEndpoint] = Reconciler(
            wanted,
            objects,
            full_every=SWEEP,
            after=self._table.wait_initialized,
            batch=BATCH,
            backoff=backoff,
        )
        tables.add(self._reconciler.statuses)
        jobs.observe("sync-to-k8s-ciliumendpoint", self._reconciler)
        jobs.observe("changed by others", self._changes, self._look)
        jobs.observe("lost objects", forgotten.changes, self._write_lost)

    async def _changes(self) -> AsyncIterator[Sequence[Change[KnownEndpoint]]]:
        await self._table.wait_initialized()
        async for changes in self._table.changes(self._table.revision):
            yield changes

    async def _write_lost(self, _: object) -> None:
        """What the server has lost is written again."""
        self._reconciler.trigger()

    async def _look(self, changes: Sequence[Change[KnownEndpoint]]) -> None:
        """Objects of ours that were changed are corrected."""
        for change in changes:
            wanted = self._wanted.get(change.key)
            if wanted is not None and (change.row is None or change.row.said != wanted.said):
                self._reconciler.trigger()
                return
