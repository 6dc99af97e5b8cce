"""Writes CiliumEndpointSlices.

Needs: ClusterAPI.   Gives: SliceWriter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from cells.kubernetes import CILIUM_ENDPOINT_SLICES, CiliumEndpointSlice, api
from cells.operator.api_server import ClusterAPI
from cells.operator.endpoint_slices.settings import WriteLimit
from cells.operator.endpoint_slices.slices import SliceRow
from lifecycle import BatchError


class SliceWriter:
    """The slices at the API server: a Target."""

    def __init__(
        self,
        server: ClusterAPI,
        live: Callable[[], Mapping[str, CiliumEndpointSlice]],
        limit: Callable[[], WriteLimit],
    ) -> None:
        self._server = server
        self._live = live
        self._limit = limit
        self._limited: tuple[WriteLimit, api.Bucket] | None = None

    async def dump(self) -> Mapping[str, SliceRow]:
        """What each slice holds."""
        return {name: SliceRow(name, one.of_namespace, one.endpoints) for name, one in self._live().items()}

    async def put(self, batch: Mapping[str, SliceRow]) -> None:
        """Make or change them, at the rate that is allowed. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name, row in batch.items():
            await self._turn()
            try:
                await self._write(row)
            except api.KubernetesError as error:
                failures[name] = error
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """Delete them. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name in batch:
            await self._turn()
            try:
                await self._server.client.delete(CILIUM_ENDPOINT_SLICES, name)
            except api.KubernetesError as error:
                failures[name] = error
        if failures:
            raise BatchError(failures)

    async def _write(self, row: SliceRow) -> None:
        client = self._server.client
        endpoints = msgspec.to_builtins(row.endpoints)
        kind = CILIUM_ENDPOINT_SLICES
        if row.name in self._live():
            try:
                await client.patch(kind, row.name, {"namespace": row.namespace, "endpoints": endpoints})
            except api.NotFoundError:
                pass  # somebody deleted it
            else:
                return
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": row.name},
            "namespace": row.namespace,
            "endpoints": endpoints,
        }
        try:
            await client.create(kind, body)
        except api.ConflictError as error:
            if not error.exists:
                raise
            await client.patch(kind, row.name, {"namespace": row.namespace, "endpoints": endpoints})

    async def _turn(self) -> None:
        """Wait until another write is allowed."""
        limit = self._limit()
        if self._limited is None or self._limited[0] != limit:
            self._limited = limit, api.Bucket(limit.limit, limit.burst)
        await self._limited[1].take()
