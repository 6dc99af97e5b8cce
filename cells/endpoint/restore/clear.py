"""Clears away what belongs to no endpoint any more: rows, policy maps, state, links.

For:   RestoredEndpoints.   Needs: the edges.   Gives: Live, Clearing.
Source: Cilium 1.17, what its start removes after restoring and its sweep of stale maps.

The rows of endpoints that live on are not touched, nor those that stand for the node itself.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from cells.cluster.identity import INIT, Scope, scope_of
from cells.cluster.ipcache import Ipcache, Prefix
from cells.endpoint import IPAddress, StateFiles
from cells.endpoint.restore.edges import LxcRow, RestoreLinks, StaleMaps
from cells.endpoint.restore.validate import abandoned
from cells.maps import IpcacheValue
from cells.node.netlink import LinkInfo
from lifecycle import HiveError, Logger


class Live(msgspec.Struct, frozen=True):
    """What must not be cleared away."""

    addresses: frozenset[IPAddress]
    links: frozenset[int]
    """Link indexes of the endpoints."""
    unsure: frozenset[int]
    """Ids of endpoints that could be neither restored nor given up: what carries them is left alone."""


def stale_rows(leftovers: Mapping[Prefix, IpcacheValue]) -> list[Prefix]:
    """Unclaimed rows of cilium_ipcache for addresses that endpoints of this node had."""
    return [
        prefix
        for prefix, row in leftovers.items()
        if prefix.endswith("/128" if ":" in prefix else "/32")
        and row.tunnel_endpoint.is_unspecified
        and (row.identity == INIT or scope_of(row.identity) is Scope.CLUSTER)
    ]


class Clearing:
    """Takes every step whatever becomes of the others, and remembers what failed."""

    def __init__(
        self,
        ipcache: Ipcache,
        left: StaleMaps,
        links: RestoreLinks,
        files: StateFiles,
        live: Live,
        log: Logger,
    ) -> None:
        self._ipcache = ipcache
        self._left = left
        self._links = links
        self._files = files
        self._live = live
        self._log = log
        self.troubles: list[str] = []
        """What could not be cleared, one line each."""

    async def run(self, rows: Sequence[LxcRow], links: Sequence[LinkInfo], failed: Collection[int]) -> None:
        """Remove unclaimed ``rows`` (of cilium_lxc) and ``links``, and the ``failed`` endpoints.

        The order is that of deleting an endpoint: first nothing leads to it, then it is gone.
        """
        live = self._live
        dead = [row for row in rows if not row.is_host and row.ip not in live.addresses]
        async with self._step("cilium_lxc"):
            for row in dead:
                self._left.drop_address(row.ip, row.endpoint_id)
        stale = stale_rows(self._ipcache.leftovers)
        async with self._step("cilium_ipcache"):
            self._ipcache.discard(stale)
        configs = []
        async with self._step("hive_endpoints"):
            configs = [ifindex for ifindex in self._left.configs() if ifindex not in live.links]
            for ifindex in configs:
                self._left.drop_config(ifindex)
        async with self._step("policy maps"):
            await self._left.sweep_policies()
        for number in failed:
            async with self._step(f"state of endpoint {number}"):
                self._files.remove(number)
        orphans = abandoned(links, live.links, live.unsure)
        if orphans:
            async with self._step("links"):
                await self._links.reap([link.ifindex for link in orphans])
        if dead or stale or configs or orphans:
            self._log.info(
                "left-overs of endpoints removed",
                addresses=len(dead),
                identities=len(stale),
                configs=len(configs),
                links=", ".join(link.name for link in orphans),
            )

    @asynccontextmanager
    async def _step(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except (OSError, HiveError) as error:
            self._log.warning("left-over of an endpoint not removed", what=what, error=str(error))
            self.troubles.append(f"{what}: {error}")
