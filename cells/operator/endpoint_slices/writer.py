"""Writes CiliumEndpointSlices.

Needs: ClusterAPI.   Gives: SliceWriter, SliceLimit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from cells.kubernetes import CILIUM_ENDPOINT_SLICES, api
from cells.operator.api_server import ClusterAPI
from cells.operator.endpoint_slices.metrics import SliceCounts
from cells.operator.endpoint_slices.service import EndpointSlices
from cells.operator.endpoint_slices.settings import WriteLimit
from cells.operator.endpoint_slices.slices import SliceRow
from lifecycle import BatchError, ReadTable


class SliceLimit:
    """Turns of all who write slices, at the rate that counts for the cluster as it is."""

    def __init__(self, limit: Callable[[], WriteLimit]) -> None:
        self._limit = limit
        self._limited: tuple[WriteLimit, api.Bucket] | None = None

    async def turn(self) -> None:
        """Wait until another write is allowed."""
        limit = self._limit()
        if self._limited is None or self._limited[0] != limit:
            self._limited = limit, api.Bucket(limit.limit, limit.burst)
        await self._limited[1].take()


class SliceWriter:
    """The slices of namespaces that go first, or of all others, at the API server: a Target."""

    def __init__(
        self,
        server: ClusterAPI,
        slices: EndpointSlices,
        rows: ReadTable[SliceRow],
        limit: SliceLimit,
        counts: SliceCounts,
        *,
        first: bool,
    ) -> None:
        self._server = server
        self._slices = slices
        self._rows = rows
        self._limit = limit
        self._counts = counts
        self._first = first

    async def dump(self) -> Mapping[str, SliceRow]:
        """What each slice holds."""
        return {
            name: SliceRow(name, one.of_namespace, one.endpoints, self._first)
            for name, one in self._slices.live().items()
            if self._slices.goes_first(one.of_namespace) is self._first
        }

    async def put(self, batch: Mapping[str, SliceRow]) -> None:
        """Make or change them, at the rate that is allowed. Raises BatchError."""
        failures: dict[str, Exception] = {}
        for name, row in batch.items():
            await self._limit.turn()
            since = self._slices.waiting.pop(name, None)
            if since is not None:
                queue = self._counts.delays["fast" if self._first else "standard"]
                queue.observe(time.monotonic() - since)
            held = self._slices.live().get(name)
            before = frozenset(one.name for one in held.endpoints) if held is not None else frozenset()
            try:
                await self._write(row)
            except api.KubernetesError as error:
                failures[name] = error
            else:
                self._counts.written(before, frozenset(one.name for one in row.endpoints))
        self._told(len(batch), failures)

    async def drop(self, batch: Collection[str]) -> None:
        """Delete them, but those whose namespace has changed its turn. Raises BatchError."""
        failures: dict[str, Exception] = {}
        gone = [name for name in batch if self._rows.get(name) is None]
        for name in gone:
            await self._limit.turn()
            self._slices.waiting.pop(name, None)
            try:
                await self._server.client.delete(CILIUM_ENDPOINT_SLICES, name)
            except api.KubernetesError as error:
                failures[name] = error
        self._told(len(gone), failures)

    def _told(self, tried: int, failures: dict[str, Exception]) -> None:
        self._counts.outcomes["fail"] += len(failures)
        self._counts.outcomes["success"] += tried - len(failures)
        if failures:
            raise BatchError(failures)

    async def _write(self, row: SliceRow) -> None:
        client = self._server.client
        endpoints = msgspec.to_builtins(row.endpoints)
        kind = CILIUM_ENDPOINT_SLICES
        if row.name in self._slices.live():
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
