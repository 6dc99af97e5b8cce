"""Writes what CiliumNodes do not say yet.

Needs: ClusterAPI.   Gives: NodeWriter, with_pools().
Why:   merge patches: two fields are the operator's, the others are not touched, so nothing an agent writes at
       the same moment is lost. The uid says which node is meant: one made anew under the name is another.
       Ranges of pools are written by agents, too, who give them back: they are read, compared with what was
       decided upon, and written over that version of the object alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from cells.kubernetes import CILIUM_NODES, AllocatedPool, api
from cells.operator.api_server import ClusterAPI
from cells.operator.pod_cidrs.ledger import NodeWish, PoolsWish, ranges_said
from lifecycle import BatchError

AT_ONCE: Final = 8
"""Requests under way together; more of them make each dearer, and nothing faster."""


def with_pools(wish: NodeWish, pools: PoolsWish, live: dict[str, Any]) -> dict[str, Any] | None:
    """The object with its new ranges; None for another node, or one that says something else by now.

    That one is looked at as it comes by the watch.
    """
    if live["metadata"].get("uid") != wish.uid:
        return None
    ipam = live.setdefault("spec", {}).setdefault("ipam", {})
    told = ipam.setdefault("pools", {})
    if ranges_said(msgspec.convert(told.get("allocated") or [], list[AllocatedPool])) != pools.said:
        return None
    told["allocated"] = msgspec.to_builtins(pools.allocated)
    return live


class NodeWriter:
    """CiliumNodes, as far as the operator writes them: a Target."""

    def __init__(self, server: ClusterAPI) -> None:
        self._server = server

    async def dump(self) -> Mapping[str, NodeWish]:
        """Nothing: a wish goes away once its node says it."""
        return {}

    async def put(self, batch: Mapping[str, NodeWish]) -> None:
        """Write them, several at a time. Raises BatchError."""
        failures: dict[str, Exception] = {}
        waiting = iter(batch.values())

        async def work() -> None:
            for wish in waiting:
                try:
                    await self._write(wish)
                except api.KubernetesError as error:
                    failures[wish.name] = error

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, len(batch))):
                group.start_soon(work)
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[str]) -> None:
        """A wish that is fulfilled, or whose node is gone, leaves nothing to do."""

    async def _write(self, wish: NodeWish) -> None:
        try:
            if wish.cidrs is not None:
                await self._patch(wish, {"spec": {"ipam": {"podCIDRs": list(wish.cidrs)}}})
            if wish.pools is not None:
                await self._server.client.update(
                    CILIUM_NODES, wish.name, partial(with_pools, wish, wish.pools)
                )
            if wish.says:
                status = {"ipam": {"operator-status": {"error": wish.error or None}}}
                await self._patch(wish, {"status": status}, "status")
        except api.NotFoundError:
            return
        except api.ConflictError as error:
            if "uid" not in str(error).lower():
                raise  # else it is another node of that name: its own wish follows

    async def _patch(self, wish: NodeWish, change: dict[str, Any], subresource: str = "") -> None:
        body = {"metadata": {"uid": wish.uid}, **change}
        await self._server.client.patch(CILIUM_NODES, wish.name, body, subresource=subresource)
